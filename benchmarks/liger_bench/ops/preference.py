# SPDX-License-Identifier: BSD-3-Clause
"""Post-training losses over the lm_head, forward and backward, against the GEMMs that every method needs.

Distillation among them: its teacher, a second head, is the reference of the others.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F

import liger
from liger import losses

from ..candidates import Candidate, liger_kernel, ours, peer, providers, selected
from ..harness import Contest, Provider, Row, float32_reference, normal, targets, training_work
from ..heads.inputs import head_gemms
from ..reports.goals import GEMMS, Goal

GOALS = (
    Goal("dpo 8x1024x4096x128256", "x four GEMMs", 1.06, 1600),
    Goal("kto 8x1024x4096x128256", "x four GEMMs", 1.06),
    Goal("fused_linear_jsd 8x1024x4096x128256", "x four GEMMs", 1.15, 1600),
    Goal("jsd 8x1024x4096x128256", "x four GEMMs", 1.15, 1600),
    Goal("orpo 8x1024x4096x128256", GEMMS, 1.06),
    Goal("simpo 8x1024x4096x128256", GEMMS, 1.06),
    Goal("grpo 8x1024x4096x128256", GEMMS, 1.06, 1600),
)

LOW = " low-precision sum"
BETA, GAMMA, EPSILON = 0.1, 0.5, 0.2
DIFFERENTIATED = ("x", "weight")


# --- in plain torch -----------------------------------------------------------------------------------------


def _logprobs(x, weight, target):
    logp = F.log_softmax((x @ weight.T).float(), -1)
    return logp.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def _pair(scores):
    return scores.unflatten(0, (2, -1))


def _reference_scores(t):
    with torch.no_grad():
        return _logprobs(t["ref_x"], t["ref_weight"], t["target"]).sum(-1)


def _dpo(t):
    chosen, rejected = _pair(_logprobs(t["x"], t["weight"], t["target"]).sum(-1) - _reference_scores(t))
    return -F.logsigmoid(BETA * (chosen - rejected)).mean()


def _orpo(t):
    logps = _logprobs(t["x"], t["weight"], t["target"])
    chosen, rejected = _pair(logps.mean(-1))
    odds = chosen - rejected - torch.log1p(-chosen.exp()) + torch.log1p(-rejected.exp())
    return -(BETA * F.logsigmoid(odds)).mean() - _pair(logps)[0].mean()


def _simpo(t):
    logps = _logprobs(t["x"], t["weight"], t["target"])
    chosen, rejected = _pair(logps.mean(-1))
    return -F.logsigmoid(BETA * (chosen - rejected) - GAMMA).mean() - _pair(logps)[0].mean()


def _kto(t):
    ratio = BETA * (_logprobs(t["x"], t["weight"], t["target"]).sum(-1) - _reference_scores(t))
    return (1 - torch.sigmoid(torch.where(t["labels"], ratio, -ratio))).mean()


def _grpo(t):
    logps = _logprobs(t["x"], t["weight"], t["target"])
    ratio, gap = (logps - t["old"]).exp(), t["ref"] - logps
    advantages = t["advantages"].unsqueeze(-1)
    clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    return (BETA * (gap.exp() - gap - 1) - gain).mean()


def _divergence(t):
    return _distance(t)[0].mean()


def _jsd(t):
    distance, log_q = _distance(t)
    return 0.5 * distance.mean() + 0.5 * F.nll_loss(log_q.flatten(0, 1), t["target"].flatten())


def _distance(t):
    log_q = F.log_softmax((t["x"] @ t["weight"].T).float(), -1)
    with torch.no_grad():
        log_p = F.log_softmax((t["ref_x"] @ t["ref_weight"].T).float(), -1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return 0.5 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1), log_q


# --- the losses ---------------------------------------------------------------------------------------------


def _reference(t):
    return {"ref_input": t["ref_x"], "ref_weight": t["ref_weight"]}


def _call_pairs(module, t):
    return module(t["x"], t["weight"], t["target"])[0]


def _call_dpo(module, t):
    return module(t["x"], t["weight"], t["target"], **_reference(t))[0]


def _call_kto(module, t):
    return module(t["x"], t["weight"], t["target"], preference_labels=t["labels"], **_reference(t))[0]


def _call_grpo(module, t):
    # The cost of the mask is part of the work.
    mask = torch.ones_like(t["target"])
    logps = {"ref_per_token_logps": t["ref"], "old_per_token_logps": t["old"]}
    return module(t["x"], t["weight"], t["target"], advantages=t["advantages"], mask=mask, **logps)[0]


def _call_jsd(module, t):
    x, teacher = (t[name].flatten(0, 1) for name in ("x", "ref_x"))
    of_teacher = {"teacher_input": teacher, "teacher_weight": t["ref_weight"]}
    return module(x, t["weight"], t["target"].flatten(), **of_teacher)[0]


def _call_divergence(op, t):
    return op(t["x"], t["weight"], teacher_input=t["ref_x"], teacher_weight=t["ref_weight"])


# --- the losses of liger-kernel, in its order of the arguments ----------------------------------------------


def _peer_pairs(module, t):
    return module(t["weight"], t["x"], t["target"])[0]


def _peer_dpo(module, t):
    return module(t["weight"], t["x"], t["target"], **_reference(t))[0]


def _peer_grpo(module, t):
    mask = torch.ones_like(t["target"])
    return module(t["x"], t["weight"], t["target"], mask, t["advantages"], None, t["ref"], t["old"])[0]


def _peer_jsd(module, t):
    x, teacher = (t[name].flatten(0, 1) for name in ("x", "ref_x"))
    return module(x, t["weight"], teacher, t["ref_weight"], t["target"].flatten())


_PEERS = {
    "dpo": _peer_dpo, "orpo": _peer_pairs, "simpo": _peer_pairs, "kto": _call_kto, "grpo": _peer_grpo,
    "jsd": _peer_jsd,
}  # fmt: skip
_CLIP = {"beta": BETA, "epsilon_low": EPSILON, "epsilon_high": EPSILON, "loss_type": "bnpo"}
# name: (plain torch, name of the class or op, its options, function that calls it, number of GEMMs)
LOSSES = {
    "dpo": (_dpo, "FusedLinearDPOLoss", {"beta": BETA}, _call_dpo, 4),
    "orpo": (_orpo, "FusedLinearORPOLoss", {"beta": BETA}, _call_pairs, 3),
    "simpo": (_simpo, "FusedLinearSimPOLoss", {"beta": BETA, "gamma": GAMMA}, _call_pairs, 3),
    "kto": (_kto, "FusedLinearKTOLoss", {"beta": BETA}, _call_kto, 4),
    "grpo": (_grpo, "FusedLinearGRPOLoss", _CLIP, _call_grpo, 3),
    "jsd": (_jsd, "FusedLinearJSDLoss", {"beta": 0.5}, _call_jsd, 4),
    "fused_linear_jsd": (_divergence, liger.fused_linear_jsd, {"beta": 0.5}, _call_divergence, 4),
}
# Works with a teacher that is different from the initial student.
DISTILLATION = ("jsd", "fused_linear_jsd")


def _candidates(options, name):
    plain, cls, settings, call, _ = LOSSES[name]
    if callable(cls):
        low, exact = partial(cls, **settings, accum_dtype=options.dtype), partial(cls, **settings)
    else:
        low, exact = (
            getattr(losses, cls)(**settings, **dtype) for dtype in ({"accum_dtype": options.dtype}, {})
        )
    with_reference = {"use_ref_model": True} if name == "kto" else {}

    def peers(t):
        module = peer("liger_kernel.chunked_loss", f"Liger{cls}")(**settings, **with_reference)
        return _PEERS[name](module, t)

    return selected(
        options,
        [
            *ours(options, lambda t: call(exact, t)),
            *ours(options, lambda t: call(low, t), LOW),
            # liger-kernel has no op of two lm_heads for the divergence alone.
            *([] if callable(cls) else [liger_kernel(peers)]),
            Candidate("torch eager", plain),
        ],
    )


def _gemms(with_reference):
    def make(inputs):
        heads = [("ref_x", "ref_weight")] * with_reference + [("x", "weight")]
        return head_gemms(*((inputs[x].flatten(0, 1), inputs[weight]) for x, weight in heads))

    return make


def _row(options, name, sequences, length, hidden, vocabulary):
    plain, *_, gemms = LOSSES[name]

    def inputs():
        # Logits with standard deviation 2.5, as in a trained model; a reference and an old policy close to
        # the new one.
        std = 0.02
        x = normal(options, sequences, length, hidden, std=2.5 / (std * hidden**0.5))
        made = {
            "x": x,
            "weight": normal(options, vocabulary, hidden, std=std),
            "target": targets(options, sequences * length, vocabulary, "").view(sequences, length),
        }
        if gemms == 4:
            apart = 0.5 if name in DISTILLATION else 0.01
            made["ref_x"] = x + normal(options, sequences, length, hidden, std=apart)
            made["ref_weight"] = made["weight"].clone()
        if name == "kto":
            made["labels"] = torch.arange(sequences, device=x.device) % 2 == 0
        if name == "grpo":
            # With mean 0 the loss would be close to 0, and its relative error meaningless.
            made["advantages"] = torch.linspace(-0.5, 2, sequences, device=x.device)
            logps = liger.fused_linear_logprobs(x, made["weight"], made["target"])
            moved, apart = (0.1 * torch.randn_like(logps) for _ in range(2))
            # No ratio near the clip bounds, where 16-bit rounding of logits decides whether a gradient is 0.
            inside, outside = (abs(math.log1p(sign * EPSILON)) for sign in (1, -1))
            at_edge = (moved.abs() > inside - 0.05) & (moved.abs() < outside + 0.05)
            made["old"], made["ref"] = logps + moved.masked_fill(at_edge, 0.0), logps + apart
        return made

    candidates = _candidates(options, name)
    ceiling = f"{'four' if gemms == 4 else 'three'} GEMMs"
    return Row(
        "preference",
        f"{name} {sequences}x{length}x{hidden}x{vocabulary}",
        inputs,
        [
            *providers(candidates, training_work, (), DIFFERENTIATED),
            Provider(ceiling, _gemms(gemms == 4), "ceiling"),
        ],
        float32_reference(plain, training_work, (), DIFFERENTIATED),
        rounds=7,
        burst=1,
        heat_ms=100,
        # liger-kernel has no such function without hard labels.
        contests=() if name == "fused_linear_jsd" else (Contest(label="it sums dW in bfloat16"),),
        work=name,
        shape={"sequences": sequences, "length": length, "hidden size": hidden, "vocabulary": vocabulary},
    )


def rows(options):
    size = options.pick((8, 1024, 4096, 128256), (8, 1024, 4096, 128256), (4, 6, 16, 50))
    for name in LOSSES:
        yield _row(options, name, *size)
