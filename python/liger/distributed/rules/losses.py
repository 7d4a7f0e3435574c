# SPDX-License-Identifier: BSD-3-Clause
"""DTensor rules of losses: each rank computes the losses of its tokens and divides by the denominator of all
tokens.

A sum or mean is a ``Partial`` sum over ranks. The denominator of a mean needs the tokens of all ranks: one
all-reduce of a scalar before the op. The accuracy needs another one. If the last dimension of logits or
hidden states is sharded, they are redistributed to sharded tokens, which is exact and needs no more memory.
"""

from torch.distributed.tensor import Partial, Shard

from ..._core.dtensor.placements import is_sharded, restrict_sharding, where_sharded
from ..._core.head.cross_entropy import LogProbMetrics, read_targets
from ..._core.math.dtypes import accumulate_dtype

_PER_ROW = ("argmax", "logprobs", "entropy", "grad_logits", "grad_input", "grad_down")
_SUMS = ("grad_weight", "grad_bias", "grad_lora_a", "grad_lora_b")
# Arguments with a gradient that may be None.
_OPTIONAL = ("bias", "lora_a", "down")
# The flag that requests a result. Other results are always computed.
_REQUEST_FLAG = {
    "z_loss": "return_z_loss",
    "token_accuracy": "return_token_accuracy",
    "argmax": "return_argmax",
    "logprobs": "return_logprobs",
    "entropy": "return_entropy",
    "grad_logits": "need_grad",
    "grad_input": "need_grad_input",
    "grad_weight": "need_grad_weight",
    "grad_bias": "need_grad_bias",
    "grad_lora_a": "need_grad_lora_a",
    "grad_lora_b": "need_grad_lora_b",
    "grad_down": "need_grad_down",
}


def _tokens_of(tensor):
    """Placements of (N, ...) that shard N. A mesh dimension that shards another dimension, or has partial
    sums, shards N as well."""
    return tuple(
        p if p.is_replicate() or same == p else Shard(0)
        for p, same in zip(tensor.placements, restrict_sharding(tensor, (0,)), strict=True)
    )


def _forward(call):
    main = "logits" if "logits" in call.arguments else "input"
    x = call[main]
    vocab = x.shape[-1] if main == "logits" else call["weight"].shape[0]
    tokens = _tokens_of(x)
    call.redistribute(tokens, main, "target", "token_weight", "down")
    call.gather("weight", "bias", "lora_a", "lora_b")
    call.redistribute(call.replicated, "ce_weight", "denominator")
    options = dict(call.arguments)
    for name in _OPTIONAL:
        if options.get(name) is None:
            options[f"need_grad_{name}"] = False
    if not any(is_sharded(p) for p in tokens):
        return tuple(call.wrap(local, tokens) for local in call.run())

    wide = accumulate_dtype(x.dtype)
    targets = None
    if call["return_token_accuracy"] or _needs_denominator(call):
        targets = read_targets(call["target"], vocab, call["ignore_index"], call["ce_weight"], wide)
    if _needs_denominator(call):
        call.arguments["denominator"] = call.all_reduce(targets.weight.sum(), tokens)
    # The accuracy over a rank's tokens cannot be summed over ranks, so it is computed from the predictions.
    call.arguments["return_argmax"] |= options["return_token_accuracy"]
    call.arguments["return_token_accuracy"] = False
    names = [r.name for r in call.op._schema.returns]
    results = dict(zip(names, call.run(), strict=True))
    if options["return_token_accuracy"]:
        hits = ((results["argmax"] == targets.class_index) & targets.has_class).sum(dtype=wide)
        valid = targets.valid.sum(dtype=wide)
        results["token_accuracy"] = call.all_reduce(hits, tokens) / call.all_reduce(valid, tokens)
        if not options["return_argmax"]:
            results["argmax"] = results["argmax"].new_empty(0)
    per_row = call["reduction"] == "none"

    def wrapped(name, local):
        if name in _REQUEST_FLAG and not options[_REQUEST_FLAG[name]]:
            return call.placeholder(local)
        if name in _PER_ROW or (per_row and name in ("loss", "z_loss")):
            return call.wrap(local, tokens, (x.shape[0], *local.shape[1:]))
        if name == "stats":
            return call.wrap(local, where_sharded(tokens, Shard(1)), (2, x.shape[0]))
        if name in _SUMS or name in ("loss", "z_loss"):
            return call.wrap(local, where_sharded(tokens, Partial()))
        return call.wrap(local, call.replicated)

    return tuple(wrapped(*result) for result in results.items())


def _needs_denominator(call):
    return call["reduction"] == "mean" and call["denominator"] is None


def _redistribute_backward(call):
    logits, tokens = call["logits"], _tokens_of(call["logits"])
    per_row = call["grad_loss"].dim() > 0
    call.redistribute(tokens if per_row else call.replicated, "grad_loss")
    call.redistribute(tokens, "logits", "target", "token_weight")
    call.redistribute(where_sharded(tokens, Shard(1)), "stats")
    call.redistribute(call.replicated, "used_denominator", "ce_weight")
    return tokens, logits.shape


def _backward(call):
    tokens, shape = _redistribute_backward(call)
    return call.wrap(call.run(), tokens, shape)


def _backward_(call):
    _redistribute_backward(call)
    call.run()


def _redistribute_rows(call, name, tokens):
    """Redistributes an argument that has one value per row, or one value for all rows."""
    values = call[name]
    call.redistribute(call.replicated if values is not None and values.dim() == 0 else tokens, name)


def _check_divergence(call):
    """No check here: the op that follows checks the local tensors of each rank."""


def _divergence(call):
    student, tokens = call["student"], _tokens_of(call["student"])
    call.redistribute(tokens, "student", "teacher", "target")
    _redistribute_rows(call, "row_weight", tokens)
    loss, stats, grad_student = call.run()
    rows, vocab = student.shape
    return (
        _divergence_loss(call, loss, tokens, rows),
        call.wrap(stats, where_sharded(tokens, Shard(1)), (5, rows)),
        call.wrap(grad_student, tokens, (rows, vocab))
        if call["need_grad"]
        else call.placeholder(grad_student),
    )


def _divergence_(call):
    student, tokens = call["student"], _tokens_of(call["student"])
    call.redistribute(tokens, "student", "teacher", "target")
    _redistribute_rows(call, "row_weight", tokens)
    return _divergence_loss(call, call.run(), tokens, student.shape[0])


def _divergence_ce_(call):
    student, tokens = call["student"], _tokens_of(call["student"])
    call.redistribute(tokens, "student", "teacher", "target", "gradient")
    _redistribute_rows(call, "row_weight", tokens)
    (loss, hard), rows = call.run(), (student.shape[0],)
    return call.wrap(loss, tokens, rows), call.wrap(hard, tokens, rows) if call[
        "cross_entropy"
    ] else call.placeholder(hard)


def _divergence_loss(call, loss, tokens, rows):
    if call["per_row"]:
        return call.wrap(loss, tokens, (rows,))
    return call.wrap(loss, where_sharded(tokens, Partial()))


def _divergence_backward(call):
    student, tokens = call["student"], _tokens_of(call["student"])
    call.redistribute(tokens, "student", "teacher", "target")
    _redistribute_rows(call, "grad_loss", tokens)
    call.redistribute(where_sharded(tokens, Shard(1)), "stats")
    return call.wrap(call.run(), tokens, student.shape)


def _fused_linear_divergence(call):
    rows, hidden = call["input"].shape
    tokens = _tokens_of(call["input"])
    call.redistribute(tokens, "input", "teacher", "teacher_indices", "target")
    _redistribute_rows(call, "row_weight", tokens)
    call.gather("weight", "teacher_weight", "bias", "teacher_bias")
    loss, *per_row, grad_input, grad_weight, grad_bias = call.run()
    sums, partial = (grad_weight, grad_bias), where_sharded(tokens, Partial())
    needed = call["need_grad_weight"], call["need_grad_bias"] and call["bias"] is not None
    return (
        call.wrap(loss, tokens, (rows,)) if call["per_row"] else call.wrap(loss, partial),
        *(
            call.wrap(local, tokens, (rows,)) if call[factor] else call.placeholder(local)
            for factor, local in zip(("soft", "hard"), per_row, strict=True)
        ),
        call.wrap(grad_input, tokens, (rows, hidden))
        if call["need_grad_input"]
        else call.placeholder(grad_input),
        *(
            call.wrap(g, partial) if need else call.placeholder(g)
            for g, need in zip(sums, needed, strict=True)
        ),
    )


def _redistribute_head(call, *per_row):
    tokens, shape = _tokens_of(call["input"]), call["input"].shape
    call.redistribute(tokens, "input", "target", "down", *per_row)
    call.gather("weight", "bias", "lora_a", "lora_b")
    return tokens, shape


def _logprobs(call):
    if call["keep"] != "nothing":
        raise RuntimeError(
            f"fused_linear_logprobs: keep is '{call['keep']}', expected 'nothing' with DTensors"
        )
    tokens, (rows, _) = _redistribute_head(call)
    requested = True, *(call[f"return_{name}"] for name in LogProbMetrics._fields), False, False
    return tuple(
        call.wrap(local, tokens, (rows,)) if flag else call.placeholder(local)
        for local, flag in zip(call.run(), requested, strict=True)
    )


def _logprobs_backward(call):
    tokens, shape = _redistribute_head(call, "grad_logprobs", "grad_entropy")
    partial = where_sharded(tokens, Partial())
    grad_input, *grads = call.run()
    requested = call["need_grad_weight"], call["need_grad_bias"] and call["bias"] is not None
    return (
        call.wrap(grad_input, tokens, shape) if call["need_grad_input"] else call.placeholder(grad_input),
        *(
            call.wrap(g, partial) if need else call.placeholder(g)
            for g, need in zip(grads, requested, strict=True)
        ),
    )


def _lora_logprobs(call):
    tokens, (rows, _) = _redistribute_head(call)
    requested = True, *(call[f"return_{name}"] for name in LogProbMetrics._fields)
    return tuple(
        call.wrap(local, tokens, (rows,)) if flag else call.placeholder(local)
        for local, flag in zip(call.run(), requested, strict=True)
    )


def _lora_logprobs_backward(call):
    tokens, (rows, _) = _redistribute_head(call, "grad_logprobs", "grad_entropy")
    partial = where_sharded(tokens, Partial())

    def wrapped(name, local):
        argument = name.removeprefix("grad_")
        if call[argument] is None or not call[f"need_{name}"]:
            return call.placeholder(local)
        if name in _PER_ROW:
            return call.wrap(local, tokens, (rows, *local.shape[1:]))
        return call.wrap(local, partial)

    names = [result.name for result in call.op._schema.returns]
    return tuple(wrapped(*result) for result in zip(names, call.run(), strict=True))


def _add_grad_weight_(call):
    """Sums over tokens, added to an argument that cannot become partial: every rank computes all tokens."""
    call.redistribute(call.replicated, *call.distributed)
    call.run()


LOSS_RULES = {
    "cross_entropy_forward": _forward,
    "cross_entropy_forward_": _forward,
    "cross_entropy_backward": _backward,
    "cross_entropy_backward_": _backward_,
    "fused_linear_ce_forward": _forward,
    "check_divergence": _check_divergence,
    "divergence_forward": _divergence,
    "divergence_forward_": _divergence_,
    "divergence_ce_forward_": _divergence_ce_,
    "divergence_backward": _divergence_backward,
    "fused_linear_divergence_forward": _fused_linear_divergence,
    "fused_linear_ce_lora_forward": _forward,
    "fused_linear_logprobs_lora_forward": _lora_logprobs,
    "fused_linear_logprobs_lora_backward": _lora_logprobs_backward,
    "fused_linear_logprobs_forward": _logprobs,
    "fused_linear_logprobs_backward": _logprobs_backward,
    "fused_linear_ce_add_grad_weight_": _add_grad_weight_,
    "fused_linear_logprobs_add_grad_weight_": _add_grad_weight_,
}
