# SPDX-License-Identifier: BSD-3-Clause
"""What holds for every loss: one op to compilers, three products or four, work for what is wanted only."""

import copy
import itertools
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from losses_cases import BUDGETS, LENGTH, VOCAB, leaf, make

import liger
from liger import losses
from liger._core.head import lm_head
from liger.losses import _op

EVERY = {
    "dpo": (losses.FusedLinearDPOLoss, {}),
    "orpo": (losses.FusedLinearORPOLoss, {}),
    "simpo": (losses.FusedLinearSimPOLoss, {}),
    "kto": (losses.FusedLinearKTOLoss, {}),
    "grpo": (losses.FusedLinearGRPOLoss, {"entropy_coef": 0.1}),
    "gspo": (losses.FusedLinearGRPOLoss, {"importance_sampling_level": "sequence"}),
}


def call(module, x, w, target, bias, level=0.0, **how):
    """The loss, with references that are functions of the target, around a level."""
    tokens = level - 0.1 * (target.clamp_min(0) % 5).float()
    if isinstance(module, losses.FusedLinearGRPOLoss):
        advantages = torch.arange(target.shape[0], device=target.device) * 0.4 - 1
        logps = {"ref_per_token_logps": tokens, "old_per_token_logps": tokens - 0.1}
        return module(x, w, target, bias, advantages=advantages, **logps, **how)[0]
    if isinstance(module, losses.FusedLinearKTOLoss):
        labels = torch.arange(target.shape[0], device=target.device) % 2
        return module(x, w, target, bias, preference_labels=labels, ref_logps=tokens, **how)[0]
    if module.use_ref_model:
        how["ref_logps"] = tokens
    return module(x, w, target, bias, **how)[0]


@pytest.fixture
def products(monkeypatch):
    """Rows of hidden states in each product of a head, in the order of the calls; with what was computed
    twice."""
    counted = {"rows": [], "again": []}

    def see(module, name, what, size):
        real = getattr(module, name)

        def seen(*arguments, **how):
            counted[what].append(size(*arguments))
            return real(*arguments, **how)

        monkeypatch.setattr(module, name, seen)

    see(lm_head, "write_linear", "rows", lambda x, *_: x.shape[0])
    # Of the gradient of the hidden states, or of the weight.
    see(lm_head, "product", "rows", lambda a, b, out: a.shape[b.shape[0] != VOCAB])
    for name in ("fused_linear_logprobs_forward", "fused_linear_logprobs_backward"):
        see(_op, name, "again", lambda *_, name=name: name)
    return counted


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("budget", BUDGETS)
def test_products(name, budget, products):
    """Where a unit of the loss fits the budget, nothing is computed twice; tokens always fit."""
    hidden, weight, target, bias = make("cpu")
    make_module, options = EVERY[name]
    module = make_module(**options, memory_budget=BUDGETS[budget])
    loss = call(module, leaf(hidden), leaf(weight), target, bias)
    if budget == "recompute" and module.unit != "token":
        assert products["again"] == ["fused_linear_logprobs_forward", "fused_linear_logprobs_backward"]
        return
    assert products["again"] == []
    assert sum(products["rows"]) == 3 * 6 * LENGTH
    if module.unit != "token":
        assert set(products["rows"]) == {6 * LENGTH if budget == "whole" else 2 * LENGTH}
    else:
        assert (max(products["rows"]) < 6 * LENGTH) == (budget != "whole")
    loss.backward()
    assert sum(products["rows"]) == 3 * 6 * LENGTH


@pytest.mark.parametrize("name", EVERY)
def test_only_what_needs_a_gradient(name, products):
    hidden, weight, target, bias = make("cpu")
    make_module, options = EVERY[name]
    module = make_module(**options)
    loss = call(module, hidden, weight, target, bias)
    assert not loss.requires_grad and products["again"] == ["fused_linear_logprobs_forward"]
    both = leaf(hidden), leaf(weight)
    expected = torch.autograd.grad(call(module, *both, target, bias), both)
    for i in (0, 1):
        tensors = [hidden, weight]
        tensors[i] = leaf(tensors[i])
        products["rows"].clear()
        other = call(module, *tensors, target, bias)
        assert products["rows"] == [6 * LENGTH] * 2
        torch.testing.assert_close(torch.autograd.grad(other, tensors[i])[0], expected[i])
        torch.testing.assert_close(other.detach(), loss)


# A loss of pairs, and one of tokens with a mean for each sequence; the graphs of the others differ in
# elementwise formulas.
@pytest.mark.parametrize(
    "name",
    ["dpo", "gspo", *(pytest.param(n, marks=pytest.mark.slow) for n in ("kto", "orpo", "simpo", "grpo"))],
)
def test_other_lengths_compile_nothing_anew(name):
    make_module, options = EVERY[name]
    module = make_module(**options)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: call(module, *t), fullgraph=True, backend="aot_eager", dynamic=True)
    hidden, weight, target, bias = make("cpu", 10)
    weight = leaf(weight)
    for sequences, length in ((6, 5), (4, 6), (10, 3)):
        x, y = leaf(hidden[:sequences, :length]), target[:sequences, :length].contiguous()
        with torch._dynamo.config.patch(error_on_recompile=sequences != 6):
            loss = compiled(x, weight, y, bias)
        expected = call(module, x, weight, y, bias)
        torch.testing.assert_close(loss, expected)
        for a, b in zip(*(torch.autograd.grad(v, (x, weight)) for v in (loss, expected)), strict=True):
            torch.testing.assert_close(a, b)


def test_opcheck(device):
    hidden, weight, target, bias = (t if i == 2 else leaf(t) for i, t in enumerate(make(device)))
    module = losses.FusedLinearGRPOLoss(beta=0.0, entropy_coef=0.1)
    rows = target.numel()
    # A positive loss, for an upstream gradient of 1 in opcheck: by another the backward multiplies the
    # gradients where they lie, and they are outputs that opcheck looks at again.
    advantages = -torch.rand(1, rows, device=device)
    given = [torch.rand(1, rows, device=device), target.view(1, -1) != -100, advantages]
    for budget, observed in itertools.product(BUDGETS.values(), (False, True)):
        arguments = (
            hidden.detach().flatten(0, 1).requires_grad_(), weight, target.flatten(), bias, 
            [*given, torch.tensor(100, device=device)], module._function, "weight,mask,advantages|tokens", 1, rows,
            0.9, -100, 4.0, None, budget, True, observed, True, True, True,
        )  # fmt: skip
        torch.library.opcheck(
            torch.ops.liger_losses.fused_linear_loss_forward.default,
            arguments,
            # Tracing differentiates every result, the gradients that were made among them. test_compiled
            # traces.
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


OF_TOKENS = {
    "dpo": (losses.FusedLinearDPOLoss, {}),
    "kto": (losses.FusedLinearKTOLoss, {}),
    "grpo": (losses.FusedLinearGRPOLoss, {}),
    "grpo with entropy": (losses.FusedLinearGRPOLoss, {"entropy_coef": 0.1}),
}
REQUESTED = [("logprobs",), ["entropy"], ("argmax", "entropy", "logprobs")]


def with_tokens(module, x, w, target, bias):
    """(loss, logprobs, entropy, argmax)"""
    tokens = -1.0 - 0.1 * (target.clamp_min(0) % 5).float()
    if isinstance(module, losses.FusedLinearGRPOLoss):
        given = {
            "advantages": torch.ones(target.shape[0], device=target.device),
            "ref_per_token_logps": tokens,
        }
    else:
        given = {"ref_logps": tokens}
    if isinstance(module, losses.FusedLinearKTOLoss):
        given["preference_labels"] = torch.arange(target.shape[0], device=target.device) % 2
    loss, metrics = module(x, w, target, bias, **given)
    assert metrics._fields[-3:] == losses.TokenMetrics._fields
    return loss, *metrics[-3:]


def assert_requested(found, requested, layer, always=()):
    """What is asked for is there, in the shape of the target and without gradient, and nothing else."""
    expected = liger.fused_linear_logprobs(*layer, metrics=("entropy", "argmax"))
    for name, value in zip(losses.TokenMetrics._fields, found, strict=True):
        if name not in (*requested, *always):
            assert value is None
            continue
        assert not value.requires_grad
        torch.testing.assert_close(value, getattr(expected, name))


@pytest.mark.parametrize("requested", REQUESTED, ids=str)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", OF_TOKENS)
def test_metrics_of_tokens(device, name, budget, requested):
    hidden, weight, target, bias = make(device)
    make_loss, options = OF_TOKENS[name]
    results = []
    for metrics in ((), requested):
        module = make_loss(memory_budget=BUDGETS[budget], metrics=metrics, **options)
        leaves = [leaf(hidden), leaf(weight)]
        loss, *found = with_tokens(module, *leaves, target, bias)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
        always = ("logprobs",) if name.startswith("grpo") else ()
        assert_requested(found, metrics, (hidden, weight, target, bias), always)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", OF_TOKENS)
def test_metrics_of_tokens_of_a_packed_batch(device, name):
    hidden, weight, target, bias = make(device)
    ends = torch.tensor([0, 7, 11, 20, 36], device=device)
    x, y = hidden.flatten(0, 1), target.flatten()
    make_loss, options = OF_TOKENS[name]
    module = make_loss(metrics=losses.TokenMetrics._fields, **options)
    logps = torch.zeros(y.shape, device=device)
    if isinstance(module, losses.FusedLinearGRPOLoss):
        given = {"advantages": torch.ones(4, device=device), "ref_per_token_logps": logps}
    else:
        given = {"ref_logps": logps}
    if isinstance(module, losses.FusedLinearKTOLoss):
        given["preference_labels"] = torch.ones(4, device=device)
    _, metrics = module(x, weight, y, bias, cu_seqlens=ends, max_length=16, **given)
    assert_requested(metrics[-3:], losses.TokenMetrics._fields, (x, weight, y, bias))


@pytest.mark.parametrize("make_loss", [losses.FusedLinearORPOLoss, losses.FusedLinearJSDLoss])
def test_unknown_metric(make_loss):
    name = make_loss.__name__
    with pytest.raises(
        ValueError,
        match=rf"{name}: metrics is \('entropy', 'perplexity'\), expected names among logprobs, entropy, argmax",
    ):
        make_loss(metrics=("entropy", "perplexity"))
    with pytest.raises(TypeError, match=f"{name}: metrics is 'entropy', expected names"):
        make_loss(metrics="entropy")


@pytest.mark.parametrize("name", EVERY)
def test_half_precision(device, name):
    """Sums in float32: with many chunks as exact as with one."""
    hidden, weight, target, bias = make(device, dtype=torch.bfloat16)
    make_module, options = EVERY[name]
    grads = []
    for budget in (None, 2 * LENGTH * VOCAB * 2):
        module, leaves = make_module(**options, memory_budget=budget), (leaf(hidden), leaf(weight))
        loss = call(module, *leaves, target, bias)
        assert loss.dtype == torch.float32
        grads.append(torch.autograd.grad(loss, leaves))
    for a, b in zip(*grads, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-8 * b.abs().max().item())


def test_autocast(device):
    hidden, weight, target, bias = make(device)
    x, w = leaf(hidden), leaf(weight)
    with torch.autocast(device.type, torch.bfloat16):
        loss = call(losses.FusedLinearDPOLoss(), x, w, target, bias)
    half = [t.bfloat16() for t in (hidden, weight)]
    torch.testing.assert_close(loss, call(losses.FusedLinearDPOLoss(), *half, target, bias.bfloat16()))
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(loss, (x, w)))


class OwnPairs(losses.PreferenceLoss):
    def preference_loss(self, chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps):
        return F.softplus(self.beta * (rejected_logps - chosen_logps))


class OwnBatch(losses.FusedLinearLoss):
    """Its terms depend on all sequences."""

    unit = "batch"

    def compute(self, logprobs, entropy, *, mask):
        scores = (logprobs * mask).sum(-1)
        return (scores - scores.mean()).square()

    def forward(self, input, weight, target, bias=None):
        batch = self.batch(input, target)
        return self.run(batch, weight, bias, given={"mask": batch.valid}).loss


def test_losses_of_ones_own_that_lack_a_part(device):
    class Unit(OwnBatch):
        unit = "word"

    class Terms(losses.FusedLinearLoss):
        unit, forward = "batch", OwnBatch.forward

    with pytest.raises(ValueError, match="Unit: unit is 'word', expected one of "):
        Unit()
    for loss, missing in ((Terms(), "compute"), (losses.PreferenceLoss(), "preference_loss")):
        with pytest.raises(NotImplementedError, match=f"defines no {missing}"):
            loss(*make(device))


def test_names_of_losses_in_saved_programs():
    module = losses.FusedLinearDPOLoss(beta=0.3, logits_dtype=torch.float32)
    name = _op.portable_name(module._function)
    again = _op._owner(name)
    assert again is not module and again.beta == 0.3 and again.logits_dtype == torch.float32
    with pytest.raises(
        RuntimeError, match="a program with the loss FusedLinearDPOLoss needs an import of gone,"
    ):
        _op._owner(name.replace("liger.losses.preference", "gone"))
    module.table = {1j}
    with pytest.raises(RuntimeError, match="it was deleted, or has attributes other than numbers"):
        _op._owner(_op.portable_name(module._function) + "x")


@pytest.mark.parametrize("budget", BUDGETS)
def test_losses_of_ones_own(device, budget):
    hidden, weight, target, bias = make(device)
    mine = OwnPairs(beta=0.1, memory_budget=BUDGETS[budget])
    same = losses.FusedLinearDPOLoss(beta=0.1, use_ref_model=False)
    a, b = (m(hidden, weight, target.abs() % VOCAB, bias)[0] for m in (mine, same))
    torch.testing.assert_close(a, b)
    leaves = [leaf(hidden), leaf(weight)]
    loss = OwnBatch(memory_budget=BUDGETS[budget])(*leaves, target, bias)
    scores = liger.fused_linear_logprobs(*leaves, target, bias).sum(-1)
    expected = (scores - scores.mean()).square().sum()
    torch.testing.assert_close(loss, expected)
    pairs = zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_copies_are_losses_of_their_own(device):
    hidden, weight, target, bias = make(device)
    first = losses.FusedLinearDPOLoss(beta=0.1)
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        other.beta = 2.0
        a, b = call(first, hidden, weight, target, bias), call(other, hidden, weight, target, bias)
        expected = call(losses.FusedLinearDPOLoss(beta=2.0), hidden, weight, target, bias)
        assert a != b and torch.equal(b, expected)


def test_the_losses_of_the_docs(device):
    page = Path(__file__).parents[2] / "docs" / "guides" / "losses.md"
    if not page.is_file():
        pytest.skip("not a checkout")
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    made = {"__name__": "losses_of_the_docs"}
    for block in blocks:
        if "class " in block:
            exec(block, made)
    hidden, weight, target, _ = make(device)
    target[-1, 0] = 1
    loss = made["MarginLoss"](beta=0.5)(hidden, weight, target)[0]
    logprobs = liger.fused_linear_logprobs(hidden, weight, target, metrics=("entropy",))
    live = target != -100
    means = logprobs.logprobs.sum(-1) / live.sum(-1)
    torch.testing.assert_close(loss, F.softplus(1.0 - 0.5 * (means[:3] - means[3:])).mean())
    x, advantages = leaf(hidden), torch.linspace(-1, 1, 6, device=device)
    loss, tokens = made["Reinforce"](metrics=["entropy"])(x, weight, target, advantages=advantages)
    y = leaf(hidden)
    logprobs = liger.fused_linear_logprobs(y, weight, target, metrics=("entropy",))
    torch.testing.assert_close(tokens.entropy, logprobs.entropy.detach())
    assert tokens.logprobs is None and tokens.argmax is None
    terms = -(advantages[:, None] * logprobs.logprobs + 0.01 * logprobs.entropy)
    expected = terms[live].sum() / live.sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], torch.autograd.grad(expected, y)[0])
