"""Which parts of its arguments each op needs on a rank, and what each rank's results are parts of.

The main argument decides: where it is replicated, or sharded along a dimension whose parts the op can treat on their
own, it stays as it is, everything else follows it, and nothing is gathered. Where it is sharded along another dimension
(the hidden one of a norm), or holds partial sums, it is gathered first. So results are always those of the whole
tensors; only how fast they come depends on the placements.

Registered with ``torch.library.register_torch_dispatch``, which is documented and the same in torch 2.10 to 2.13. The
sharding strategies of ``torch.distributed.tensor`` are marked experimental, change with every release, and cannot
express a loss whose denominator takes a reduction of its own.
"""

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .._core.placements import is_sharded, keep, where_sharded
from ._call import Call
from ._loss_rules import LOSS_RULES


def _norm(call):
    x = call["x"]
    rows = keep(x, range(x.dim() - 1))
    call.place(rows, "x", "residual")
    call.place(call.replicated, "weight")
    *ys, rstd = call.run()
    return *(call.wrap(y, rows, x.shape) for y in ys), call.wrap(rstd, rows, x.shape[:-1])


def _norm_backward(call):
    main = "new_residual" if "new_residual" in call.arguments else "x"
    x, need_weight = call[main], call["need_grad_weight"] and call["weight"] is not None
    rows = keep(x, range(x.dim() - 1))
    call.place(rows, main, "rstd", "grad_y", "grad_new_residual")
    call.place(call.replicated, "weight")
    grad_x, grad_weight = call.run()
    return (
        call.wrap(grad_x, rows, x.shape) if call["need_grad_x"] else call.unasked(grad_x),
        call.wrap(grad_weight, where_sharded(rows, Partial())) if need_weight else call.unasked(grad_weight),
    )


def _moment_norm(call):
    """layer_norm; group_norm, whose samples alone are on their own."""
    x = call["x"]
    of_groups = "num_groups" in call.arguments
    rows = keep(x, (0,) if of_groups else range(x.dim() - 1))
    call.place(rows, "x")
    call.place(call.replicated, "weight", "bias")
    y, mean, rstd = call.run()
    leading = (x.shape[0], call["num_groups"]) if of_groups else x.shape[:-1]
    return call.wrap(y, rows, x.shape), call.wrap(mean, rows, leading), call.wrap(rstd, rows, leading)


def _moment_norm_backward(call):
    x = call["x"]
    rows = keep(x, (0,) if "num_groups" in call.arguments else range(x.dim() - 1))
    needed = [call[f"need_grad_{name}"] and call[name] is not None for name in ("weight", "bias")]
    call.place(rows, "x", "mean", "rstd", "grad_y")
    call.place(call.replicated, "weight", "bias")
    grad_x, *grads = call.run()
    partial = where_sharded(rows, Partial())
    return (
        call.wrap(grad_x, rows, x.shape) if call["need_grad_x"] else call.unasked(grad_x),
        *(call.wrap(g, partial) if need else call.unasked(g) for g, need in zip(grads, needed, strict=True)),
    )


def _gated(call):
    gate = call["gate"]
    parts = keep(gate, range(gate.dim()))
    call.place(parts, "gate", "up")
    return call.wrap(call.run(), parts, gate.shape)


def _gated_backward(call):
    gate = call["gate"]
    parts = keep(gate, range(gate.dim()))
    call.place(parts, "grad_out", "gate", "up")
    grad_gate, grad_up, product = call.run()
    return (
        call.wrap(grad_gate, parts, gate.shape),
        call.wrap(grad_up, parts, gate.shape),
        call.wrap(product, parts, gate.shape) if call["emit_product"] else call.unasked(product),
    )


def _gated_backward_(call):
    gate = call["gate"]
    call.place(keep(gate, range(gate.dim())), "grad_out", "gate", "up")
    call.run()


def _place_packed(call):
    """gate_up sharded along its last dimension has no gate beside its up: only tokens can be sharded."""
    gate_up = call["gate_up"]
    tokens = keep(gate_up, range(gate_up.dim() - 1))
    call.place(tokens, "grad_out", "gate_up")
    return tokens, gate_up.shape, (*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _gated_packed(call):
    tokens, _, half = _place_packed(call)
    return call.wrap(call.run(), tokens, half)


def _gated_packed_backward(call):
    tokens, whole, half = _place_packed(call)
    grad_gate_up, product = call.run()
    product = call.wrap(product, tokens, half) if call["emit_product"] else call.unasked(product)
    return call.wrap(grad_gate_up, tokens, whole), product


def _gated_packed_backward_(call):
    _place_packed(call)
    call.run()


_TILED_PARAMETERS = ("gate_weight", "up_weight", "down_weight", "gate_bias", "up_bias", "down_bias")


def _place_tiled(call, *followers):
    """Each rank cuts its own tokens into shards, at most one for each of them."""
    x = call["x"]
    tokens = keep(x, range(x.dim() - 1))
    call.place(tokens, "x", *followers)
    call.place(call.replicated, *_TILED_PARAMETERS)
    if call["num_shards"] is not None:
        call.arguments["num_shards"] = min(call["num_shards"], max(call["x"].shape[:-1].numel(), 1))
    return tokens, x.shape


def _tiled_mlp(call):
    # What a rank keeps is no part of a whole: the backward computes gate and up of all its tokens again.
    call.arguments["keep"] = False
    tokens, shape = _place_tiled(call)
    y, *kept = call.run()
    return call.wrap(y, tokens, shape), *map(call.unasked, kept)


def _tiled_mlp_backward(call):
    tokens, shape = _place_tiled(call, "grad_y")
    call.place(call.replicated, "kept", "kept_up")
    grad_x, *grads = call.run()
    needed = (call[f"need_grad_{name}"] for name in _TILED_PARAMETERS)
    partial = where_sharded(tokens, Partial())
    return (
        call.wrap(grad_x, tokens, shape) if call["need_grad_x"] else call.unasked(grad_x),
        *(call.wrap(g, partial) if need else call.unasked(g) for g, need in zip(grads, needed, strict=True)),
    )


_BATCH, _HEADS, _TOKENS = Shard(0), Shard(1), Shard(2)


def _place_rope(call, q_name, k_name):
    """Batch and tokens are sharded together; heads of q and of k each as they are, for there may be few of k."""
    q, k, cos = call[q_name], call[k_name], call["cos"]
    q_parts = keep(q, (0, 1, 2))
    k_heads = keep(k, (1,))
    k_parts = tuple(p if p in (_BATCH, _TOKENS) else own for p, own in zip(q_parts, k_heads, strict=True))
    of_table = {_TOKENS: Shard(cos.dim() - 2)}
    if cos.dim() == 3 and cos.shape[0] != 1:
        of_table[_BATCH] = Shard(0)
    call.place(q_parts, q_name)
    call.place(k_parts, k_name)
    call.place(tuple(of_table.get(p, Replicate()) for p in q_parts), "cos", "sin")
    return (q_parts, q.shape), (k_parts, k.shape)


def _rope(call):
    q_name, k_name = list(call.arguments)[:2]
    placed = _place_rope(call, q_name, k_name)
    return tuple(call.wrap(local, *parts) for local, parts in zip(call.run(), placed, strict=True))


def _rope_(call):
    _place_rope(call, "q", "k")
    call.run()


def _place_scaled(call):
    """Anything linear can be scaled where it lies, sums that are still to be added up, too."""
    x = call["x"]
    parts = tuple(
        p if is_sharded(p) or p in (Partial("sum"), Partial("avg")) else Replicate() for p in x.placements
    )
    call.place(parts, "x")
    call.place(call.replicated, "factor")
    return parts, x.shape


def _rescale(call):
    parts, shape = _place_scaled(call)
    return call.wrap(call.run(), parts, shape)


def _rescale_(call):
    _place_scaled(call)
    call.run()


def _elementwise(call):
    x = call["x"]
    parts = keep(x, range(x.dim()))
    call.place(parts, "x", "grad_y")
    return call.wrap(call.run(), parts, x.shape)


def _softmax(call):
    name = "x" if "x" in call.arguments else "y"
    x = call[name]
    rows = keep(x, range(x.dim() - 1))
    call.place(rows, name, "grad_y")
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
    "layer_norm": _moment_norm,
    "layer_norm_backward": _moment_norm_backward,
    "group_norm": _moment_norm,
    "group_norm_backward": _moment_norm_backward,
    "rope": _rope,
    "rope_backward": _rope,
    "rope_": _rope_,
    **_gated_rules("swiglu"),
    **_gated_rules("geglu"),
    "relu_squared": _elementwise,
    "relu_squared_backward": _elementwise,
    "softmax": _softmax,
    "softmax_backward": _softmax,
    "tiled_mlp_forward": _tiled_mlp,
    "tiled_mlp_backward": _tiled_mlp_backward,
    "rescale": _rescale,
    "rescale_": _rescale_,
    **LOSS_RULES,
}


def _dispatched(rule):
    def on_dtensors(cls, op, types, args, kwargs):
        # Below autograd: the moves of a rule are no part of the graph, and have no gradient of their own.
        with torch.no_grad():
            return rule(Call(op, args, kwargs or {}))

    return on_dtensors


def register():
    """Registers all rules; called once."""
    for name, rule in RULES.items():
        torch.library.register_torch_dispatch(f"liger::{name}", DTensor, _dispatched(rule))
