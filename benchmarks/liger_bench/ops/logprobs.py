# SPDX-License-Identifier: BSD-3-Clause
"""Log-probabilities for reinforcement learning: logits in float32 vs. a float32 head (speed) and vs.
logits in bfloat16 (error).

The result ``ratio`` is the importance ratio of a policy with itself, ``exp(logp - exact logp)``: its relative
error is the root mean square of the absolute error of the log-probabilities, the mismatch of sampler and
trainer. The exact ones come from logits in float64.
"""

import torch
import torch.nn.functional as F

import liger

from ..candidates import Candidate, compiled, ours, providers, selected
from ..harness import FASTEST, Provider, Row, works
from ..heads import peers as head_peers
from ..heads.inputs import REFERENCE_ROWS, head_gemms, layer

FLOAT32 = " float32 logits"
RESULTS, UPSTREAM = ("ratio",), ("grad_ratio",)
NARROW, WIDE = ("input", "weight"), ("input", "weight32")
# GEMMs of each work; the backward computes the logits again.
GEMMS = {"forward": 1, "backward": 3, "forward and backward": 4}


def _ratio(logprobs, t):
    return (logprobs - t["exact"]).exp()


def _ours(t, weight="weight", **options):
    return _ratio(liger.fused_linear_logprobs(t["input"], t[weight], t["target"], **options), t)


def _plain(logits, t):
    return _ratio(logits.log_softmax(-1).gather(1, t["target"].unsqueeze(1)).squeeze(1), t)


def _rounded_logits(t):
    return _plain(F.linear(t["input"], t["weight"]).float(), t)


def _float32_head(t):
    return _plain(F.linear(t["input"].float(), t["weight32"]), t)


def _gemms(count):
    def make(inputs):
        head = inputs["input"], inputs["weight"]
        return head_gemms(*[head] * (2 if count == 4 else 1), gradients=count > 1)

    return make


def _exact(x, weight, target):
    """Log-probabilities from logits in float64, in blocks of rows."""
    wide = weight.double()
    parts = []
    for rows in torch.arange(x.shape[0], device=x.device).split(REFERENCE_ROWS):
        logp = (x[rows].double() @ wide.T).log_softmax(-1)
        parts.append(logp.gather(1, target[rows].unsqueeze(1)).squeeze(1))
    return torch.cat(parts).float()


def _reference(work):
    """The ratio 1, and the gradients in float32, in blocks of rows."""

    def run(inputs):
        results = {"ratio": torch.ones_like(inputs["exact"])} if work != "backward" else {}
        if work == "forward":
            return results
        x, weight = inputs["input"].float(), inputs["weight32"].detach().requires_grad_()
        grad_x, grad_weight = [], torch.zeros_like(weight)
        for rows in torch.arange(x.shape[0], device=x.device).split(REFERENCE_ROWS):
            part = x[rows].requires_grad_()
            logp = (part @ weight.T).log_softmax(-1).gather(1, inputs["target"][rows].unsqueeze(1)).squeeze(1)
            grads = torch.autograd.grad(logp, (part, weight), inputs["grad_ratio"][rows])
            grad_x.append(grads[0])
            grad_weight += grads[1]
        return {**results, "dinput": torch.cat(grad_x), "dweight": grad_weight, "dweight32": grad_weight}

    return run


def _row(options, work, maker, arguments, tokens, hidden, vocabulary):
    def inputs():
        made = layer(options, tokens, hidden, vocabulary)
        upstream = torch.randn(tokens, device=made["input"].device)
        exact = _exact(made["input"], made["weight"], made["target"])
        return {**made, "weight32": made["weight"].float(), "exact": exact, "grad_ratio": upstream}

    narrow = [
        *ours(options, _ours),
        *ours(options, lambda t: _ours(t, logits_dtype=torch.float32), FLOAT32),
        Candidate("torch rounded logits", _rounded_logits),
        *compiled(options, _rounded_logits, " rounded logits"),
        head_peers.trl(lambda t: _ratio(head_peers.trl_logprobs(t), t)),
    ]
    wide = [
        *ours(
            options, lambda t: _ours(t, "weight32", logits_dtype=torch.float32), f"{FLOAT32} float32 weight"
        ),
        Candidate("torch float32 head", _float32_head),
        *compiled(options, _float32_head, " float32 head"),
    ]
    made = []
    for candidates, leaves in ((narrow, NARROW), (wide, WIDE)):
        *names, _ = arguments
        made += providers(selected(options, candidates), maker, *names, leaves)
    return Row(
        "logprobs",
        f"logprobs {work} {tokens}x{hidden}x{vocabulary}",
        inputs,
        [*made, Provider("GEMMs", _gemms(GEMMS[work]), "ceiling")],
        _reference(work),
        rounds=5,
        burst=1,
        heat_ms=100,
        contests=(FASTEST,),
        work=f"logprobs {work}",
        shape={"tokens": tokens, "hidden size": hidden, "vocabulary": vocabulary},
    )


def rows(options):
    size = options.pick((8192, 2048, 128256), (8192, 2048, 128256), (14, 16, 50))
    for work, (maker, *arguments) in works(RESULTS, UPSTREAM, NARROW).items():
        yield _row(options, work, maker, arguments, *size)
