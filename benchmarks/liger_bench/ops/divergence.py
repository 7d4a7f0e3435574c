# SPDX-License-Identifier: BSD-3-Clause
"""The generalised Jensen-Shannon divergence between logits of a student and a teacher."""

import liger

from ..candidates import Candidate, compiled, liger_kernel, ours, peer, providers, selected
from ..harness import Contest, Row, float32_reference, normal, works
from ..reports.goals import COPY, Goal

GOALS = (
    # 1.15 times one read of both tensors of logits and one write.
    Goal("divergence forward and backward 8192x128256", COPY, 0.87),
)

BETA = 0.3


def _eager(t):
    log_q, log_p = (t[name].float().log_softmax(-1) for name in ("student", "teacher"))
    p, q = log_p.exp(), log_q.exp()
    log_m = (BETA * p + (1 - BETA) * q).log()
    rows = BETA * p * (log_p - log_m) + (1 - BETA) * q * (log_q - log_m)
    return rows.sum(-1).mean()


def _liger_kernel(t):
    log_q, log_p = (t[name].float().log_softmax(-1) for name in ("student", "teacher"))
    return peer("liger_kernel.ops", "LigerJSDFunction").apply(log_q, log_p, None, BETA)


def _candidates(options):
    return [
        *ours(options, lambda t: liger.jsd(t["student"], t["teacher"], beta=BETA)),
        liger_kernel(_liger_kernel),
        Candidate("torch eager", _eager),
        *compiled(options, _eager),
    ]


WORKS = works(("loss",), (), ("student",))
# Memory traffic in tensors of the size of the logits.
TENSORS = {"forward": 2, "backward": 3, "forward and backward": 3}


def rows(options):
    tokens, vocabulary = options.pick((8192, 128256), (8192, 32000), (14, 50))

    def inputs():
        return {name: normal(options, tokens, vocabulary, std=2.5) for name in ("student", "teacher")}

    candidates = _candidates(options)
    for name, work in WORKS.items():
        yield Row(
            "divergence",
            f"divergence {name} {tokens}x{vocabulary}",
            inputs,
            providers(selected(options, candidates, name), *work),
            float32_reference(_eager, *work),
            nbytes=TENSORS[name] * 2 * tokens * vocabulary,
            rounds=8,
            burst=2,
            contests=(Contest(),) if name == "forward and backward" else (),
            work=f"divergence {name}",
            shape={"tokens": tokens, "vocabulary": vocabulary},
        )
