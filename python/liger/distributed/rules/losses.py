# SPDX-License-Identifier: BSD-3-Clause
"""DTensor rules of losses: each rank computes the losses of its tokens and divides by the denominator of all
tokens.

A sum or mean is a ``Partial`` sum over ranks. The denominator of a mean needs the tokens of all ranks: one
all-reduce of a scalar before the op. The accuracy needs another one. If the last dimension of logits or
hidden states is sharded, they are redistributed to sharded tokens, which is exact and needs no more memory.
"""

from torch.distributed.tensor import Shard

from ..._core.dtensor.placements import is_sharded, restrict_sharding, where_sharded
from ..._core.head.cross_entropy import read_targets
from ..._core.math.dtypes import accumulate_dtype


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
    if not any(is_sharded(p) for p in tokens):
        return call.results(tokens, x.shape[:1])

    wide = accumulate_dtype(x.dtype)
    targets = None
    if call["return_token_accuracy"] or _needs_denominator(call):
        targets = read_targets(call["target"], vocab, call["ignore_index"], call["ce_weight"], wide)
    if _needs_denominator(call):
        call.arguments["denominator"] = call.all_reduce(targets.weight.sum(), tokens)
    # The accuracy over a rank's tokens cannot be summed over ranks, so it is computed from the predictions.
    call.arguments["return_argmax"] |= call["return_token_accuracy"]
    call.arguments["return_token_accuracy"] = False
    names = [r.name for r in call.op._schema.returns]
    results = dict(zip(names, call.run(), strict=True))
    if call.given["return_token_accuracy"]:
        hits = ((results["argmax"] == targets.class_index) & targets.has_class).sum(dtype=wide)
        valid = targets.valid.sum(dtype=wide)
        results["token_accuracy"] = call.all_reduce(hits, tokens) / call.all_reduce(valid, tokens)
        if not call.given["return_argmax"]:
            results["argmax"] = results["argmax"].new_empty(0)
    return tuple(call.wrap_result(*result, tokens, x.shape[:1]) for result in results.items())


def _needs_denominator(call):
    return call["reduction"] == "mean" and call["denominator"] is None


def _redistribute_rows(call, name, tokens):
    """Redistributes an argument that has one value per row, or one value for all rows."""
    values = call.given.get(name)
    call.redistribute(call.replicated if values is not None and values.dim() == 0 else tokens, name)


def _backward(call):
    logits, tokens = call["logits"], _tokens_of(call["logits"])
    _redistribute_rows(call, "grad_loss", tokens)
    call.redistribute(tokens, "logits", "target", "token_weight")
    call.redistribute(where_sharded(tokens, Shard(1)), "stats")
    call.redistribute(call.replicated, "used_denominator", "ce_weight")
    return call.results(tokens, logits.shape[:1])


def _check_divergence(call):
    """No check here: the op that follows checks the local tensors of each rank."""


def _divergence(call):
    student, tokens = call["student"], _tokens_of(call["student"])
    call.redistribute(tokens, "student", "teacher", "target", "gradient")
    call.redistribute(where_sharded(tokens, Shard(1)), "stats")
    for name in ("row_weight", "grad_loss"):
        _redistribute_rows(call, name, tokens)
    return call.results(tokens, student.shape[:1])


def _head(call):
    """Log-probabilities, their backward, and the divergences of two heads."""
    if call.given.get("keep", "nothing") != "nothing":
        raise RuntimeError(
            f"fused_linear_logprobs: keep is '{call['keep']}', expected 'nothing' with DTensors"
        )
    input, tokens = call["input"], _tokens_of(call["input"])
    call.redistribute(tokens, "input", "target", "down", "grad_logprobs", "grad_entropy")
    call.redistribute(tokens, "teacher", "teacher_indices")
    _redistribute_rows(call, "row_weight", tokens)
    call.gather("weight", "teacher_weight", "bias", "teacher_bias", "lora_a", "lora_b")
    return call.results(tokens, input.shape[:1])


def _add_grad_weight_(call):
    """Sums over tokens, added to an argument that cannot become partial: every rank computes all tokens."""
    call.redistribute(call.replicated, *call.distributed)
    call.run()


LOSS_RULES = {
    **dict.fromkeys(("cross_entropy_forward", "cross_entropy_forward_"), _forward),
    **dict.fromkeys(("fused_linear_ce_forward", "fused_linear_ce_lora_forward"), _forward),
    **dict.fromkeys(("cross_entropy_backward", "cross_entropy_backward_"), _backward),
    "check_divergence": _check_divergence,
    **dict.fromkeys(("divergence_forward", "divergence_forward_", "divergence_ce_forward_"), _divergence),
    "divergence_backward": _divergence,
    "fused_linear_divergence_forward": _head,
    **dict.fromkeys(("fused_linear_logprobs_forward", "fused_linear_logprobs_backward"), _head),
    **dict.fromkeys(("fused_linear_logprobs_lora_forward", "fused_linear_logprobs_lora_backward"), _head),
    "fused_linear_ce_add_grad_weight_": _add_grad_weight_,
    "fused_linear_logprobs_add_grad_weight_": _add_grad_weight_,
}
