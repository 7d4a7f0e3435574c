# SPDX-License-Identifier: BSD-3-Clause
"""One call of an op on DTensors: redistributes the arguments so that each rank can run the op on its local
tensors."""

import re
import warnings

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..._core.dtensor.mixed import MixedTensors
from ..._core.dtensor.placements import dense_strides, where_sharded

# Suffixes of op names after the name of a public function.
_FORMS = re.compile(r"(_metrics|_lora)?(_forward|_backward|_add_grad_weight)?(_product)?_?$")


class Call:
    """The arguments of an op by name. DTensors become local tensors with :meth:`redistribute`.

    Raises:
        RuntimeError: DTensors on different meshes, or a DTensor together with a plain tensor of more than one
            element: such a tensor could be the global tensor or a shard.
    """

    def __init__(self, op, args, kwargs):
        self.op = op
        self.name = op._schema.name.removeprefix("liger::")
        self.arguments, self.writes = {}, set()
        for position, declared in enumerate(op._schema.arguments):
            value = (
                args[position] if position < len(args) else kwargs.get(declared.name, declared.default_value)
            )
            self.arguments[declared.name] = value
            if declared.alias_info is not None and declared.alias_info.is_write:
                self.writes.add(declared.name)
        self.distributed = {n: a for n, a in self.arguments.items() if isinstance(a, DTensor)}
        first, tensor = next(iter(self.distributed.items()))
        self.mesh = tensor.device_mesh
        for name, value in self.arguments.items():
            if isinstance(value, DTensor):
                if value.device_mesh != self.mesh:
                    raise MixedTensors(
                        f"{self.name}: {name} is on {value.device_mesh}, expected the mesh of {first}, {self.mesh}"
                    )
            elif isinstance(value, torch.Tensor) and value.numel() != 1:
                raise MixedTensors(
                    f"{self.name}: {name} is a plain tensor and {first} a DTensor, expected a DTensor on "
                    f"{self.mesh}: use torch.distributed.tensor.distribute_tensor or DTensor.from_local"
                )

    def __getitem__(self, name):
        return self.arguments[name]

    @property
    def replicated(self):
        return (Replicate(),) * self.mesh.ndim

    def redistribute(self, placements, *names):
        """Redistributes arguments to these placements and makes them local. None and plain tensors do not
        change.

        Raises:
            RuntimeError: an argument that the op writes would have to move.
        """
        for name in names:
            tensor = self.distributed.get(name)
            if tensor is None:
                continue
            if tuple(tensor.placements) != placements:
                if name in self.writes:
                    raise RuntimeError(
                        f"{self.name}: {name} has placements {tuple(tensor.placements)}, expected {placements}: "
                        "an argument that is written cannot be moved; use the form without the trailing underscore"
                    )
                # Detached: torch 2.10 would detach the result in place, which DTensors do not support.
                tensor = tensor.detach().redistribute(placements=placements)
            self.arguments[name] = tensor.to_local()

    def gather(self, *names):
        """Replicates parameters. A warning names each weight that was split over the ranks."""
        for name in names:
            tensor = self.distributed.get(name)
            if tensor is not None and tensor.dim() > 1 and any(p.is_shard() for p in tensor.placements):
                function = _FORMS.sub("", self.name)
                warnings.warn(
                    f"liger: {function}: {name} has placements {tuple(tensor.placements)}, and is gathered on every "
                    "rank in every call (docs/guides/distributed.md#dtensors)",
                    stacklevel=2,
                )
        self.redistribute(self.replicated, *names)

    def run(self):
        """The results of the op on the local arguments."""
        return self.op(*self.arguments.values())

    def wrap(self, local, placements, shape=None):
        """A result as a DTensor. ``shape``: its global shape; None: the shape of the local tensor."""
        shape = local.shape if shape is None else torch.Size(shape)
        return DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=shape, stride=dense_strides(local, shape)
        )

    def placeholder(self, local):
        """The empty tensor in place of a result that was not requested."""
        return self.wrap(local, self.replicated)

    def all_reduce(self, local, placements):
        """A scalar summed over the mesh dimensions that ``placements`` shard."""
        partial = self.wrap(local, where_sharded(placements, Partial()))
        return partial.redistribute(placements=self.replicated).to_local()
