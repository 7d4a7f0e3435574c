"""DTensor rules: the placements of arguments that each op needs, and the placements of its results.

The main argument decides. If it is replicated, or sharded along a dimension whose shards are independent in the op, it
is not redistributed, and the other arguments follow its placements without a gather. If it is sharded along another
dimension (the hidden dimension of a norm) or partial, it is gathered first. So results are always those of the global
tensors; only the speed depends on the placements.

Registered with ``torch.library.register_torch_dispatch``, which is documented and the same in torch 2.10 to 2.13. The
sharding strategies of ``torch.distributed.tensor`` are experimental, change with every release, and cannot express a
loss whose denominator needs a reduction of its own.
"""

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .._core.placements import is_sharded, restrict_sharding, where_sharded
from ._call import Call
from ._loss_rules import LOSS_RULES


def _norm(call):
    x = call["x"]
    rows = restrict_sharding(x, range(x.dim() - 1))
    call.redistribute(rows, "x", "residual", "gate")
    call.redistribute(call.replicated, "weight")
    *ys, rstd = call.run()
    group_size = call.arguments.get("group_size")
    groups = () if group_size is None else (x.shape[-1] // group_size,)
    return *(call.wrap(y, rows, x.shape) for y in ys), call.wrap(rstd, rows, (*x.shape[:-1], *groups))


def _norm_backward(call):
    main = "new_residual" if "new_residual" in call.arguments else "x"
    x, need_weight = call[main], call["need_grad_weight"] and call["weight"] is not None
    rows = restrict_sharding(x, range(x.dim() - 1))
    call.redistribute(rows, main, "gate", "rstd", "grad_y", "grad_new_residual")
    call.redistribute(call.replicated, "weight")
    *grads, grad_weight = call.run()
    needed = (call[f"need_grad_{name}"] for name in ("x", "gate")[: len(grads)])
    return (
        *(
            call.wrap(grad, rows, x.shape) if need else call.placeholder(grad)
            for grad, need in zip(grads, needed, strict=True)
        ),
        call.wrap(grad_weight, where_sharded(rows, Partial()))
        if need_weight
        else call.placeholder(grad_weight),
    )


def _moment_norm(call):
    """layer_norm, whose rows are independent, and group_norm, whose samples are."""
    x = call["x"]
    is_group_norm = "num_groups" in call.arguments
    rows = restrict_sharding(x, (0,) if is_group_norm else range(x.dim() - 1))
    call.redistribute(rows, "x")
    call.redistribute(call.replicated, "weight", "bias")
    y, mean, rstd = call.run()
    leading = (x.shape[0], call["num_groups"]) if is_group_norm else x.shape[:-1]
    return call.wrap(y, rows, x.shape), call.wrap(mean, rows, leading), call.wrap(rstd, rows, leading)


def _moment_norm_backward(call):
    x = call["x"]
    rows = restrict_sharding(x, (0,) if "num_groups" in call.arguments else range(x.dim() - 1))
    needed = [call[f"need_grad_{name}"] and call[name] is not None for name in ("weight", "bias")]
    call.redistribute(rows, "x", "mean", "rstd", "grad_y")
    call.redistribute(call.replicated, "weight", "bias")
    grad_x, *grads = call.run()
    partial = where_sharded(rows, Partial())
    return (
        call.wrap(grad_x, rows, x.shape) if call["need_grad_x"] else call.placeholder(grad_x),
        *(
            call.wrap(g, partial) if need else call.placeholder(g)
            for g, need in zip(grads, needed, strict=True)
        ),
    )


def _gated(call):
    gate = call["gate"]
    placements = restrict_sharding(gate, range(gate.dim()))
    call.redistribute(placements, "gate", "up")
    return call.wrap(call.run(), placements, gate.shape)


def _gated_backward(call):
    gate = call["gate"]
    placements = restrict_sharding(gate, range(gate.dim()))
    call.redistribute(placements, "grad_out", "gate", "up")
    grad_gate, grad_up, product = call.run()
    return (
        call.wrap(grad_gate, placements, gate.shape),
        call.wrap(grad_up, placements, gate.shape),
        call.wrap(product, placements, gate.shape) if call["emit_product"] else call.placeholder(product),
    )


def _gated_backward_(call):
    gate = call["gate"]
    call.redistribute(restrict_sharding(gate, range(gate.dim())), "grad_out", "gate", "up")
    call.run()


def _redistribute_packed(call):
    """Only tokens can be sharded: a shard of the last dimension of gate_up has gate without up, or up without gate."""
    gate_up = call["gate_up"]
    tokens = restrict_sharding(gate_up, range(gate_up.dim() - 1))
    call.redistribute(tokens, "grad_out", "gate_up")
    return tokens, gate_up.shape, (*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _gated_packed(call):
    tokens, _, half = _redistribute_packed(call)
    return call.wrap(call.run(), tokens, half)


def _gated_packed_backward(call):
    tokens, whole, half = _redistribute_packed(call)
    grad_gate_up, product = call.run()
    product = call.wrap(product, tokens, half) if call["emit_product"] else call.placeholder(product)
    return call.wrap(grad_gate_up, tokens, whole), product


def _gated_packed_backward_(call):
    _redistribute_packed(call)
    call.run()


_TILED_PARAMETERS = ("gate_weight", "up_weight", "down_weight", "gate_bias", "up_bias", "down_bias")


def _redistribute_tiled(call, *followers):
    """Redistributes to sharded tokens, and limits ``num_shards`` to the number of tokens of the rank."""
    x = call["x"]
    tokens = restrict_sharding(x, range(x.dim() - 1))
    call.redistribute(tokens, "x", *followers)
    call.redistribute(call.replicated, *_TILED_PARAMETERS)
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
    call.redistribute(call.replicated, *_EXPERTS_PARAMETERS)
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
    """Batch and tokens of q and k get the same sharding. Heads keep theirs, because k may have fewer heads than q."""
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


def _elementwise(call):
    x = call["x"]
    placements = restrict_sharding(x, range(x.dim()))
    call.redistribute(placements, "x", "grad_y")
    return call.wrap(call.run(), placements, x.shape)


def _softmax(call):
    name = "x" if "x" in call.arguments else "y"
    x = call[name]
    rows = restrict_sharding(x, range(x.dim() - 1))
    call.redistribute(rows, name, "grad_y")
    return call.wrap(call.run(), rows, x.shape)


def _gated_rules(name):
    return {
        name: _gated,
        f"{name}_backward": _gated_backward,
        f"{name}_backward_": _gated_backward_,
        f"{name}_backward_product_": _gated_backward_,
        f"{name}_packed": _gated_packed,
        f"{name}_packed_backward": _gated_packed_backward,
        f"{name}_packed_backward_": _gated_packed_backward_,
    }


RULES = {
    "rms_norm": _norm,
    "rms_norm_backward": _norm_backward,
    "fused_add_rms_norm": _norm,
    "fused_add_rms_norm_backward": _norm_backward,
    "rms_norm_gated": _norm,
    "rms_norm_gated_backward": _norm_backward,
    "layer_norm": _moment_norm,
    "layer_norm_backward": _moment_norm_backward,
    "group_norm": _moment_norm,
    "group_norm_backward": _moment_norm_backward,
    "rope": _rope,
    "rope_backward": _rope,
    "rope_": _rope_,
    "qk_norm_rope": _qk_norm_rope,
    "qk_norm_rope_backward": _qk_norm_rope_backward,
    **_gated_rules("swiglu"),
    **_gated_rules("geglu"),
    "relu_squared": _elementwise,
    "relu_squared_backward": _elementwise,
    "softmax": _softmax,
    "softmax_backward": _softmax,
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
