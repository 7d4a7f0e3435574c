"""Gated MLPs that never hold their activations for all tokens, with the constructors of Hugging Face's."""

from torch import nn

from .._core.arguments import ANYTHING, BYTES, COUNT, DTYPE, arguments
from .._core.dtensor import is_dtensor
from ..ops.tiled_mlp import tiled_mlp

# Hugging Face's names of activations, and ours.
_SILU = {"silu": "silu", "swish": "silu"}
_GELU = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
}


class _TiledMLP(nn.Module):
    """``down_proj(activation(gate_proj(x)) * up_proj(x))``.

    The projections are modules for their names' sake: the forward uses their parameters and does not call them. So
    hooks on the projections do not run. Those of DDP, FSDP and ZeRO-1 and 2 are on this module, on a layer around it,
    or on the parameters; ZeRO-3 gathers a parameter when a module's attribute is read.
    """

    _activations: dict

    @arguments(
        error=ValueError, config=ANYTHING, num_shards=COUNT, memory_budget=BYTES, device=ANYTHING, dtype=DTYPE
    )  # fmt: skip
    def __init__(self, config, num_shards=None, memory_budget=None, device=None, dtype=None):
        super().__init__()
        # Gemma's configurations have both, and the second is the one that counts.
        name = getattr(config, "hidden_activation", None) or config.hidden_act
        if name not in self._activations:
            raise ValueError(
                f"{type(self).__name__}: the activation of the configuration is {name!r}, "
                f"expected one of {', '.join(self._activations)}"
            )
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.activation, self.num_shards, self.memory_budget = (
            self._activations[name],
            num_shards,
            memory_budget,
        )
        how = {"bias": getattr(config, "mlp_bias", False), "device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, **how)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, **how)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, **how)

    @arguments()
    def forward(self, x):
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        if is_dtensor(weights[0]):
            return self._tensor_parallel(x, weights, biases)
        return tiled_mlp(x, *weights, *biases, self.activation, self._shards(x), self.memory_budget)

    def _shards(self, x):
        """At most one shard per token: the last batch of a set, or a short prompt, may be tiny."""
        return None if self.num_shards is None else max(min(self.num_shards, x.shape[:-1].numel()), 1)

    def _tensor_parallel(self, x, weights, biases):
        """Every rank computes with its part of the intermediate size; x and the result are whole on every rank."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        names = ("gate_proj", "up_proj", "down_proj")
        mesh = weights[0].device_mesh
        for name, weight, wanted in zip(names, weights, (Shard(0), Shard(0), Shard(1)), strict=True):
            if (
                not isinstance(weight, DTensor)
                or weight.device_mesh != mesh
                or weight.placements != (wanted,)
            ):
                got = weight.placements if isinstance(weight, DTensor) else "not a DTensor"
                raise RuntimeError(
                    f"{type(self).__name__}: {name}.weight is {got}, expected ({wanted},): column-wise gate_proj and "
                    "up_proj, row-wise down_proj, on one mesh of one dimension. fully_shard belongs on this module or "
                    "on a layer around it, not on its projections"
                )
        whole = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        local = whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        inner = [None if b is None else b.to_local() for b in biases[:2]]
        y = tiled_mlp(
            local,
            *(w.to_local() for w in weights),
            *inner,
            None,  # added below, once and not by every rank
            self.activation,
            self._shards(local),
            self.memory_budget,
        )
        result = DTensor.from_local(y, mesh, [Partial()], run_check=False).redistribute(
            placements=[Replicate()]
        )
        if biases[2] is not None:
            result = result + biases[2]
        return result if isinstance(x, DTensor) else result.to_local()

    def extra_repr(self):
        return f"activation={self.activation!r}, num_shards={self.num_shards}, memory_budget={self.memory_budget}"


class TiledSwiGLUMLP(_TiledMLP):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, a shard of tokens at a time, by :func:`liger.tiled_mlp`.

    Args:
        config: of a Hugging Face model, or any object with ``hidden_size``, ``intermediate_size``, ``hidden_act`` and,
            if the projections have biases, ``mlp_bias=True``.
        num_shards, memory_budget: as in :func:`liger.tiled_mlp`; a batch of fewer tokens than shards is cut into
            single tokens.
        device, dtype: of the parameters.

    Shape:
        x: (..., hidden_size); the result too.

    The names of the submodules are those of LlamaMLP, so that state dicts fit. Weights may be DTensors, sharded
    column-wise (gate_proj, up_proj) and row-wise (down_proj) over a mesh of one dimension.

    Raises:
        ValueError: another activation in the configuration, fewer than one shard.
        RuntimeError: in the forward, DTensors sharded in another way.
    """

    _activations = _SILU


class TiledGEGLUMLP(_TiledMLP):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))``, otherwise as :class:`TiledSwiGLUMLP`.

    The configuration's ``hidden_activation``, or ``hidden_act`` where that is missing, says whether GELU is the exact
    one (``"gelu"``) or its tanh approximation (``"gelu_pytorch_tanh"``, ``"gelu_new"``).
    """

    _activations = _GELU
