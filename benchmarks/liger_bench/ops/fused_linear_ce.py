# SPDX-License-Identifier: BSD-3-Clause
"""The lm_head with cross entropy, forward and backward, against the three GEMMs that every method needs."""

import torch
import torch.nn.functional as F

import liger

from ..candidates import (
    Candidate,
    compiled,
    liger_kernel,
    liger_kernel_cute,
    ours,
    peer,
    providers,
    quack,
    selected,
)
from ..harness import VOCABULARIES, Contest, Provider, Row, training_work
from ..heads.inputs import REFERENCE_ROWS, head_gemms, layer
from ..reports.goals import GEMMS, Goal

# The gradients of that lm_head, which every method returns, plus 128 MiB.
SMALL_MIB = (16384 + 128256) * 4096 * 2 / 2**20 + 128
GOALS = (
    Goal("fused_linear_ce 16384x4096x128256", GEMMS, 1.03, 1640, exact=True),
    Goal("fused_linear_ce 4096x4096x128256", GEMMS, 1.05, 1550, exact=True),
    Goal("fused_linear_ce 16384x2048x128256", GEMMS, 1.08, 1070, exact=True),
    Goal("fused_linear_ce 32768x4096x32000", GEMMS, 1.03, 1020, exact=True),
    Goal("fused_linear_ce 16384x4096x128256", GEMMS, 1.12, SMALL_MIB),
    Goal("fused_linear_ce 16384x4096x128256, half ignored", GEMMS, 0.55),
    Goal("fused_linear_ce 16384x4096x128256, prompts ignored", GEMMS, 0.55),
)

LOW = " low-precision sum"
SMALL = f"{LOW}, small"
AS_SMALL = f"{LOW}, as small as liger-kernel"
# At most 128 MiB in addition to the gradients: the logits of a chunk, and 2 MiB for values per row.
SMALL_BUDGET = 126 << 20


def _eager(t):
    return F.cross_entropy((t["input"] @ t["weight"].T).float(), t["target"])


def torch_head(t):
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(t["input"], t["weight"], t["target"], options=options)


def _ours(t, **how):
    return liger.fused_linear_ce(t["input"], t["weight"], t["target"], **how)


def _liger_kernel(t, accum_dtype):
    # input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction,
    # softcap, return_z_loss, accum_dtype
    return peer("liger_kernel.ops", "LigerFusedLinearCrossEntropyFunction").apply(
        t["input"], t["weight"], t["target"], None, None, -100, 0.0, 0.0, "mean", None, False, accum_dtype
    )[0]


def cute_head(t):
    module = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
    function = peer(module, "LigerFusedLinearCrossEntropySM90Function")
    return function.apply(t["input"], t["weight"], t["target"])


def _cut_cross_entropy(t):
    return peer("cut_cross_entropy", "linear_cross_entropy")(t["input"], t["weight"], t["target"])


def quack_head(t, chunk_size):
    function = peer("quack.linear_cross_entropy", "chunked_linear_cross_entropy")
    if chunk_size == t["input"].shape[1]:
        chunk_size //= 2  # version 0.6.5 refuses chunks with as many rows as columns
    return function(t["input"], t["weight"], t["target"], chunk_size=chunk_size, tuned=False)


def liger_kernel_logits_bytes(tokens, hidden, vocabulary, element_size=2):
    """The default chunk of logits in liger-kernel 0.8.5: about as many elements as the input."""
    chunks = -(-vocabulary // hidden)
    rows = -(-tokens // chunks)
    return min(1 << (rows - 1).bit_length(), tokens) * vocabulary * element_size


def _small(options, tokens, hidden, vocabulary):
    """liger with small memory budgets: 128 MiB in addition to the gradients and, unless that is about the
    same, the memory of liger-kernel."""
    low = {"accum_dtype": options.dtype}
    same = liger_kernel_logits_bytes(tokens, hidden, vocabulary)
    made = ours(options, lambda t: _ours(t, **low, memory_budget=SMALL_BUDGET), SMALL)
    if not 0.9 < same / SMALL_BUDGET <= 1:
        made += ours(options, lambda t: _ours(t, **low, memory_budget=same), AS_SMALL)
    return made


def _candidates(options, tokens, hidden, vocabulary, ignored):
    low = {"accum_dtype": options.dtype}
    candidates = [
        *ours(options, _ours),
        *ours(options, lambda t: _ours(t, **low), LOW),
        liger_kernel(lambda t: _liger_kernel(t, None)),
        Candidate("cut-cross-entropy", _cut_cross_entropy, needs=("cut_cross_entropy",)),
    ]
    if not ignored:
        candidates += [
            *_small(options, tokens, hidden, vocabulary),
            liger_kernel(lambda t: _liger_kernel(t, torch.float32), " fp32 sum"),
            liger_kernel_cute(cute_head),
            quack(lambda t: quack_head(t, 4096)),
            Candidate("torch eager", _eager),
            *compiled(options, _eager),
        ]
        if tokens > 4096:
            candidates.append(quack(lambda t: quack_head(t, tokens), " one chunk"))
        if hasattr(F, "linear_cross_entropy"):
            candidates.append(Candidate("torch F.linear_cross_entropy", torch_head))
    return selected(options, candidates)


def three_gemms(valid_only=False, multiple=1):
    """The GEMMs of logits and both gradients by cuBLAS, into preallocated memory: for all tokens, or for as
    many as are valid; for all classes, or the largest multiple of so many."""

    def make(inputs):
        x, weight = inputs["input"], inputs["weight"]
        weight = weight[: max(len(weight) // multiple * multiple, 1)]
        if valid_only:
            x = x[: int((inputs["target"] != -100).sum())]
        return head_gemms((x, weight))

    return make


def _reference(inputs):
    """The float32 result, in blocks of rows."""
    x, weight, target = inputs["input"].float(), inputs["weight"].float(), inputs["target"]
    count = (target != -100).sum()
    loss, grad_x, grad_weight = 0.0, torch.empty_like(x), torch.zeros_like(weight)
    for part in torch.arange(x.shape[0], device=x.device).split(REFERENCE_ROWS):
        logits, kept = x[part] @ weight.T, target[part] != -100
        loss = loss + F.cross_entropy(logits, target[part], reduction="sum") / count
        grad = logits.softmax(-1)
        grad[torch.arange(len(part), device=x.device), target[part].clamp_min(0)] -= 1
        grad *= (kept / count)[:, None]
        grad_x[part] = grad @ weight
        grad_weight.addmm_(grad.T, x[part])
    return {"loss": loss, "dinput": grad_x, "dweight": grad_weight}


def _row(options, tokens, hidden, vocabulary, ignored=""):
    def inputs():
        return layer(options, tokens, hidden, vocabulary, ignored)

    candidates = _candidates(options, tokens, hidden, vocabulary, ignored)
    ceilings = [Provider("three GEMMs", three_gemms(), "ceiling")]
    contests = [Contest(label="it sums dW in bfloat16")]
    if ignored:
        ceilings.append(Provider("three GEMMs of valid tokens", three_gemms(valid_only=True), "ceiling"))
    else:
        exact = tuple(c.name for c in candidates if c.group == "ours" and LOW not in c.name)
        contests.append(Contest("liger-kernel fp32 sum", "fp32 sums", exact))
    suffix = f", {ignored}" if ignored else ""
    return Row(
        "fused_linear_ce",
        f"fused_linear_ce {tokens}x{hidden}x{vocabulary}{suffix}",
        inputs,
        [*providers(candidates, training_work, (), ("input", "weight")), *ceilings],
        _reference,
        rounds=7,
        burst=1,
        heat_ms=100,
        contests=tuple(contests),
        work=f"fused_linear_ce{suffix}",
        shape={"tokens": tokens, "hidden size": hidden, "vocabulary": vocabulary},
    )


def rows(options):
    if options.sweep:
        tokens, hidden = options.pick((8192, 4096), (8192, 4096), (14, 16))
        for vocabulary in options.swept(VOCABULARIES):
            yield _row(options, tokens, hidden, vocabulary)
        return
    heads = [(16384, 4096, 128256), (4096, 4096, 128256), (16384, 2048, 128256), (32768, 4096, 32000)]
    sizes = options.pick(heads, heads[:1], [(14, 16, 50)])
    for ignored in ("", "half ignored", "prompts ignored"):
        for size in sizes:
            yield _row(options, *size, ignored)
