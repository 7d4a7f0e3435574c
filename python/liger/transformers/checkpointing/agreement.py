# SPDX-License-Identifier: BSD-3-Clause
"""Numbers on which all ranks agree, by a collective of the CPU that does not synchronise a device."""

import torch
import torch.distributed as dist


def check(group):
    """Raises TypeError for an argument ``group`` that is no process group of this rank."""
    if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            "liger.transformers.checkpoint: group must be a process group of this rank or None, not "
            f"{type(group).__name__}"
        )


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
        ranks = dist.get_process_group_ranks(self._given or dist.group.WORLD)
        _call_roll(ranks)
        self.joined, self._group, self._device = True, self._given, torch.device("cpu")
        if dist.is_gloo_available():
            # Not the given group: DDP would meet these collectives if a rank left one out.
            self._group = dist.new_group(
                ranks, backend="gloo", use_local_synchronization=self._given is not None
            )
        else:
            self._device = torch.device("cuda", torch.cuda.current_device())


def _call_roll(ranks):
    """Raises ValueError unless all ranks call this as often as this rank within :func:`_patience`.

    By the store of the default group, which waits in any backend and says who is missing.
    """
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    counter = f"liger.transformers.checkpoint {ranks} {rank}"
    number = store.add(counter, 1)
    names = {other: f"liger.transformers.checkpoint {ranks} {other} {number}" for other in ranks}
    store.set(names[rank], "")
    try:
        store.wait(list(names.values()), _patience(store))
    except dist.DistStoreError:
        missing = [other for other, name in names.items() if not store.check([name])]
        store.delete_key(names[rank])
        store.add(counter, -1)
        raise ValueError(
            f"liger.transformers.checkpoint: the ranks {missing} have not come to the first step of a plan, and rank "
            f"{rank} has waited for {_patience(store).total_seconds():g} seconds; call it on all ranks, or give the "
            "ranks that call it a process group of their own, as group="
        ) from None


def _patience(store):
    """Less than other ranks wait in a collective: their error would end the program without that sentence."""
    return store.timeout / 2


def _initialised():
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
