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

from ..._core.dtensor.placements import is_sharded, restrict_sharding, where_sharded
from ..._core.op.declared import declarations, result_names
from .call import Call
from .losses import LOSS_RULES


def _declared(declaration):
    """The rule of the ops of a declaration: each rank works on its shard of the independent dimensions with
    all of the parameters, whose gradients are partial sums."""

    def rule(call):
        given = dict(call.arguments)
        main = given[declaration.main_of(given)]
        if not isinstance(main, DTensor):
            main = next(iter(call.distributed.values()))
        lead = declaration.independent(main)
        rows = restrict_sharding(main, range(lead))
        for name in call.distributed:
            call.redistribute(call.replicated if declaration.is_parameter(name) else rows, name)

        def wrapped(name, local):
            needed = given.get(f"need_{name}", given.get(f"emit_{name}", True))
            if not needed or given.get(name.removeprefix("grad_"), main) is None:
                return call.placeholder(local)
            if declaration.is_parameter(name):
                return call.wrap(local, where_sharded(rows, Partial()))
            return call.wrap(local, rows, (*main.shape[:lead], *local.shape[lead:]))

        results = call.run()
        if not isinstance(results, tuple):
            return None if results is None else wrapped(*result_names(call.name), results)
        return tuple(map(wrapped, result_names(call.name), results))

    return rule


_TILED_PARAMETERS = ("gate_weight", "up_weight", "down_weight", "gate_bias", "up_bias", "down_bias")


def _redistribute_tiled(call, *followers):
    """Redistributes to sharded tokens, and limits ``num_shards`` to the number of tokens of the rank."""
    x = call["x"]
    tokens = restrict_sharding(x, range(x.dim() - 1))
    call.redistribute(tokens, "x", *followers)
    call.gather(*_TILED_PARAMETERS)
    if call["num_shards"] is not None:
        call.arguments["num_shards"] = min(call["num_shards"], max(call["x"].shape[:-1].numel(), 1))
    return tokens, x.shape


def _tiled_mlp(call):
    # The kept activations of the ranks do not form a global tensor, so the backward recomputes gate and up.
    call.arguments["keep"] = False
    tokens, shape = _redistribute_tiled(call)
    y, *kept = call.run()
    return call.wrap(y, tokens, shape), *map(call.placeholder, kept)


def _tiled_mlp_backward(call):
    tokens, shape = _redistribute_tiled(call, "grad_y")
    call.redistribute(call.replicated, "kept", "kept_up")
    grad_x, *grads = call.run()
    needed = (call[f"need_grad_{name}"] for name in _TILED_PARAMETERS)
    partial = where_sharded(tokens, Partial())
    return (
        call.wrap(grad_x, tokens, shape) if call["need_grad_x"] else call.placeholder(grad_x),
        *(
            call.wrap(g, partial) if need else call.placeholder(g)
            for g, need in zip(grads, needed, strict=True)
        ),
    )


_EXPERTS_PARAMETERS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")


def _redistribute_experts(call, *followers):
    """Redistributes to sharded tokens: each rank runs all experts on its tokens."""
    x = call["x"]
    tokens = restrict_sharding(x, range(x.dim() - 1))
    call.redistribute(tokens, "x", "top_k_index", "top_k_weights", *followers)
    call.gather(*_EXPERTS_PARAMETERS)
    return tokens, x.shape


def _grouped_experts(call):
    # As for tiled_mlp: the kept activations of the ranks do not form a global tensor.
    call.arguments["keep"] = False
    tokens, shape = _redistribute_experts(call)
    y, kept = call.run()
    return call.wrap(y, tokens, shape), call.placeholder(kept)


def _grouped_experts_backward(call):
    routing = call["top_k_weights"].shape
    tokens, shape = _redistribute_experts(call, "grad_y")
    call.redistribute(call.replicated, "kept")
    grad_x, grad_weights, *grads = call.run()
    partial = where_sharded(tokens, Partial())
    return (
        call.wrap(grad_x, tokens, shape) if call["need_grad_x"] else call.placeholder(grad_x),
        call.wrap(grad_weights, tokens, routing)
        if call["need_grad_top_k_weights"]
        else call.placeholder(grad_weights),
        *(
            call.wrap(g, partial) if call[f"need_grad_{name}"] else call.placeholder(g)
            for g, name in zip(grads, _EXPERTS_PARAMETERS, strict=True)
        ),
    )


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
    q_name, k_name = list(call.arguments)[:2]
    placed = _redistribute_rope(call, q_name, k_name)
    return tuple(call.wrap(local, *placements) for local, placements in zip(call.run(), placed, strict=True))


def _qk_norm_rope(call):
    call.redistribute(call.replicated, "q_weight", "k_weight")
    return _rope(call)


def _qk_norm_rope_backward(call):
    placed = _redistribute_rope(call, "q", "k")
    call.redistribute(call.replicated, "q_weight", "k_weight")
    for name, (placements, _) in zip("qk", placed, strict=True):
        call.redistribute(placements, f"grad_{name}_out")
    *grads, grad_q_weight, grad_k_weight = call.run()
    results = [
        call.wrap(grad, *placements) if call[f"need_grad_{name}"] else call.placeholder(grad)
        for name, grad, placements in zip("qk", grads, placed, strict=True)
    ]
    for name, grad, (placements, _) in zip("qk", (grad_q_weight, grad_k_weight), placed, strict=True):
        needed = call[f"need_grad_{name}_weight"] and call[f"{name}_weight"] is not None
        results.append(
            call.wrap(grad, where_sharded(placements, Partial())) if needed else call.placeholder(grad)
        )
    return tuple(results)


def _rope_(call):
    _redistribute_rope(call, "q", "k")
    call.run()


def _redistribute_scaled(call):
    """Scaling is linear, so shards and partial sums can be scaled without communication."""
    x = call["x"]
    placements = tuple(
        p if is_sharded(p) or p in (Partial("sum"), Partial("avg")) else Replicate() for p in x.placements
    )
    call.redistribute(placements, "x")
    call.redistribute(call.replicated, "factor")
    return placements, x.shape


def _rescale(call):
    placements, shape = _redistribute_scaled(call)
    return call.wrap(call.run(), placements, shape)


def _rescale_(call):
    _redistribute_scaled(call)
    call.run()


RULES = {
    **{op: _declared(declaration) for op, declaration in declarations().items()},
    "rope": _rope,
    "rope_backward": _rope,
    "rope_": _rope_,
    "qk_norm_rope": _qk_norm_rope,
    "qk_norm_rope_backward": _qk_norm_rope_backward,
    "tiled_mlp_forward": _tiled_mlp,
    "tiled_mlp_backward": _tiled_mlp_backward,
    "grouped_experts_forward": _grouped_experts,
    "grouped_experts_backward": _grouped_experts_backward,
    "rescale": _rescale,
    "rescale_": _rescale_,
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
