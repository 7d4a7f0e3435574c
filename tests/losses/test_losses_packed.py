# SPDX-License-Identifier: BSD-3-Clause
"""Cumulative lengths of packed batches: those that do not fit are an error on a CPU, and a loss of nan on a
GPU."""

import os
import subprocess
import sys

import pytest
import torch
from errors import error_about
from losses_cases import HIDDEN, VOCAB, leaf

from liger import losses

TOKENS = 12
FITTING = [0, 3, 3, 7, 12]
WRONG = {
    "falling": ([0, 7, 3, 9, 12], None),
    "negative": ([-2, 3, 3, 7, 12], None),
    "far below": ([-50, 3, 3, 7, 12], None),
    "beyond the tokens": ([0, 3, 3, 7, 13], None),
    "far beyond": ([0, 3, 3, 7, 2**30], 12),
    "max_length below the longest": (FITTING, 4),
}


def batch(device):
    hidden = leaf(torch.randn(TOKENS, HIDDEN, device=device))
    weight = leaf(torch.randn(VOCAB, HIDDEN, device=device))
    return hidden, weight, torch.randint(VOCAB, (TOKENS,), device=device)


DPO, ORPO = losses.FusedLinearDPOLoss(use_ref_model=False), losses.FusedLinearORPOLoss()
KTO, KTO_DIVERGENCE = losses.FusedLinearKTOLoss(use_ref_model=False), losses.FusedLinearKTOLoss()
GRPO = losses.FusedLinearGRPOLoss(beta=0.0)
GSPO = losses.FusedLinearGRPOLoss(beta=0.0, importance_sampling_level="sequence")


def dpo(hidden, weight, target, **where):
    return DPO(hidden, weight, target, **where)[0]


def orpo(hidden, weight, target, **where):
    return ORPO(hidden, weight, target, nll_target=target.flip(0), **where)[0]


def kto(hidden, weight, target, **where):
    labels = torch.ones(4, device=target.device)
    return KTO(hidden, weight, target, preference_labels=labels, **where)[0]


def kto_divergence(hidden, weight, target, **where):
    ref_logps = torch.full((4,), -100.0, device=target.device)
    return KTO_DIVERGENCE.estimate_kl(hidden, weight, target, ref_logps=ref_logps, **where)


def grpo(hidden, weight, target, **where):
    advantages = torch.ones(4, device=target.device)
    return GRPO(hidden, weight, target, advantages=advantages, **where)[0]


def gspo(hidden, weight, target, **where):
    advantages = torch.ones(4, device=target.device)
    return GSPO(hidden, weight, target, advantages=advantages, **where)[0]


LOSSES = [dpo, orpo, kto, kto_divergence, grpo, gspo]


@pytest.mark.parametrize("function", LOSSES)
@pytest.mark.parametrize("what", WRONG)
def test_lengths_that_do_not_fit(device, function, what):
    ends, max_length = WRONG[what]
    hidden, weight, target = batch(device)
    where = {"cu_seqlens": torch.tensor(ends, device=device), "max_length": max_length}
    if device.type == "cpu":
        with pytest.raises(RuntimeError, match=r"cu_seqlens is .*expected numbers that never fall"):
            function(hidden, weight, target, **where)
        return
    loss = function(hidden, weight, target, **where)
    assert loss.isnan()
    if loss.requires_grad:
        assert all(grad.isnan().all() for grad in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("function", LOSSES)
def test_lengths_that_fit(device, function):
    hidden, weight, target = batch(device)
    expected = function(hidden, weight, target, cu_seqlens=torch.tensor(FITTING, device=device))
    assert expected.isfinite()
    for dtype, max_length in ((torch.int32, 5), (torch.int64, 12)):
        ends = torch.tensor(FITTING, device=device, dtype=dtype)
        loss = function(hidden, weight, target, cu_seqlens=ends, max_length=max_length)
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("function", LOSSES)
@pytest.mark.parametrize(
    "ends, max_length, message",
    [
        (torch.tensor([0.0, 3.0, 3.0, 7.0, 12.0]), None, "cu_seqlens is torch.float32, expected int32 or int64"),
        (torch.tensor([True, True, True, True, True]), None, "cu_seqlens is torch.bool, expected int32 or int64"),
        (torch.tensor([[0, 3, 3, 7, 12]]), None, r"cu_seqlens has shape \(1, 5\), expected \(sequences \+ 1,\)"),
        (torch.tensor(FITTING), -1, "max_length is -1, expected the longest length"),
        (torch.tensor(FITTING, device="meta"), None, r"cu_seqlens is on meta, expected the device of \w+, (cpu|cuda)"),
    ],
)  # fmt: skip
def test_what_cannot_be_lengths(device, function, ends, max_length, message):
    hidden, weight, target = batch(device)
    ends = ends if ends.is_meta else ends.to(device)
    with pytest.raises(error_about(message), match=message):
        function(hidden, weight, target, cu_seqlens=ends, max_length=max_length)


@pytest.mark.parametrize("function", [dpo, kto, grpo, gspo])
def test_compiled_in_one_graph(device, function):
    hidden, weight, target = batch(device)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w, ends: function(x, w, target, cu_seqlens=ends, max_length=5),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    ends = torch.tensor(FITTING, device=device)
    torch.testing.assert_close(
        compiled(hidden, weight, ends), function(hidden, weight, target, cu_seqlens=ends)
    )
    wrong = torch.tensor(WRONG["falling"][0], device=device)
    if device.type == "cpu":
        with pytest.raises(RuntimeError, match="expected numbers that never fall"):
            compiled(hidden, weight, wrong)
    else:
        assert compiled(hidden, weight, wrong).isnan()


_CHECKED = """
import torch
from liger import losses
ends = torch.tensor([0, 7, 3, 9, 12], device="cuda")
x, w = torch.randn(12, 8, device="cuda"), torch.randn(29, 8, device="cuda")
y = torch.randint(29, (12,), device="cuda")
losses.FusedLinearDPOLoss(use_ref_model=False)(x, w, y, cu_seqlens=ends)[0].item()
"""


@pytest.mark.gpu
def test_checked_on_a_gpu():
    environment = {**os.environ, "LIGER_CHECK_TARGETS": "1"}
    done = subprocess.run([sys.executable, "-c", _CHECKED], env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and "cu_seqlens do not fit 12 tokens" in done.stderr + done.stdout


# --- padding of the rows that a loss gets -------------------------------------------------------------------

IGNORED = -100
LENGTHS = torch.tensor([3, 1, 2])
ENDS = torch.tensor([0, 3, 4, 6])


class NegativeLogLikelihood(losses.FusedLinearLoss):
    """Relies on log-probabilities of 0 at ignored tokens, as ``compute`` promises."""

    unit = "sequence"

    def compute(self, logprobs, entropy):
        return -logprobs.sum(-1)

    def forward(self, input, weight, target, bias=None, *, cu_seqlens=None):
        return self.run(self.batch(input, target, cu_seqlens=cu_seqlens), weight, bias).loss


def padded_batch(device):
    """(hidden, weight, target, bias, which tokens there are): the first token is next to impossible."""
    target = torch.randint(1, VOCAB, (3, 3))
    target[0, 0] = 0
    is_token = torch.arange(3) < LENGTHS[:, None]
    bias = torch.zeros(VOCAB)
    bias[0] = -100.0
    hidden, weight = torch.randn(3, 3, HIDDEN), torch.randn(VOCAB, HIDDEN) / 3
    return [t.to(device) for t in (hidden, weight, target.where(is_token, IGNORED), bias, is_token)]


def assert_packed_as_padded(loss, device):
    """``loss(hidden, weight, target, bias, is_token, **where)``: loss and gradients of both layouts."""
    hidden, weight, target, bias, is_token = padded_batch(device)
    leaves = [leaf(t) for t in (hidden, weight, bias)]
    padded = loss(leaves[0], leaves[1], target, leaves[2], is_token)
    where = {"cu_seqlens": ENDS.to(device)}
    packed = loss(leaves[0][is_token], leaves[1], target[is_token], leaves[2], is_token, **where)
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-5)
    for a, b in zip(torch.autograd.grad(packed, leaves), torch.autograd.grad(padded, leaves), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_own_loss(device):
    module = NegativeLogLikelihood()
    assert_packed_as_padded(lambda h, w, t, b, _, **where: module(h, w, t, b, **where), device)


@pytest.mark.parametrize(
    "options", [{"importance_sampling_level": "sequence"}, {"loss_type": "vespo"}], ids=str
)
def test_padding_far_from_the_reference(device, options):
    """Of a first token that policy and reference find impossible: expm1 of the padding would overflow."""
    module = losses.FusedLinearGRPOLoss(beta=0.04, **options)

    def loss(hidden, weight, target, bias, is_token, **where):
        with torch.no_grad():
            logprobs = (hidden @ weight.T + bias).log_softmax(-1)
            ref = logprobs.gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        advantages = torch.tensor([1.0, -1.0, 0.5], device=device)
        return module(hidden, weight, target, bias, advantages=advantages, ref_per_token_logps=ref, **where)[
            0
        ]

    assert_packed_as_padded(loss, device)


def test_longest_sequence_without_max_length(device):
    """dr_grpo divides by the padded length."""
    module = losses.FusedLinearGRPOLoss(beta=0.0, loss_type="dr_grpo")
    advantages = torch.tensor([1.0, -1.0, 0.5], device=device)
    assert_packed_as_padded(
        lambda h, w, t, b, _, **where: module(h, w, t, b, advantages=advantages, **where)[0], device
    )


def test_nan_for_a_sequence_without_tokens(device):
    hidden, weight, target, *_ = padded_batch(device)
    leaves = [leaf(hidden.flatten(0, 1)), leaf(weight)]
    advantages = torch.tensor([1.0, torch.nan, 0.5], device=device)
    ends = torch.tensor([0, 4, 4, 9], device=device)
    loss = GSPO(*leaves, target.flatten(), advantages=advantages, cu_seqlens=ends)[0]
    assert loss.isfinite() and all(g.isfinite().all() for g in torch.autograd.grad(loss, leaves))
