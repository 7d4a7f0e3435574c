# SPDX-License-Identifier: BSD-3-Clause
"""Numbers on which all ranks agree, by a collective of the CPU that does not synchronise a device."""

import torch
import torch.distributed as dist


class Agreement:
    """All-reduces a few integers over the ranks of a group; returns them without torch.distributed.

    Args:
        group: the process group; None: the default group, if there is one at the first use.
    """

    def __init__(self, group=None):
        self._given, self._group, self.joined = group, None, False

    def __getstate__(self):
        # Process groups belong to the process; a copy joins again.
        return {"_given": None, "_group": None, "joined": False}

    @property
    def is_first(self):
        """True if this process prints for all of them."""
        return not _initialised() or dist.get_rank(self._given) == 0

    def largest(self, numbers):
        """The largest value of each number on any rank."""
        return self._reduce(numbers, dist.ReduceOp.MAX) if _initialised() else list(numbers)

    def smallest(self, numbers):
        """The smallest value of each number on any rank."""
        return self._reduce(numbers, dist.ReduceOp.MIN) if _initialised() else list(numbers)

    def check_same(self, layers):
        """Raises ValueError on every rank if the numbers of planned layers differ."""
        fewest, most = self.largest([-layers, layers])
        if -fewest != most:
            raise ValueError(
                f"liger.transformers.checkpoint: the ranks plan between {-fewest} and {most} layers; give the ranks "
                "that run the same layers a process group of their own, as group="
            )

    def _reduce(self, numbers, operation):
        if not self.joined:
            self._join()
        device = self._device
        tensor = torch.tensor(list(numbers), dtype=torch.int64, device=device)
        dist.all_reduce(tensor, operation, group=self._group)
        return tensor.tolist()

    def _join(self):
        self.joined, self._group, self._device = True, self._given, torch.device("cpu")
        if "gloo" in dist.get_backend(self._given) or "cpu:" in dist.get_backend(self._given):
            return
        if dist.is_gloo_available():
            ranks = dist.get_process_group_ranks(self._given or dist.group.WORLD)
            self._group = dist.new_group(
                ranks, backend="gloo", use_local_synchronization=self._given is not None
            )
        else:
            self._device = torch.device("cuda", torch.cuda.current_device())


def _initialised():
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
