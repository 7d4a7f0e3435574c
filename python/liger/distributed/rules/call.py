# SPDX-License-Identifier: BSD-3-Clause
"""One call of an op on DTensors: redistributes the arguments so that each rank can run the op on its local
tensors."""

import re
import warnings

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..._core.dtensor.mixed import MixedTensors
from ..._core.dtensor.placements import where_sharded, wrapped

# Suffixes of op names after the name of a public function.
_FORMS = re.compile(r"(_metrics|_lora)?(_forward|_backward|_add_grad_weight)?(_product)?_?$")
# Arguments that request a result, where their names do not follow from its name.
_FLAGS = {
    "grad_logits": ("need_grad",),
    "grad_student": ("need_grad",),
    "soft_loss": ("soft",),
    "hard_loss": ("hard", "cross_entropy"),
}


class Call:
    """The arguments of an op by name. DTensors become local tensors with :meth:`redistribute`.

    Attributes:
        arguments: as the op will get them.
        given: as the caller gave them.
        parameters: the names of the arguments that :meth:`gather` has replicated.

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
        self.given, self.parameters = dict(self.arguments), set()
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
        """Replicates parameters, whose gradients are sums over ranks. A warning names each weight that was
        split over the ranks."""
        self.parameters.update(names)
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
        return wrapped(local, self.mesh, placements, local.shape if shape is None else shape)

    def _is_requested(self, name):
        """False for a result that the call leaves out: by a flag, or because its argument is None. Kept
        activations of ranks do not form a global tensor."""
        argument = name.removeprefix("grad_")
        if name.startswith("kept") or (argument != name and self.given.get(argument, name) is None):
            return False
        flags = _FLAGS.get(name, (f"need_{name}", f"return_{name}", f"emit_{name}"))
        return all(self.given.get(flag, True) for flag in flags)

    def wrap_result(self, name, local, rows, lead):
        """A result as a DTensor. ``rows``: the placements of one with a value for each token, whose global
        shape begins with ``lead``. Scalars and gradients of parameters are sums over tokens."""
        if name in ("token_accuracy", "used_denominator") or not self._is_requested(name):
            return self.wrap(local, self.replicated)
        if local.dim() == 0 or name.removeprefix("grad_") in self.parameters:
            return self.wrap(local, where_sharded(rows, Partial()))
        if name == "stats":
            return self.wrap(local, where_sharded(rows, Shard(1)), (local.shape[0], *lead))
        return self.wrap(local, rows, (*lead, *local.shape[len(lead) :]))

    def results(self, rows, lead):
        """Runs the op; its results as :meth:`wrap_result` wraps them."""
        found, names = self.run(), [result.name for result in self.op._schema.returns]
        if len(names) < 2:
            return None if found is None else self.wrap_result(*names, found, rows, lead)
        return tuple(self.wrap_result(*named, rows, lead) for named in zip(names, found, strict=True))

    def all_reduce(self, local, placements):
        """A scalar summed over the mesh dimensions that ``placements`` shard."""
        partial = self.wrap(local, where_sharded(placements, Partial()))
        return partial.redistribute(placements=self.replicated).to_local()
