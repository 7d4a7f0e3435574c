# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy of logits: forward with the tensors that the backward needs, and forward and backward
together."""

import torch.nn.functional as F

import liger

from ..candidates import (
    LIGER_KERNEL_CUTE,
    Candidate,
    compiled,
    host_rows,
    liger_kernel,
    liger_kernel_cute,
    ours,
    peer,
    providers,
    quack,
    selected,
)
from ..harness import VOCABULARIES, Contest, Row, float32_reference, normal, targets, works
from ..reports.goals import COPY, Goal

GOALS = (
    Goal("cross_entropy forward and backward 8192x128256", COPY, 0.95),
    Goal("cross_entropy forward and backward 8192x32000", COPY, 0.95),
)

GRADIENT = ("backward", "forward and backward")


def _eager(t):
    return F.cross_entropy(t["logits"].float(), t["target"])


def _liger_kernel(t, module="liger_kernel.ops"):
    return peer(module, "LigerCrossEntropyFunction").apply(t["logits"], t["target"], None)[0]


def _quack(t, inplace):
    return peer("quack", "cross_entropy")(
        t["logits"], t["target"], reduction="mean", inplace_backward=inplace
    )


def _inplace(t):
    return liger.cross_entropy(t["logits"], t["target"], inplace=True)


def _candidates(options):
    logits = ("logits",)
    return [
        *ours(options, lambda t: liger.cross_entropy(t["logits"], t["target"])),
        *ours(options, _inplace, " inplace", logits, GRADIENT),
        liger_kernel(_liger_kernel, overwrites=logits),
        liger_kernel_cute(lambda t: _liger_kernel(t, LIGER_KERNEL_CUTE), overwrites=logits),
        quack(lambda t: _quack(t, False)),
        quack(lambda t: _quack(t, True), " inplace", logits, GRADIENT),
        Candidate("torch eager", _eager),
        *compiled(options, _eager),
    ]


WORKS = works(("loss",), (), ("logits",))
# Memory traffic in tensors of the size of the logits; forward and backward together read them once.
# liger-kernel computes the gradient in its forward, so only both together are compared.
TENSORS = {"forward": 1, "backward": 2, "forward and backward": 2}


def _inputs(options, tokens, vocabulary, ignored=""):
    def make():
        logits = normal(options, tokens, vocabulary, std=2.5)
        return {"logits": logits, "target": targets(options, tokens, vocabulary, ignored)}

    return make


def _rows(options, tokens, vocabulary, ignored=""):
    candidates = _candidates(options)
    for name, work in WORKS.items():
        if ignored and name != "forward and backward":
            continue
        suffix = f", {ignored}" if ignored else ""
        yield Row(
            "cross_entropy",
            f"cross_entropy {name} {tokens}x{vocabulary}{suffix}",
            _inputs(options, tokens, vocabulary, ignored),
            providers(selected(options, candidates, name), *work),
            float32_reference(_eager, *work),
            nbytes=TENSORS[name] * 2 * tokens * vocabulary,
            rounds=8,
            burst=2,
            contests=(Contest(),) if name == "forward and backward" else (),
            work=f"cross_entropy {name}{suffix}",
            shape={"tokens": tokens, "vocabulary": vocabulary},
        )


def rows(options):
    if options.sweep:
        for vocabulary in options.swept(VOCABULARIES):
            yield from _rows(options, options.pick(8192, 8192, 14), vocabulary)
        return
    full = [(8192, 128256), (8192, 128256, "1/7 ignored"), (8192, 32000)]
    for size in options.pick(full, [full[0], full[2]], [(14, 50), (14, 50, "1/7 ignored")]):
        yield from _rows(options, *size)
    yield from host_rows(options, "cross_entropy", _inputs(options, 8, 256), _candidates(options), WORKS)
