# SPDX-License-Identifier: BSD-3-Clause
"""Rows of ``fused_linear_logprobs`` for ops/heads.py: a policy gradient, forward and backward, with
exponentials that fit the memory budget and without."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import liger

from ..candidates import compiled, ours, providers, selected
from ..harness import FASTEST, Provider, Row, normal, training_work
from ..ops.fused_linear_ce import three_gemms
from . import peers as head_peers
from .inputs import float32_reference, layer

# Weight of the entropies in the loss.
BONUS = 0.01


@dataclass(frozen=True)
class Policy:
    """The sizes of a head, and how its log-probabilities are computed."""

    model: str
    tokens: int
    hidden: int
    vocabulary: int
    keeps: bool  # the budget holds the exponentials of all rows
    entropy: bool = False
    temperature: float = 1.0
    metrics: bool = False  # log_sum_sq_probs and mean_logits, too

    @property
    def budget(self):
        """Bytes; None: the default, which is less than the exponentials take."""
        return 2 * self.tokens * -(-self.vocabulary // 128) * 128 if self.keeps else None

    @property
    def name(self):
        parts = (
            f"heads logprobs {self.model} {self.tokens}x{self.hidden}x{self.vocabulary}",
            f"budget {self.budget >> 20} MiB" if self.budget else "default budget",
            f"temperature {self.temperature:g}" if self.temperature != 1.0 else "",
            "entropy" if self.entropy else "",
            "metrics" if self.metrics else "",
        )
        return ", ".join(filter(None, parts))


def head_row(head, inputs, contestants, reference, **options):
    """The row of a head, or of a policy, vs. its three GEMMs by cuBLAS."""
    return Row(
        "heads",
        head.name,
        inputs,
        [*contestants, Provider("three GEMMs", three_gemms(multiple=128), "ceiling")],
        reference,
        rounds=5,
        burst=1,
        heat_ms=100,
        shape={"tokens": head.tokens, "hidden size": head.hidden, "vocabulary": head.vocabulary},
        **options,
    )


LLAMA = "Llama-3.2-1B", 8192, 2048, 128256
POLICIES = (
    Policy(*LLAMA, keeps=True),
    Policy(*LLAMA, keeps=False),
    Policy(*LLAMA, keeps=True, entropy=True, temperature=0.7),
    Policy(*LLAMA, keeps=False, entropy=True, temperature=0.7),
    Policy(*LLAMA, keeps=True, metrics=True),
    Policy(*LLAMA, keeps=False, metrics=True),
)
QUICK = POLICIES[:2]
TINY = (
    Policy("tiny", 14, 16, 50, keeps=True),
    Policy("tiny", 14, 16, 50, keeps=False, entropy=True, temperature=0.7),
    Policy("tiny", 14, 16, 50, keeps=False, metrics=True),
)


def _loss(policy, logprobs, entropy, advantages):
    total = (logprobs * advantages).mean()
    return -(total + BONUS * entropy.mean() if policy.entropy else total)


def _ours(policy):
    options = {
        "temperature": policy.temperature,
        "memory_budget": policy.budget,
        "metrics": [
            *(["entropy"] if policy.entropy else []),
            *(["log_sum_sq_probs", "mean_logits"] if policy.metrics else []),
        ],
    }

    def run(t):
        found = liger.fused_linear_logprobs(t["input"], t["weight"], t["target"], **options)
        return _loss(policy, *((found, None) if torch.is_tensor(found) else found[:2]), t["advantages"])

    return run


def _eager(policy):
    def run(t):
        logits = F.linear(t["input"], t["weight"]).float() / policy.temperature
        logp = logits.log_softmax(-1)
        chosen = logp.gather(-1, t["target"].unsqueeze(-1)).squeeze(-1)
        entropy = -(logp.exp() * logp).sum(-1) if policy.entropy else None
        return _loss(policy, chosen, entropy, t["advantages"])

    return run


def _peer(policy, logprobs):
    """A policy gradient over the log-probabilities of a peer."""
    return lambda t: _loss(policy, logprobs(t, policy.temperature), None, t["advantages"])


def _row(options, policy):
    def inputs():
        return {
            **layer(options, policy.tokens, policy.hidden, policy.vocabulary),
            # Of one sign: the relative error of a sum near zero says nothing.
            "advantages": normal(options, policy.tokens).float().abs(),
        }

    candidates = ours(options, _ours(policy))
    if not policy.metrics:
        candidates += compiled(options, _eager(policy))
    if not policy.entropy and not policy.metrics:
        candidates += [
            head_peers.trl(_peer(policy, head_peers.trl_logprobs)),
            head_peers.unsloth(_peer(policy, head_peers.unsloth_logprobs)),
        ]
    contestants = providers(selected(options, candidates), training_work, (), ("input", "weight"))
    contests = () if policy.metrics else (FASTEST,)
    reference = float32_reference(_eager(policy), ("input", "weight"), ("target", "advantages"))
    return head_row(policy, inputs, contestants, reference, contests=contests, work="heads logprobs")


def rows(options):
    for policy in options.pick(POLICIES, QUICK, TINY):
        yield _row(options, policy)
