# SPDX-License-Identifier: BSD-3-Clause
"""Where losses of liger_kernel.chunked_loss have another meaning than losses of liger.losses, and what is not
taken."""

import pytest
import torch
from torch.nn import functional as F

IGNORED = -100
CLASSES, HIDDEN, LENGTH = 11, 8, 5


def random(*shape, seed=0, grad=False):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.requires_grad_(grad)


WEIGHT, HIDDEN_STATES = random(CLASSES, HIDDEN, seed=1, grad=True), random(4, LENGTH, HIDDEN, grad=True)
IDS = torch.randint(CLASSES, (4, LENGTH), generator=torch.Generator().manual_seed(2))
MASK = torch.ones(4, LENGTH)
MASK[1, 3:] = MASK[2, :1] = 0
TARGET = IDS.masked_fill(MASK == 0, IGNORED)
REFERENCE = random(4, LENGTH, HIDDEN, seed=3), random(CLASSES, HIDDEN, seed=4)
ADVANTAGES = torch.tensor([1.0, -0.5, 0.3, -1.2])
LOGPS = F.linear(HIDDEN_STATES, WEIGHT).log_softmax(-1).gather(-1, IDS.unsqueeze(-1)).squeeze(-1)
OLD, REF = (LOGPS.detach() + 0.3 * random(4, LENGTH, seed=s) for s in (5, 6))


def gradients(loss):
    return torch.autograd.grad(loss, (HIDDEN_STATES, WEIGHT), retain_graph=True)


# --- DPO ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss_type, smoothed", [("sigmoid", False), ("hinge", False), ("robust", True), ("exo_pair", True)]
)
def test_label_smoothing_of_dpo(loss_type, smoothed):
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

    losses = [
        LigerFusedLinearDPOLoss(loss_type=loss_type, label_smoothing=smoothing)(
            WEIGHT, HIDDEN_STATES, TARGET, None, *REFERENCE
        )[0]
        for smoothing in (0.1, 0.3)
    ]
    assert (losses[0] != losses[1]) == smoothed
    if loss_type == "sigmoid":
        policy = (LOGPS * MASK).sum(-1)
        ref = F.linear(*REFERENCE).log_softmax(-1).gather(-1, IDS.unsqueeze(-1)).squeeze(-1)
        ratio = policy - (ref * MASK).sum(-1)
        torch.testing.assert_close(losses[0], -F.logsigmoid(0.1 * (ratio[:2] - ratio[2:])).mean())


# --- GRPO ---------------------------------------------------------------------------------------------------


def grpo(reference=REF, **options):
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(**options)
    return loss(HIDDEN_STATES, WEIGHT, IDS, MASK, ADVANTAGES, None, reference, OLD)


def test_metrics_are_a_tuple():
    loss, metrics = grpo(beta=0.1)
    assert isinstance(metrics, tuple) and [m.shape for m in metrics] == [(), ()] and loss.requires_grad
    assert len(grpo(beta=0.0)[1]) == 1


@pytest.mark.parametrize("reference", [None, REF], ids=["none", "given"])
def test_use_ref_model_false_takes_no_reference(reference):
    loss, (kl, clip_ratio) = grpo(reference, beta=0.3, use_ref_model=False)
    expected, (expected_clip_ratio,) = grpo(None, beta=0.0)
    assert kl == 0 and clip_ratio == expected_clip_ratio and loss == expected
    assert all(map(torch.equal, gradients(loss), gradients(expected)))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_metric_of_a_corrected_divergence(level):
    """It has the importance weights, as the term of the loss."""
    _, (kl, _) = grpo(beta=0.3, use_bias_correction_kl=True, importance_sampling_level=level)
    gap, log_ratio = REF - LOGPS, LOGPS - OLD
    if level == "sequence":
        log_ratio = (log_ratio * MASK).sum(-1, keepdim=True) / MASK.sum(-1, keepdim=True)
    terms = (gap.exp() - gap - 1) * log_ratio.exp()
    torch.testing.assert_close(kl, ((terms * MASK).sum() / MASK.sum()).detach())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_luspo_leaves_padding_out(level):
    """The loss of liger_kernel has terms of padding, and is this one without padding."""
    log_ratio = LOGPS - OLD
    if level == "sequence":
        log_ratio = (log_ratio * MASK).sum(-1, keepdim=True) / MASK.sum(-1, keepdim=True)
    ratio, sign, gap = log_ratio.exp(), ADVANTAGES.unsqueeze(1), REF - LOGPS
    terms = -torch.minimum(ratio * sign, ratio.clamp(0.8, 1.2) * sign) + 0.3 * (gap.exp() - gap - 1)
    loss, _ = grpo(beta=0.3, loss_type="luspo", importance_sampling_level=level)
    expected = (terms * MASK).sum(-1).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(loss), gradients(expected), rtol=1e-4, atol=1e-5)


# --- references ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["DPO", "KTO", "GRPO", "GRPO of log-probabilities"])
def test_what_requires_grad(kind):
    """Besides the policy: it is taken without gradients, as in liger_kernel."""
    import liger_kernel.chunked_loss

    module = getattr(liger_kernel.chunked_loss, f"LigerFusedLinear{kind.split()[0]}Loss")(use_ref_model=True)
    tensors = {"lin_weight": WEIGHT, "_input": HIDDEN_STATES, "target": TARGET}
    given = dict(zip(("ref_input", "ref_weight"), REFERENCE, strict=True))
    if kind == "KTO":
        tensors["preference_labels"] = torch.tensor([1, 0, 0, 1])
        given["kl"] = torch.tensor(0.1)
    elif kind != "DPO":
        del tensors["target"]
        tensors |= {"selected_token_ids": IDS, "attention_mask": MASK}
        given = given if kind == "GRPO" else {"ref_per_token_logps": REF}
        given |= {"advantages": ADVANTAGES, "old_per_token_logps": OLD, "vllm_is_ratio": MASK + 0.5}
    loss = module(**tensors, **given)[0]
    leaves = {name: value.clone().requires_grad_() for name, value in given.items()}
    same = module(**tensors, **leaves)[0]
    same.backward(retain_graph=True)
    assert torch.equal(same, loss) and all(leaf.grad is None for leaf in leaves.values())
    HIDDEN_STATES.grad = WEIGHT.grad = None


# --- distillation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JSD", "CosineSimilarity"])
@pytest.mark.parametrize("factors", [(1.0, 0.0), (0.0, 1.0)], ids=["hard", "soft"])
def test_both_terms_are_returned(kind, factors):
    """Also the one with factor 0, which is no part of the loss."""
    import liger_kernel.chunked_loss

    loss_class = getattr(liger_kernel.chunked_loss, f"LigerFusedLinear{kind}Loss")
    tensors = HIDDEN_STATES.flatten(0, 1), WEIGHT, REFERENCE[0].flatten(0, 1), REFERENCE[1], TARGET.flatten()
    _, soft, hard = loss_class(0.5, 0.5, return_soft_hard_loss=True)(*tensors)
    loss, *terms = loss_class(*factors, return_soft_hard_loss=True)(*tensors)
    torch.testing.assert_close(terms, [soft, hard])
    assert not any(term.requires_grad for term in terms)
    torch.testing.assert_close(loss.detach(), hard if factors[0] else soft)
    alone = loss_class(*factors)(*tensors)
    assert loss == alone and all(map(torch.equal, gradients(loss), gradients(alone)))
