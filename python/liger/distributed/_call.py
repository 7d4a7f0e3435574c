"""One call of an op on DTensors: its arguments are moved to where the op can run on each rank's part alone."""

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from .._core.placements import dense_strides, where_sharded


class Call:
    """The arguments of an op by name. DTensors become local tensors with :meth:`place`.

    Raises:
        RuntimeError: DTensors on different meshes, or beside them a plain tensor of more than one element, of which
            nobody can tell whether it is whole.
    """

    def __init__(self, op, args, kwargs):
        self.op = op
        self.name = op._schema.name.removeprefix("liger::")
        self.arguments, self.writes = {}, set()
        for position, declared in enumerate(op._schema.arguments):
            given = (
                args[position] if position < len(args) else kwargs.get(declared.name, declared.default_value)
            )
            self.arguments[declared.name] = given
            if declared.alias_info is not None and declared.alias_info.is_write:
                self.writes.add(declared.name)
        self.distributed = {n: a for n, a in self.arguments.items() if isinstance(a, DTensor)}
        first, tensor = next(iter(self.distributed.items()))
        self.mesh = tensor.device_mesh
        for name, value in self.arguments.items():
            if isinstance(value, DTensor):
                if value.device_mesh != self.mesh:
                    raise RuntimeError(
                        f"{self.name}: {name} is on {value.device_mesh}, expected that of {first}, {self.mesh}"
                    )
            elif isinstance(value, torch.Tensor) and value.numel() != 1:
                raise RuntimeError(
                    f"{self.name}: {name} is a plain tensor and {first} a DTensor, expected a DTensor on "
                    f"{self.mesh}: use torch.distributed.tensor.distribute_tensor or DTensor.from_local"
                )

    def __getitem__(self, name):
        return self.arguments[name]

    @property
    def replicated(self):
        return (Replicate(),) * self.mesh.ndim

    def place(self, placements, *names):
        """Moves arguments to these placements and makes them local. None and plain tensors stay as they are.

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
                # Detached: torch 2.10 would detach the result in place, which DTensors cannot do.
                tensor = tensor.detach().redistribute(placements=placements)
            self.arguments[name] = tensor.to_local()

    def run(self):
        """The results of the op on the local arguments."""
        return self.op(*self.arguments.values())

    def wrap(self, local, placements, shape=None):
        """A result as a DTensor; its global shape is that of the local one unless it is sharded."""
        shape = local.shape if shape is None else torch.Size(shape)
        return DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=shape, stride=dense_strides(local, shape)
        )

    def unasked(self, local):
        """The empty tensor that stands for a result which was not asked for."""
        return self.wrap(local, self.replicated)

    def total(self, local, placements):
        """A scalar summed over the ranks between which these placements shard."""
        parts = self.wrap(local, where_sharded(placements, Partial()))
        return parts.redistribute(placements=self.replicated).to_local()
