# SPDX-License-Identifier: BSD-3-Clause
"""DTensor rules: the placements of arguments that each op needs, and the placements of its results.

The main argument decides. If it is replicated, or sharded along a dimension whose shards are independent in
the op, it is not redistributed, and the other arguments follow its placements without a gather. If it is
sharded along another dimension (the hidden dimension of a norm) or partial, it is gathered first. The results
are therefore always the results of the global tensors; only the speed depends on the placements.

Registered with ``torch.library.register_torch_dispatch``, which is documented and the same in torch 2.10 to
2.13. The sharding strategies of ``torch.distributed.tensor`` are experimental, change with every release, and
cannot express a loss whose denominator needs a reduction of its own.
"""

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..._core.dtensor.placements import is_sharded, restrict_sharding
from ..._core.op.declared import declarations
from .call import Call
from .losses import LOSS_RULES


def _declared(declaration):
    """The rule of the ops of a declaration: each rank works on its shard of the independent dimensions with
    all of the parameters, whose gradients are partial sums."""

    parameters = [name for name in declaration.shapes if declaration.is_parameter(name)]

    def rule(call):
        main = call[declaration.main_of(call.given)]
        if not isinstance(main, DTensor):
            main = next(iter(call.distributed.values()))
        lead = declaration.independent(main)
        rows = restrict_sharding(main, range(lead))
        call.gather(*parameters)
        call.redistribute(rows, *(name for name in call.distributed if name not in parameters))
        return call.results(rows, main.shape[:lead])

    return rule


def _token_wise(*parameters):
    """The rule of an op that treats each token of x alone: each rank works on its tokens, with all of the
    parameters."""

    def rule(call):
        x = call["x"]
        tokens = restrict_sharding(x, range(x.dim() - 1))
        if "keep" in call.arguments:
            # The kept activations of the ranks do not form a global tensor, so the backward recomputes them.
            call.arguments["keep"] = False
        call.redistribute(tokens, "x", "grad_y", "top_k_index", "top_k_weights")
        call.redistribute(call.replicated, "kept", "kept_up")
        call.gather(*parameters)
        if call.given.get("num_shards") is not None:
            # At most the number of tokens of the rank.
            call.arguments["num_shards"] = min(call["num_shards"], max(call["x"].shape[:-1].numel(), 1))
        return call.results(tokens, x.shape[:-1])

    return rule


_tiled_mlp = _token_wise("gate_weight", "up_weight", "down_weight", "gate_bias", "up_bias", "down_bias")
_grouped_experts = _token_wise("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
_BATCH, _TOKENS = Shard(0), Shard(2)


def _redistribute_rope(call, q_name, k_name):
    """Batch and tokens of q and k get the same sharding. Heads keep theirs, because k may have fewer heads
    than q."""
    q, k, cos = call[q_name], call[k_name], call["cos"]
    q_placements = restrict_sharding(q, (0, 1, 2))
    k_heads = restrict_sharding(k, (1,))
    k_placements = tuple(
        p if p in (_BATCH, _TOKENS) else own for p, own in zip(q_placements, k_heads, strict=True)
    )
    table_placements = {_TOKENS: Shard(cos.dim() - 2)}
    if cos.dim() == 3 and cos.shape[0] != 1:
        table_placements[_BATCH] = Shard(0)
    call.redistribute(q_placements, q_name)
    call.redistribute(k_placements, k_name)
    call.redistribute(tuple(table_placements.get(p, Replicate()) for p in q_placements), "cos", "sin")
    return (q_placements, q.shape), (k_placements, k.shape)


def _rope(call):
    call.gather("q_weight", "k_weight")
    backward = "grad_q_out" in call.arguments and "q" in call.arguments
    q_name, k_name = ("q", "k") if backward else list(call.arguments)[:2]
    placed = _redistribute_rope(call, q_name, k_name)
    if backward:
        for name, (placements, _) in zip("qk", placed, strict=True):
            call.redistribute(placements, f"grad_{name}_out")
    found = call.run()
    if found is None:
        return None
    # Of q, of k, and the gradients of their weights.
    names = [result.name for result in call.op._schema.returns]
    return tuple(call.wrap_result(*of, *placed[i % 2]) for i, of in enumerate(zip(names, found, strict=True)))


def _rescale(call):
    """Scaling is linear, so shards and partial sums can be scaled without communication."""
    x = call["x"]
    placements = tuple(
        p if is_sharded(p) or p in (Partial("sum"), Partial("avg")) else Replicate() for p in x.placements
    )
    call.redistribute(placements, "x")
    call.redistribute(call.replicated, "factor")
    found = call.run()
    return None if found is None else call.wrap(found, placements, x.shape)


RULES = {
    **{op: _declared(declaration) for op, declaration in declarations().items()},
    **dict.fromkeys(("rope", "rope_backward", "rope_", "qk_norm_rope", "qk_norm_rope_backward"), _rope),
    **dict.fromkeys(("tiled_mlp_forward", "tiled_mlp_backward"), _tiled_mlp),
    **dict.fromkeys(("grouped_experts_forward", "grouped_experts_backward"), _grouped_experts),
    **dict.fromkeys(("rescale", "rescale_"), _rescale),
    **LOSS_RULES,
}


def _dispatched(rule):
    def on_dtensors(cls, op, types, args, kwargs):
        # Below autograd: redistributions by a rule are not part of the graph.
        with torch.no_grad():
            return rule(Call(op, args, kwargs or {}))

    return on_dtensors


def register():
    """Registers all rules; called once."""
    for name, rule in RULES.items():
        torch.library.register_torch_dispatch(f"liger::{name}", DTensor, _dispatched(rule))
