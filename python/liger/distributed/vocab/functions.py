# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy and log-probabilities of a vocabulary that is sharded over the processes of a group.

Every process calls these functions with the same rows and options, and with its own shard of the classes.
docs/guides/vocab_parallel.md says which data is exchanged and when; docs/guides/cross_entropy.md defines
every term.

The exchange of maxima, sums and target logits follows Narayanan et al., arXiv 2104.04473, section 3.2
(Megatron-LM); the chunks follow Hsu et al., "Liger Kernel", arXiv 2410.10989; the entropy is the entropy of a
mixture of the softmax distributions of all processes.
"""

from ..._core.head.results import output_like
from ..._core.op.autocast import autocast_operands
from ..._core.op.autograd import is_traced, wants_grad
from ..._core.op.loss_rows import denominator_tensor, flatten_rows
from ..._core.op.tensors import (
    LayerNames,
    check_accum_dtype,
    check_given_classes,
    check_ignore_index,
    check_layer,
    check_logits_dtype,
    wrong_shape,
)
from ..._core.runtime.memory_budget import check_budget_variable
from .agreement import name_of_call
from .cross_entropy import FUSED, PLAIN, fused_op, plain_op
from .logprobs import LOGPROBS, logprobs_op
from .shards import find_shard, layer_to_check, local_shard, replicated_tensor, whole_tensor


def needs_whole_rows(metrics):
    """The first metric of cross entropy that needs all classes in one process, or None."""
    return next((name for name in ("token_accuracy", "argmax", "entropy") if getattr(metrics, name)), None)


def _prepare(op, options, metrics, tensor, target):
    """Checks what both cross entropies have in common; returns the options without DTensors."""
    if (name := needs_whole_rows(metrics)) is not None:
        raise ValueError(
            f"{op}: metrics has '{name}', which needs all classes in one process, expected names among z_loss, logprobs"
        )
    check_ignore_index(op, "target", target, options.ignore_index)
    return options._replace(
        ce_weight=whole_tensor(options.ce_weight),
        denominator=denominator_tensor(whole_tensor(options.denominator), tensor),
    )


def _local_layer(op, names, input, weight, bias, group=None, vocab_start=None, vocab_size=None):
    """(weight, bias, group, :class:`VocabShards`) of this process."""
    weight, group, vocab_size = local_shard(op, names.weight, weight, 0, group, vocab_size, input)
    bias, group, vocab_size = local_shard(op, names.bias, bias, 0, group, vocab_size, input)
    if weight.dim() != 2:
        raise wrong_shape(op, names.weight, weight, "(classes, hidden)")
    return weight, bias, group, find_shard(op, names.weight, weight.shape[0], group, vocab_start, vocab_size)


def fused_linear_ce(input, weight, target, bias, options, metrics, *where):
    """:func:`liger.fused_linear_ce` of the shard of a process. ``where``: group, vocab_start and vocab_size;
    without them a DTensor says it."""
    op = name_of_call(FUSED)
    check_budget_variable(options.memory_budget)
    check_accum_dtype(op, "input", input, options.accum_dtype)
    options = _prepare(op, options, metrics, input, target)
    weight, bias, group, shards = _local_layer(op, LayerNames(), input, weight, bias, *where)
    named = {"input": input, "target": target, "token_weight": options.token_weight}
    input, target, token_weight = (replicated_tensor(op, name, t, group) for name, t in named.items())
    input, weight, bias = autocast_operands(input, weight, bias)
    rows, flat_target, flat_weight, tokens = flatten_rows(op, "input", input, target, token_weight)
    needs_grad = (False,) * 3 if options.reduction == "none" else wants_grad(rows, weight, bias)
    options, flags = options._replace(token_weight=flat_weight), (metrics.z_loss, metrics.logprobs)
    results = fused_op(rows, weight, flat_target, bias, *options, *shards, *flags, *needs_grad)
    return output_like(tokens, options.reduction, metrics, results)


def cross_entropy(logits, target, options, metrics, group=None, vocab_start=None, vocab_size=None):
    """:func:`liger.cross_entropy` of the shard of a process."""
    op = name_of_call(PLAIN)
    options = _prepare(op, options, metrics, logits, target)
    logits, group, vocab_size = local_shard(op, "logits", logits, logits.dim() - 1, group, vocab_size)
    if logits.dim() == 0:
        raise wrong_shape(op, "logits", logits, "(..., classes)")
    shards = find_shard(op, "logits", logits.shape[-1], group, vocab_start, vocab_size)
    named = {"target": target, "token_weight": options.token_weight}
    target, token_weight = (replicated_tensor(op, name, t, group) for name, t in named.items())
    rows, flat_target, flat_weight, tokens = flatten_rows(op, "logits", logits, target, token_weight)
    options, flags = options._replace(token_weight=flat_weight), (metrics.z_loss, metrics.logprobs)
    results = plain_op(rows, flat_target, *options.of_logits, *shards, *flags)
    return output_like(tokens, options.reduction, metrics, results)


def fused_linear_logprobs(names, input, weight, target, bias, options, metrics, *where):
    """The fields of :class:`liger.LogProbs` of the shard of a process; ``names``: the argument names in
    messages."""
    op = name_of_call(LOGPROBS)
    check_budget_variable(options.memory_budget)
    check_ignore_index(op, names.target, target, options.ignore_index)
    weight, bias, group, shards = _local_layer(op, names, input, weight, bias, *where)
    named = {names.input: input, names.target: target}
    input, target = (replicated_tensor(op, name, t, group) for name, t in named.items())
    check_logits_dtype(op, names.input, input, options.logits_dtype)
    if not options.float32:
        input, weight, bias = autocast_operands(input, weight, bias)
    check_accum_dtype(op, names.input, input, options.accum_dtype)
    rows, flat, _, tokens = flatten_rows(op, names.input, input, target, None, names.target)
    layer = layer_to_check(op, weight, bias)
    check_layer(op, names, rows, *layer, flat, float32_weight=options.float32)
    check_given_classes(op, names.target, target, shards.vocab, options.ignore_index)
    options = options._replace(temperature=float(options.temperature))
    # Compiled code keeps nothing: its results have fixed sizes.
    keep = any(wants_grad(rows, weight)) and not is_traced(rows, weight)
    logprobs, entropy, argmax, _, *others, _, _ = logprobs_op(
        rows, weight, flat, bias, *options, *shards, *metrics, keep
    )
    optional = zip((entropy, argmax, *others), metrics, strict=True)
    return tokens.restore(logprobs), *(tokens.restore(t) if flag else None for t, flag in optional)
