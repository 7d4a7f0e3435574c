# SPDX-License-Identifier: BSD-3-Clause
"""Distillation, and log-probabilities with entropies, by the products of compute capability 9.0."""

import pytest
import torch
import torch.nn.functional as F
from cuda_graphs import capture
from sm90_engine import BFLOAT16, GRADIENT, MIB

import liger
from liger._core.head.lm_head import Sm90LMHeadGradients
from liger.ops.fused_linear_divergence.op import fused_linear_distillation
from liger.ops.fused_linear_divergence.rows import Terms

pytestmark = pytest.mark.gpu
# rows, hidden, vocab, budget
SHAPES = {
    "one chunk": (500, 512, 2048, 512 * MIB),
    "chunks": (1900, 256, 1152, 4 * MIB),
    "a longer first chunk": (1900, 1024, 1152, 3 * MIB),
    "more rows than tiles": (2500, 512, 4224, 24 * MIB),
    "parts of the classes": (700, 256, 16384, 64 * MIB),
    "fewest rows": (257, 256, 256, 512 * MIB),
}
SEVERAL_CHUNKS = "chunks", "a longer first chunk", "more rows than tiles"
FORMS = {
    "kl": (liger.fused_linear_kl_div, {}),
    "jsd": (liger.fused_linear_jsd, {"beta": 0.3}),
    "jsd tempered, hard": (liger.fused_linear_jsd, {"beta": 0.5, "temperature": 2.0}),
}


@pytest.fixture
def plans(monkeypatch):
    """What was planned in a test."""
    made, plan = [], Sm90LMHeadGradients.plan.__func__

    def recorded(cls, *arguments, **named):
        made.append(plan(cls, *arguments, **named))
        return made[-1]

    monkeypatch.setattr(Sm90LMHeadGradients, "plan", classmethod(recorded))
    return made


def layers(device, rows, hidden, vocab):
    def matrix(*shape, scale=1.0):
        return (scale * torch.randn(shape, device=device)).to(BFLOAT16)

    student = matrix(rows, hidden), matrix(vocab, hidden, scale=2 * hidden**-0.5)
    return *student, matrix(rows, hidden), matrix(vocab, hidden, scale=2 * hidden**-0.5)


def exact(name, x, weight, teacher, teacher_weight, bias=None):
    """(loss, gradients) in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    temperature = FORMS[name][1].get("temperature", 1.0)
    log_q = (F.linear(*leaves, None if bias is None else bias.double()) / temperature).log_softmax(-1)
    log_p = (F.linear(teacher.double(), teacher_weight.double()) / temperature).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    if name == "kl":
        rows = (p * (log_p - log_q)).sum(-1)
    else:
        beta = FORMS[name][1]["beta"]
        log_m = (beta * p + (1 - beta) * q).log()
        rows = (beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)).sum(-1)
    return rows.mean().detach(), torch.autograd.grad(rows.mean(), leaves)


def ours(name, x, weight, teacher, teacher_weight, **options):
    x, weight = (t.detach().requires_grad_() for t in (x, weight))
    form, chosen = FORMS[name]
    loss = form(x, weight, teacher_input=teacher, teacher_weight=teacher_weight, **chosen, **options)
    return loss.detach(), torch.autograd.grad(loss, (x, weight))


def assert_as_exact_as_torch(found, of_torch, expected):
    """Gradients as norms of their errors."""
    for actual, theirs, wanted in zip(found, of_torch, expected, strict=True):
        error, allowed = ((g.double() - wanted).norm() / wanted.norm() for g in (actual, theirs))
        assert error <= max(1.1 * allowed.item(), GRADIENT)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_distillation(sm90, plans, shape, name):
    rows, hidden, vocab, budget = SHAPES[shape]
    values = layers(sm90, rows, hidden, vocab)
    loss, grads = ours(name, *values, memory_budget=budget)
    assert plans[-1] is not None
    assert (plans[-1].layout.chunk_rows < rows) == (shape in SEVERAL_CHUNKS)
    assert (plans[-1].layout.first_rows > plans[-1].layout.chunk_rows) == (shape == "a longer first chunk")
    assert plans[-1].layout.k_splits > 1 or shape != "parts of the classes"
    with liger.use_backend("triton"):
        theirs_loss, theirs = ours(name, *values, memory_budget=budget)
    assert plans[-1] is None
    wanted_loss, wanted = exact(name, *values)
    torch.testing.assert_close(loss.double(), wanted_loss, rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(loss, theirs_loss, rtol=1e-4, atol=1e-6)
    assert_as_exact_as_torch(grads, theirs, wanted)
    again = ours(name, *values, memory_budget=budget)
    assert torch.equal(again[0], loss) and all(map(torch.equal, again[1], grads))


@pytest.mark.parametrize("name", ["kl", "jsd"])
def test_bias_strides_and_one_gradient(sm90, plans, name):
    rows, hidden, vocab, budget = SHAPES["chunks"]
    x, weight, *teacher = layers(sm90, rows, hidden, vocab)
    of_teacher = dict(zip(("teacher_input", "teacher_weight"), teacher, strict=True))
    bias = torch.randn(vocab, device=sm90).to(BFLOAT16).requires_grad_()
    spread = F.pad(x, (3, 2))[:, 3:-2]
    tall = weight.t().contiguous().t()
    form, chosen = FORMS[name]
    options = {**chosen, "bias": bias, "memory_budget": budget}
    leaves = [t.detach().requires_grad_() for t in (spread, tall)]
    loss = form(*leaves, **of_teacher, **options)
    both = torch.autograd.grad(loss, (*leaves, bias))
    assert plans[-1] is not None
    plain = [t.detach().requires_grad_() for t in (x, weight)]
    same = torch.autograd.grad(form(*plain, **of_teacher, **options), (*plain, bias))
    for a, b in zip(both, same, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * b.abs().max().item())
    for i in range(2):
        one = [t.detach().requires_grad_(i == j) for j, t in enumerate((x, weight))]
        (grad,) = torch.autograd.grad(form(*one, **of_teacher, **{**options, "bias": bias.detach()}), one[i])
        assert plans[-1] is not None
        error = (grad.double() - same[i].double()).norm() / same[i].double().norm()
        assert error <= GRADIENT


def test_hard_targets(sm90, plans):
    rows, hidden, vocab, budget = SHAPES["more rows than tiles"]
    values = layers(sm90, rows, hidden, vocab)
    target = torch.randint(vocab, (rows,), device=sm90)
    target[::5] = -100
    module = liger.losses.FusedLinearJSDLoss(memory_budget=budget)

    def run():
        x, weight = (t.detach().requires_grad_() for t in values[:2])
        loss, _ = module(x, weight, target, teacher_input=values[2], teacher_weight=values[3])
        return loss.detach(), torch.autograd.grad(loss, (x, weight))

    loss, grads = run()
    assert plans[-1] is not None
    with liger.use_backend("triton"):
        other_loss, others = run()
    torch.testing.assert_close(loss, other_loss, rtol=1e-4, atol=1e-6)
    for a, b in zip(grads, others, strict=True):
        assert (a.double() - b.double()).norm() <= GRADIENT * b.double().norm()
    assert not grads[0][::5].any()


@pytest.mark.parametrize(
    "how",
    [
        {"divergence": "forward_kl", "hard": 0.2, "soft": 0.8},
        {"divergence": "reverse_kl", "temperature": 2.0, "hard": 0.5, "soft": 0.5},
        {"divergence": "tvd"},
        {"divergence": "tvd", "temperature": 0.5, "hard": 0.5, "soft": 0.5},
        {"divergence": "jsd", "beta": 0.1, "hard": 0.3, "soft": 0.7},
        {"divergence": "cosine", "hard": 0.5, "soft": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [2048, 34048])
def test_targets_and_a_teacher_in_parts(sm90, plans, vocab, how):
    """Rows that two kernels read, and rows that stay in shared memory; the teacher's logits of the first
    chunk lie in the memory of the weight's gradient where that is large enough, others come in parts."""
    rows, hidden = 900, 512
    values = *layers(sm90, rows, hidden, vocab)[:2], *layers(sm90, rows, 128, vocab)[2:]
    target = torch.randint(vocab, (rows,), device=sm90)
    target[::6] = -100
    options = {"beta": 0.5, "temperature": 1.0, "soft": 1.0, "hard": 0.0, **how}
    terms = Terms(**options, ignore_index=-100)

    def run(wide=False):
        x, weight, *teacher = (t.double() if wide else t for t in values)
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        weights = torch.full((rows,), 1 / rows, device=sm90, dtype=torch.float64 if wide else torch.float32)
        layer, teacher = (*leaves, target, None), (*teacher, None, None)
        budget = 2 * vocab * 1400 + 3 * MIB
        found = fused_linear_distillation("test", layer, teacher, weights, terms, False, None, budget)
        return [loss.detach() for loss in found], torch.autograd.grad(found[0], leaves)

    losses, grads = run()
    assert plans[-1] is not None and plans[-1].layout.slice_rows < rows
    with liger.use_backend("triton"):
        their_losses, theirs = run()
    with liger.use_backend("torch"):
        exact_losses, exactly = run(wide=True)
    for mine, other, wanted in zip(losses, their_losses, exact_losses, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(mine.double(), wanted, rtol=2e-2, atol=1e-5)
    assert_as_exact_as_torch(grads, theirs, exactly)
    assert not grads[0][::6].any()
    again = run()
    assert all(map(torch.equal, again[1], grads))


@pytest.mark.parametrize("shape", ["one chunk", "chunks"])
def test_log_probabilities_with_entropies(sm90, shape):
    rows, hidden, vocab, budget = SHAPES[shape]
    assert torch.ops.liger_sm90.takes_logprobs(rows, hidden, vocab, sm90.index or 0)
    x, weight, *_ = layers(sm90, rows, hidden, vocab)
    target = torch.randint(vocab, (rows,), device=sm90)
    upstream = torch.randn(2, rows, device=sm90)

    def run():
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        logprobs, entropy = liger.fused_linear_logprobs(
            *leaves, target, metrics=("entropy",), memory_budget=budget
        )[:2]
        return torch.autograd.grad((upstream[0] * logprobs + upstream[1] * entropy).sum(), leaves)

    grads = run()
    with liger.use_backend("triton"):
        theirs = run()
    leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    logp = F.linear(*leaves).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    chosen = logp.gather(1, target[:, None])[:, 0]
    wanted = torch.autograd.grad((upstream[0] * chosen + upstream[1] * entropy).sum(), leaves)
    assert_as_exact_as_torch(grads, theirs, wanted)


@pytest.mark.parametrize("budget", [512 * MIB, 8 * MIB])
def test_losses_that_the_epilogues_do_not_know(sm90, plans, budget):
    """An entropy bonus with a bias; pairs with a bias and a softcap."""
    sequences, length, hidden, vocab = 8, 96, 256, 1408
    x, weight, *_ = layers(sm90, sequences * length, hidden, vocab)
    x = x.view(sequences, length, hidden)
    bias = torch.randn(vocab, device=sm90).to(BFLOAT16)
    target = torch.randint(vocab, (sequences, length), device=sm90)
    target[:, -7:] = -100
    advantages = torch.linspace(-1, 1, sequences, device=sm90)
    losses = {
        "grpo": liger.losses.FusedLinearGRPOLoss(beta=0.0, entropy_coef=0.01, memory_budget=budget),
        "orpo": liger.losses.FusedLinearORPOLoss(softcap=30.0, memory_budget=budget),
    }

    def run(name, wide=False):
        leaves = [(t.double() if wide else t).detach().requires_grad_() for t in (x, weight, bias)]
        if name == "grpo":
            loss = losses[name](*leaves[:2], target, leaves[2], advantages=advantages)[0]
        else:
            loss = losses[name](*leaves[:2], target, leaves[2])[0]
        return torch.autograd.grad(loss, leaves)

    for name in losses:
        grads = run(name)
        assert plans[-1] is not None
        with liger.use_backend("triton"):
            theirs = run(name)
        with liger.use_backend("torch"):
            exactly = run(name, wide=True)
        assert_as_exact_as_torch(grads, theirs, exactly)
        assert not grads[0][:, -7:].any()


def test_peak_memory(sm90, plans):
    """The sum over chunks takes no memory of its own, and logits no more than the budget."""
    rows, hidden, vocab, budget = 4096, 1024, 32000, 64 * MIB
    values = layers(sm90, rows, hidden, vocab)
    ours("jsd", *values, memory_budget=budget)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours("jsd", *values, memory_budget=budget)
    assert plans[-1] is not None and plans[-1].layout.chunk_rows < rows
    gradients = 2 * (rows * hidden + vocab * hidden)
    assert torch.cuda.max_memory_allocated() - before <= gradients + budget + 4 * MIB


def test_cuda_graph(sm90, plans):
    rows, hidden, vocab, budget = SHAPES["chunks"]
    values = layers(sm90, rows, hidden, vocab)
    expected = ours("jsd", *values, memory_budget=budget)
    graph, found = capture(lambda: ours("jsd", *values, memory_budget=budget))
    graph.replay()
    assert plans[-1] is not None
    assert torch.equal(found[0], expected[0]) and all(map(torch.equal, found[1], expected[1]))
