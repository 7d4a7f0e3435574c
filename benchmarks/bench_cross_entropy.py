"""Cross entropy of given logits, forward and backward."""

import torch.nn.functional as F
from harness import (
    Candidate,
    Row,
    compiled,
    float32_reference,
    liger_kernel,
    normal,
    ours,
    providers,
    targets,
    training_work,
)

import liger


def _eager(t):
    return F.cross_entropy(t["logits"].float(), t["target"])


def _liger_kernel(t):
    from liger_kernel.ops import LigerCrossEntropyFunction

    return LigerCrossEntropyFunction.apply(t["logits"], t["target"], None)[0]


def _quack(t, inplace):
    from quack import cross_entropy

    return cross_entropy(t["logits"], t["target"], reduction="mean", inplace_backward=inplace)


def _candidates(options):
    logits = ("logits",)
    return [
        *ours(options, lambda t: liger.cross_entropy(t["logits"], t["target"])),
        *ours(
            options, lambda t: liger.cross_entropy(t["logits"], t["target"], inplace=True), " inplace", logits
        ),
        liger_kernel(_liger_kernel, overwrites=logits),
        Candidate("torch eager", _eager),
        *compiled(options, _eager),
        Candidate("quack", lambda t: _quack(t, False), needs=("quack",)),
        Candidate("quack inplace", lambda t: _quack(t, True), needs=("quack",), overwrites=logits),
    ]


def rows(options):
    work = (training_work, (), ("logits",))
    for tokens, vocabulary, ignored in options.pick(
        [(8192, 128256, False), (8192, 128256, True), (8192, 32000, False)],
        [(8192, 128256, False), (8192, 32000, False)],
        [(14, 50, False), (14, 50, True)],
    ):

        def inputs(tokens=tokens, vocabulary=vocabulary, ignored=ignored):
            logits = normal(options, tokens, vocabulary, std=2.5)
            return {"logits": logits, "target": targets(options, tokens, vocabulary, ignored)}

        yield Row(
            "cross_entropy",
            f"cross_entropy {tokens}x{vocabulary}" + (", 1/7 ignored" if ignored else ""),
            inputs,
            providers(_candidates(options), *work),
            float32_reference(_eager, *work),
            nbytes=4 * tokens * vocabulary,
            rounds=8,
            burst=2,
        )
