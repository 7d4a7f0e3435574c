# SPDX-License-Identifier: BSD-3-Clause
"""Losses of pairs and of marked answers: each against its formula over all logits, in float64."""

import losses_reference as plain
import pytest
import torch
from losses_cases import BUDGETS, VOCAB, check, leaf, make, packed

from liger import losses
from liger.losses.preference import CPO_LOSS_TYPES, DPO_LOSS_TYPES


@pytest.fixture(params=BUDGETS)
def budget(request):
    return BUDGETS[request.param]


def of_reference(hidden, weight, bias=None):
    return {"ref_input": hidden, "ref_weight": weight, "ref_bias": bias}


def dpo_reference(kind, beta=0.3, eps=0.0, tau=0.05):
    return lambda *scores: plain.dpo_pair(kind, *scores, beta, eps, tau)


@pytest.mark.covering(2)
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("kind", DPO_LOSS_TYPES)
def test_dpo(device, kind, budget, layout):
    hidden, weight, target, bias = make(device)
    reference = make(device)[:2]
    how = {
        "loss_type": kind,
        "beta": 0.3,
        "label_smoothing": 0.1,
        "discopop_tau": 0.2,
        "memory_budget": budget,
    }
    module = losses.FusedLinearDPOLoss(**how)
    average = kind == "ipo"

    def mine(x, w, b):
        if layout == "padded":
            return module(x, w, target, b, **of_reference(*reference))[0]
        (xs, ys, rs), ends = packed((x, target, reference[0]), target)
        where = {"cu_seqlens": ends, "max_length": 7}
        return module(xs, w, ys, b, **of_reference(rs, reference[1]), **where)[0]

    def other(x, w, b):
        pair = dpo_reference(kind, 0.3, 0.1, 0.2)
        return plain.pairs(pair, x, w, target, b, [r.to(x.dtype) for r in reference], average)

    check(mine, other, hidden, weight, bias)


@pytest.mark.parametrize("kind", DPO_LOSS_TYPES)
def test_dpo_gradients_of_pairs_that_are_told_apart(kind):
    """Where a sigmoid is almost 0 or 1, its gradient keeps its digits."""
    scores = [torch.tensor(x) for x in ([-30.0, -9.0, 9.0, 25.0], [-12.0, 20.0, -9.0, 0.5])]
    module = losses.FusedLinearDPOLoss(loss_type=kind, beta=0.7, label_smoothing=0.1)
    grads = []
    for dtype in (torch.float32, torch.float64):
        chosen, rejected = (t.detach().to(dtype, copy=True).requires_grad_() for t in scores)
        zero = torch.zeros(4, dtype=dtype)
        module.preference_loss(chosen, rejected, zero, zero).sum().backward()
        grads.append(
            torch.stack([torch.zeros_like(t) if t.grad is None else t.grad for t in (chosen, rejected)])
        )
    assert torch.allclose(grads[0].double(), grads[1], rtol=1e-5, atol=1e-13)


@pytest.mark.parametrize("average", [False, True], ids=["sums", "means"])
def test_given_reference_logps(device, average):
    """Per token, whatever stands where nothing counts, or per sequence."""
    hidden, weight, target, bias = make(device)
    ref_hidden, ref_weight, *_ = make(device)
    module = losses.FusedLinearDPOLoss(average_log_prob=average)
    expected, metrics = module(hidden, weight, target, bias, **of_reference(ref_hidden, ref_weight))
    tokens = torch.stack(
        [plain.token_logprobs(x, ref_weight, y)[0] for x, y in zip(ref_hidden, target, strict=True)]
    )
    tokens[target == -100] = torch.nan
    for given in (tokens, tokens.nan_to_num().where(target != -100, 0.0).sum(-1)):
        loss, others = module(hidden, weight, target, bias, ref_logps=given)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        for a, b in zip(others[1:5], metrics[1:5], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_likelihood_term_and_metrics(device, budget):
    """The likelihood term has tokens of its own: prompts, too."""
    hidden, weight, target, bias = make(device)
    reference = make(device)[:2]
    nll_target = target.clone()
    prompt = target[:3] == -100
    nll_target[:3][prompt] = torch.randint(VOCAB, (3, target.shape[1]), device=device)[prompt]
    nll_target[1, 0] = -100
    module = losses.FusedLinearDPOLoss(alpha=0.7, compute_nll_loss=True, memory_budget=budget)
    for nll in (None, nll_target):
        check(
            lambda x, w, b, nll=nll: module(x, w, target, b, **of_reference(*reference), nll_target=nll)[0],
            lambda x, w, b, nll=nll: plain.pairs(
                dpo_reference("sigmoid", 0.1), x, w, target, b, [r.to(x.dtype) for r in reference], False, 0.7, nll
            ),
            hidden, weight, bias,
        )  # fmt: skip
    loss, metrics = module(hidden, weight, target, bias, **of_reference(*reference))
    scores = torch.stack(plain.sequence_logps(hidden, weight, target, False, bias)[0])
    refs = torch.stack(plain.sequence_logps(*reference, target, False)[0])
    rewards = 0.1 * (scores - refs)
    chosen = (target[:3] != -100).sum()
    expected = (-scores[:3].sum() / chosen, scores[:3], scores[3:], rewards[:3], rewards[3:])
    for actual, value in zip(metrics[:5], expected, strict=True):
        torch.testing.assert_close(actual, value, rtol=1e-4, atol=1e-5)
    assert not loss.requires_grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_likelihood_of_other_tokens(device, budget, temperature):
    """The term of the pair reads target, the term of the likelihood reads nll_target, also where both count
    and differ."""
    hidden, weight, target, bias = make(device)
    target[-1] = target[-2]  # whose odds, without a token, would be infinite
    nll_target = torch.randint(VOCAB, target.shape, device=device)
    nll_target[0, 0], nll_target[1, 1:3] = target[0, 0], -100
    module = losses.FusedLinearORPOLoss(beta=0.4, memory_budget=budget, temperature=temperature)
    check(
        lambda x, w, b: module(x, w, target, b, nll_target=nll_target)[0],
        lambda x, w, b: plain.pairs(
            lambda c, r, *_: plain.orpo_pair(c, r, 0.4), x / temperature, w, target, b / temperature, None, True, 1.0,
            nll_target,
        ),
        hidden, weight, bias,
    )  # fmt: skip
    loss, metrics = module(hidden, weight, target, bias, nll_target=nll_target)
    odds = losses.FusedLinearORPOLoss(beta=0.4, compute_nll_loss=False, temperature=temperature)
    alone, _ = odds(hidden, weight, target, bias)
    torch.testing.assert_close(loss, alone + metrics.nll_loss, rtol=1e-5, atol=1e-6)
    nll_target[(target != -100).flip(1).cumsum(1).flip(1) == 0] = -100  # what packing leaves out
    expected, _ = module(hidden, weight, target, bias, nll_target=nll_target)
    (x, y, nll), ends = packed((hidden, target, nll_target), target)
    torch.testing.assert_close(module(x, weight, y, bias, nll_target=nll, cu_seqlens=ends)[0], expected)


@pytest.mark.parametrize("name", ["mask", "nll_mask"])
def test_likelihood_of_more_tokens(device, budget, name):
    hidden, weight, target, bias = make(device)
    mask = torch.rand(target.shape, device=device) < 0.6
    module = losses.FusedLinearCPOLoss(memory_budget=budget)
    results = []
    for given in (
        {"target": target.where(mask, -100), "nll_target": target},
        {"target": target, "mask": mask, "nll_mask": target != -100},
    ):
        leaves = leaf(hidden), leaf(weight)
        loss, metrics = module(*leaves, bias=bias, **given)
        results.append([loss, *torch.autograd.grad(loss, leaves), *(m for m in metrics if m is not None)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="both nll_target and nll_mask were given"):
        module(hidden, weight, target, nll_target=target, nll_mask=mask)


WITHOUT_REFERENCE = {
    "orpo": (losses.FusedLinearORPOLoss, {"beta": 0.4}, lambda c, r, *_: plain.orpo_pair(c, r, 0.4), True, 1.0),
    "simpo": (
        losses.FusedLinearSimPOLoss,
        {"beta": 2.0, "gamma": 0.7, "alpha": 0.3, "label_smoothing": 0.1},
        lambda c, r, *_: plain.dpo_pair("sigmoid", c - 0.7 / 2.0, r, 0.0, 0.0, 2.0, 0.1, 1.0),
        True,
        0.3,
    ),
    **{
        f"cpo {kind}": (
            losses.FusedLinearCPOLoss,
            {"beta": 0.2, "alpha": 0.5, "label_smoothing": 0.1, "loss_type": kind},
            lambda c, r, *_, kind=kind: plain.dpo_pair(kind, c, r, 0.0, 0.0, 0.2, 0.1, 1.0),
            False,
            0.5,
        )
        for kind in CPO_LOSS_TYPES
    },
}  # fmt: skip


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", WITHOUT_REFERENCE)
def test_losses_without_a_reference(device, name, budget, layout):
    make_module, options, pair, average, alpha = WITHOUT_REFERENCE[name]
    hidden, weight, target, bias = make(device)
    # The odds of a sequence without tokens are not defined in the formula.
    target[-1, :2] = 3
    module = make_module(**options, memory_budget=budget)

    def mine(x, w, b):
        if layout == "padded":
            return module(x, w, target, b)[0]
        (xs, ys), ends = packed((x, target), target)
        return module(xs[0], w, ys[0], b, cu_seqlens=ends)[0]

    check(
        mine, lambda x, w, b: plain.pairs(pair, x, w, target, b, None, average, alpha), hidden, weight, bias
    )


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("given", ["model", "logps"])
def test_kto(device, budget, layout, given):
    hidden, weight, target, bias = make(device)
    reference, labels = make(device)[:2], torch.tensor([1, 0, 1, 1, 0, 1], device=device)
    how = {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.5, "memory_budget": budget}
    module = losses.FusedLinearKTOLoss(**how)
    refs = torch.stack(plain.sequence_logps(*reference, target, False)[0])
    kl = torch.tensor(0.3, device=device)

    def mine(x, w, b):
        (xs, ys, rs), where = (x, target, reference[0]), {}
        if layout == "packed":
            (xs, ys, rs), where["cu_seqlens"] = packed((xs, ys, rs), target)
        if given == "logps":
            return module(xs, w, ys, b, preference_labels=labels, ref_logps=refs, kl=kl, **where)[0]
        of_model = of_reference(rs, reference[1])
        return module(xs, w, ys, b, preference_labels=labels, kl=kl, **of_model, **where)[0]

    def other(x, w, b):
        ref = [r.to(x.dtype) for r in reference]
        return plain.kto(x, w, target, labels, ref, 0.5, 0.3, b, (1.5, 0.5))

    check(mine, other, hidden, weight, bias)


def test_kto_divergence_and_metrics(device):
    hidden, weight, target, bias = make(device)
    reference, labels = make(device)[:2], torch.tensor([1, 0, 1, 1, 0, 1], device=device)
    module = losses.FusedLinearKTOLoss(beta=0.5)
    own = torch.stack(plain.sequence_logps(hidden, weight, target, False, bias)[0])
    refs = torch.stack(plain.sequence_logps(*reference, target, False)[0])
    for sign in (1, -1):
        # Of which sign the mean is, is chance: one of the two is cut off at 0.
        a, b = (refs, own) if sign < 0 else (own, refs)
        models = ((hidden, weight, bias), (*reference, None))
        (x, w, c), (rx, rw, rc) = models if sign > 0 else models[::-1]
        kl = module.estimate_kl(x, w, target, c, **of_reference(rx, rw, rc))
        torch.testing.assert_close(kl, (a - b).mean().clamp_min(0), rtol=1e-4, atol=1e-5)
    given = {"preference_labels": labels, **of_reference(*reference)}
    metrics = module(hidden, weight, target, bias, **given)[1]
    on, off = labels == 1, labels == 0
    expected = (own[on].sum(), own[off].sum(), 0.5 * (own - refs)[on].sum(), 0.5 * (own - refs)[off].sum())
    for actual, value in zip(metrics[:4], expected, strict=True):
        torch.testing.assert_close(actual, value, rtol=1e-4, atol=1e-5)
    unpaired = losses.FusedLinearKTOLoss(beta=0.5, loss_type="apo_zero_unpaired")
    loss = unpaired(hidden, weight, target, bias, kl=5.0, **given)[0]
    expected = plain.kto(hidden, weight, target, labels, reference, 0.5, 0.0, bias)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def test_a_reference_that_requires_grad(device):
    """Its head may be the head of the policy, which gets the gradient of the policy alone. Hidden states are
    taken where nothing is differentiated."""
    hidden, weight, target, _ = make(device)
    module, ref_hidden = losses.FusedLinearDPOLoss(), make(device)[0].requires_grad_()
    kto = losses.FusedLinearKTOLoss()
    weight.requires_grad_()
    loss, _ = module(hidden, weight, target, **of_reference(ref_hidden.detach(), weight))
    (grad,) = torch.autograd.grad(loss, weight)
    loss, _ = module(hidden, weight, target, **of_reference(ref_hidden.detach(), weight.detach()))
    assert torch.equal(grad, *torch.autograd.grad(loss, weight))
    kto.estimate_kl(hidden, weight, target, **of_reference(ref_hidden, weight))
    with torch.no_grad():
        assert torch.equal(module(hidden, weight, target, **of_reference(ref_hidden, weight))[0], loss)


EVERY = {
    "dpo": lambda: losses.FusedLinearDPOLoss(use_ref_model=False, compute_nll_loss=True),
    "ipo": lambda: losses.FusedLinearDPOLoss(use_ref_model=False, loss_type="ipo"),
    "orpo": losses.FusedLinearORPOLoss,
    "cpo": losses.FusedLinearCPOLoss,
    "simpo": losses.FusedLinearSimPOLoss,
}


@pytest.mark.parametrize("name", EVERY)
def test_sequences_without_tokens(device, name, budget):
    """A batch of nothing else is a loss of zero with gradients of zero; a pair of them changes no sum."""
    hidden, weight, target, bias = make(device)
    module = EVERY[name]()
    module.memory_budget = budget
    x, w = leaf(hidden), leaf(weight)
    nothing = torch.full_like(target, -100)
    loss = module(x, w, nothing, bias)[0]
    assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, (x, w)))
    target[-1, 0] = 1
    one = module(x, w, target, bias, denominator=7)[0]
    order = [0, 1, 2, 0, 3, 4, 5, 0]
    more = target[order]
    more[[3, 7]] = -100
    two = module(x[order], w, more, bias, denominator=torch.tensor(7.0))[0]
    torch.testing.assert_close(one, two)
    # One answer of a pair, and a mask in place of ignored targets.
    mask = torch.ones_like(target)
    mask[0] = mask[4, 2:] = 0
    masked = module(x, w, target, bias, mask=mask)[0]
    torch.testing.assert_close(masked, module(x, w, target.where(mask != 0, -100), bias)[0])
    assert all(g.isfinite().all() for g in torch.autograd.grad(masked, (x, w)))


def test_certain_tokens(device):
    """Odds of a probability of 1 are finite, and so is their gradient."""
    hidden, weight, target, bias = make(device)
    hidden[:] = 0
    bias[:] = torch.where(torch.arange(VOCAB, device=device) == 3, 100.0, 0.0)
    x = leaf(hidden)
    loss = losses.FusedLinearORPOLoss()(x, weight, torch.full_like(target, 3), bias)[0]
    assert loss.isfinite() and torch.autograd.grad(loss, x)[0].isfinite().all()


@pytest.mark.parametrize("name", ["DPO", "ORPO", "CPO", "SimPO"])
def test_micro_batches(device, name):
    """With the numbers of pairs and of tokens of all micro-batches, their sum is the loss of the whole."""
    hidden, weight, target, bias = make(device, 8)
    module = {
        "DPO": losses.FusedLinearDPOLoss(use_ref_model=False, compute_nll_loss=True),
        "ORPO": losses.FusedLinearORPOLoss(),
        "CPO": losses.FusedLinearCPOLoss(),
        "SimPO": losses.FusedLinearSimPOLoss(compute_nll_loss=True),
    }[name]
    tokens = (target[:4] != -100).sum()
    leaves = [leaf(t) for t in (hidden, weight, bias)]

    def loss(pairs, **counts):
        rows = torch.cat((pairs, pairs + 4)).to(device)
        return module(leaves[0][rows], leaves[1], target[rows], leaves[2], **counts)[0]

    counts = {"denominator": 4, "nll_denominator": tokens}
    parts = sum(loss(pairs, **counts) for pairs in torch.arange(4).split(2))
    whole = loss(torch.arange(4))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    gradients = (torch.autograd.grad(total, leaves) for total in (parts, whole))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_float16_with_fewer_tokens_than_pairs(device):
    """The numbers of all processes over the number of processes: the smaller divisor sets the scale of the
    gradients."""
    hidden, weight, target, bias = make(device, 8)
    counts = {"denominator": 4.0, "nll_denominator": 0.5}
    grads = []
    for dtype in (torch.float16, torch.float32):
        leaves = [leaf(t, dtype) for t in (hidden, weight, bias)]
        loss = losses.FusedLinearCPOLoss()(leaves[0], leaves[1], target, leaves[2], **counts)[0]
        grads.append(torch.autograd.grad(loss, leaves))
    for half, full in zip(*grads, strict=True):
        assert (half.float() - full).norm() < 2e-2 * full.norm()


def test_names_of_tensors_in_errors():
    hidden, weight, target, _ = make(torch.device("cpu"))
    wrong = target.clone()
    wrong[0, 0] = weight.shape[0] + 5
    with pytest.raises(
        RuntimeError, match=r"FusedLinearORPOLoss: nll_target at index \(0, 0\) is 34, expected"
    ):
        losses.FusedLinearORPOLoss()(hidden, weight, target, nll_target=wrong)
    kto = losses.FusedLinearKTOLoss()
    scores = torch.zeros(len(target))
    with pytest.raises(RuntimeError, match="FusedLinearKTOLoss: weight has shape"):
        kto.estimate_kl(hidden, weight[:, 1:], target, ref_logps=scores)
    with pytest.raises(RuntimeError, match="FusedLinearKTOLoss: bias has shape"):
        kto.estimate_kl(hidden, weight, target, torch.zeros(3), ref_logps=scores)
