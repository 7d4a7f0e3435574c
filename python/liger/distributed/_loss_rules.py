"""Losses of sharded tokens: each rank computes those of its tokens, over the denominator of all.

A sum or mean is the ``Partial`` sum of the ranks' shares. What needs all tokens before any rank can go on, the
denominator of a mean, is one all-reduce of a scalar; so is the accuracy. Logits or hidden states whose last dimension
is sharded are turned into sharded tokens, which is exact and takes no more memory.
"""

from torch.distributed.tensor import Partial, Shard

from .._core.cross_entropy_math import read_targets
from .._core.dtypes import accumulate_dtype
from .._core.placements import is_sharded, keep, where_sharded

_PER_ROW = ("predicted_tokens", "logprobs", "entropy", "lse", "grad_logits", "grad_input")
_SUMS = ("grad_weight", "grad_bias")
# The argument that asks for a result; the others are always there.
_ASKED_BY = {
    "z_loss": "return_z_loss",
    "token_accuracy": "return_token_accuracy",
    "predicted_tokens": "return_predicted_tokens",
    "logprobs": "return_logprobs",
    "entropy": "return_entropy",
    "grad_logits": "need_grad",
    "grad_input": "need_grad_input",
    "grad_weight": "need_grad_weight",
    "grad_bias": "need_grad_bias",
}


def _tokens_of(tensor):
    """The placements of (N, ...) with only N sharded, also where another dimension was, or partial sums are."""
    return tuple(
        p if p.is_replicate() or kept == p else Shard(0)
        for p, kept in zip(tensor.placements, keep(tensor, (0,)), strict=True)
    )


def _forward(call):
    main = "logits" if "logits" in call.arguments else "input"
    x = call[main]
    vocab = x.shape[-1] if main == "logits" else call["weight"].shape[0]
    tokens = _tokens_of(x)
    call.place(tokens, main, "target", "token_weight")
    call.place(call.replicated, "weight", "bias", "ce_weight", "denominator")
    options = dict(call.arguments)
    options["need_grad_bias"] = options.get("need_grad_bias") and options["bias"] is not None
    if not any(is_sharded(p) for p in tokens):
        return tuple(call.wrap(local, tokens) for local in call.run())

    wide = accumulate_dtype(x.dtype)
    targets = None
    if call["return_token_accuracy"] or _needs_denominator(call):
        targets = read_targets(call["target"], vocab, call["ignore_index"], call["ce_weight"], wide)
    if _needs_denominator(call):
        call.arguments["denominator"] = call.total(targets.weight.sum(), tokens)
    # A mean of the rank's own tokens is no part of the mean of all: it is made from the predictions.
    call.arguments["return_predicted_tokens"] |= options["return_token_accuracy"]
    call.arguments["return_token_accuracy"] = False
    names = [r.name for r in call.op._schema.returns]
    results = dict(zip(names, call.run(), strict=True))
    if options["return_token_accuracy"]:
        hits = ((results["predicted_tokens"] == targets.index) & targets.valid).sum(dtype=wide)
        live = targets.live.sum(dtype=wide)
        results["token_accuracy"] = call.total(hits, tokens) / call.total(live, tokens)
        if not options["return_predicted_tokens"]:
            results["predicted_tokens"] = results["predicted_tokens"].new_empty(0)
    per_row = call["reduction"] == "none"

    def wrapped(name, local):
        if name in _ASKED_BY and not options[_ASKED_BY[name]]:
            return call.unasked(local)
        if name in _PER_ROW or (per_row and name in ("loss", "z_loss")):
            return call.wrap(local, tokens, (x.shape[0], *local.shape[1:]))
        if name in _SUMS or name in ("loss", "z_loss"):
            return call.wrap(local, where_sharded(tokens, Partial()))
        return call.wrap(local, call.replicated)

    return tuple(wrapped(*result) for result in results.items())


def _needs_denominator(call):
    return call["reduction"] == "mean" and call["denominator"] is None


def _place_backward(call):
    logits, tokens = call["logits"], _tokens_of(call["logits"])
    per_row = call["grad_loss"].dim() > 0
    call.place(tokens if per_row else call.replicated, "grad_loss")
    call.place(tokens, "logits", "target", "lse", "token_weight")
    call.place(call.replicated, "used_denominator", "ce_weight")
    return tokens, logits.shape


def _backward(call):
    tokens, shape = _place_backward(call)
    return call.wrap(call.run(), tokens, shape)


def _backward_(call):
    _place_backward(call)
    call.run()


def _place_of_rows(call, name, tokens):
    """A value for each row, or one for all."""
    values = call[name]
    call.place(call.replicated if values is not None and values.dim() == 0 else tokens, name)


def _check_divergence(call):
    """Nothing: the op that follows checks what each rank has."""


def _divergence(call):
    student, tokens = call["student"], _tokens_of(call["student"])
    call.place(tokens, "student", "teacher", "target")
    _place_of_rows(call, "row_weight", tokens)
    loss, stats, grad_student = call.run()
    rows, vocab = student.shape
    return (
        _divergence_loss(call, loss, tokens, rows),
        call.wrap(stats, where_sharded(tokens, Shard(1)), (5, rows)),
        call.wrap(grad_student, tokens, (rows, vocab)) if call["need_grad"] else call.unasked(grad_student),
    )


def _divergence_(call):
    student, tokens = call["student"], _tokens_of(call["student"])
    call.place(tokens, "student", "teacher", "target")
    _place_of_rows(call, "row_weight", tokens)
    return _divergence_loss(call, call.run(), tokens, student.shape[0])


def _divergence_ce_(call):
    student, tokens = call["student"], _tokens_of(call["student"])
    call.place(tokens, "student", "teacher", "target", "gradient")
    _place_of_rows(call, "row_weight", tokens)
    (loss, hard), rows = call.run(), (student.shape[0],)
    return call.wrap(loss, tokens, rows), call.wrap(hard, tokens, rows) if call[
        "cross_entropy"
    ] else call.unasked(hard)


def _divergence_loss(call, loss, tokens, rows):
    if call["per_row"]:
        return call.wrap(loss, tokens, (rows,))
    return call.wrap(loss, where_sharded(tokens, Partial()))


def _divergence_backward(call):
    student, tokens = call["student"], _tokens_of(call["student"])
    call.place(tokens, "student", "teacher", "target")
    _place_of_rows(call, "grad_loss", tokens)
    call.place(where_sharded(tokens, Shard(1)), "stats")
    return call.wrap(call.run(), tokens, student.shape)


def _fused_linear_divergence(call):
    rows, hidden = call["input"].shape
    tokens = _tokens_of(call["input"])
    call.place(tokens, "input", "teacher", "teacher_indices", "target")
    _place_of_rows(call, "row_weight", tokens)
    call.place(call.replicated, "weight", "teacher_weight", "bias", "teacher_bias")
    loss, *of_rows, grad_input, grad_weight, grad_bias = call.run()
    sums, partial = (grad_weight, grad_bias), where_sharded(tokens, Partial())
    needed = call["need_grad_weight"], call["need_grad_bias"] and call["bias"] is not None
    return (
        call.wrap(loss, tokens, (rows,)) if call["per_row"] else call.wrap(loss, partial),
        *(
            call.wrap(local, tokens, (rows,)) if call[factor] else call.unasked(local)
            for factor, local in zip(("soft", "hard"), of_rows, strict=True)
        ),
        call.wrap(grad_input, tokens, (rows, hidden))
        if call["need_grad_input"]
        else call.unasked(grad_input),
        *(call.wrap(g, partial) if need else call.unasked(g) for g, need in zip(sums, needed, strict=True)),
    )


def _place_head(call, *per_row):
    tokens = _tokens_of(call["input"])
    call.place(tokens, "input", "target", *per_row)
    call.place(call.replicated, "weight", "bias")
    return tokens, call["input"].shape


def _logprobs(call):
    tokens, (rows, _) = _place_head(call)
    asked = True, call["return_entropy"], call["return_argmax"]
    return tuple(
        call.wrap(local, tokens, (rows,)) if wanted else call.unasked(local)
        for local, wanted in zip(call.run(), asked, strict=True)
    )


def _logprobs_backward(call):
    tokens, shape = _place_head(call, "grad_logprobs", "grad_entropy")
    partial = where_sharded(tokens, Partial())
    grad_input, *grads = call.run()
    asked = call["need_grad_weight"], call["need_grad_bias"] and call["bias"] is not None
    return (
        call.wrap(grad_input, tokens, shape) if call["need_grad_input"] else call.unasked(grad_input),
        *(call.wrap(g, partial) if need else call.unasked(g) for g, need in zip(grads, asked, strict=True)),
    )


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
    "fused_linear_logprobs_forward": _logprobs,
    "fused_linear_logprobs_backward": _logprobs_backward,
}
