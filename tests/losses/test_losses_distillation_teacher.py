# SPDX-License-Identifier: BSD-3-Clause
"""Distillation from the teacher's logits, or from log-probabilities of some classes, instead of its hidden
states."""

import pytest
import torch
from cases import DTYPES, assert_as_exact_as_torch
from distillation_cases import (
    BUDGETS,
    DISTANCES,
    TENSORS,
    VOCAB,
    call,
    logits_of,
    make,
    plain,
    teacher_arguments,
    with_gradients,
)
from losses_cases import leaf

from liger import losses


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
def test_logits_of_a_teacher(device, budget):
    tensors = make(device)
    module = losses.FusedLinearJSDLoss(memory_budget=budget)
    expected = call("jsd", module, tensors)
    x, labels = tensors["x"], tensors["labels"]
    logits = logits_of(tensors)[1]
    loss, _ = module(x, tensors["weight"], labels, tensors["bias"], teacher_logits=logits)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rest", ["tail", "renormalize"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_teachers_of_some_classes(device, rest, temperature):
    """Rows are filled up with -inf of any class; none may be there, or all; a tail may be without mass."""
    tensors = make(device)
    module = losses.FusedLinearTopKLoss(rest=rest, temperature=temperature)
    name = "top k" if rest == "tail" else "top k renormalised"
    log_p, indices = teacher_arguments(name, tensors, temperature).values()

    def call_with(module, x, w, labels, log_p, indices, **how):
        of_teacher = {"teacher_logprobs": log_p, "teacher_indices": indices}
        return module(x, w, labels, tensors["bias"], **of_teacher, **how)

    def run(log_p, indices):
        x, w = leaf(tensors["x"]), leaf(tensors["weight"])
        loss, metrics = call_with(module, x, w, tensors["labels"], log_p, indices)
        return [loss.detach(), metrics.soft_loss, metrics.hard_loss, *torch.autograd.grad(loss, (x, w))]

    expected = run(log_p, indices)
    fill = torch.full_like(log_p[..., :2], -torch.inf)
    # In front and behind; the class of one of them is the class of a real entry, and of the label.
    filled = torch.cat([fill, log_p, fill], -1)
    classes = torch.cat(
        [indices[..., 3:], indices, tensors["labels"].clamp_min(0)[..., None].expand(fill.shape)], -1
    )
    torch.testing.assert_close(run(filled, classes.int()), expected, rtol=1e-5, atol=1e-6)

    # Rows without an entry: their labels count.
    log_p[0, 1] = -torch.inf
    _, soft, hard, grad, _ = run(log_p, indices)
    torch.testing.assert_close(hard, expected[2])
    labels = tensors["labels"].clone()
    labels[0, 1] = -100
    layer, count = (tensors["x"], tensors["weight"]), (tensors["labels"] != -100).sum()
    _, others = call_with(module, *layer, labels, log_p, indices, denominator=count)
    torch.testing.assert_close(soft, others.soft_loss, rtol=1e-5, atol=1e-6)
    ce = losses.FusedLinearTopKLoss(weight_soft_loss=0)
    x = leaf(tensors["x"])
    call_with(ce, x, tensors["weight"], tensors["labels"], log_p, indices)[0].backward()
    torch.testing.assert_close(grad[0, 1], x.grad[0, 1], rtol=1e-4, atol=1e-6)

    # All classes: no tail, whose mass is at most rounding.
    full = logits_of(tensors)[1].div(temperature).log_softmax(-1).sort(-1, descending=True)
    _, soft, *_, grad, _ = run(*full)
    expected = losses.FusedLinearKLDivLoss(temperature=temperature)
    x = leaf(tensors["x"])
    call("kl", expected, tensors | {"x": x}).backward()
    torch.testing.assert_close(grad, x.grad, rtol=1e-4, atol=1e-6)
    assert torch.isfinite(soft)


OF_ALL_CLASSES = [n for n in DISTANCES if not n.startswith("top k")]
PAIRS = [(a, b) for a in (*DTYPES, torch.float64) for b in (*DTYPES, torch.float64) if a != b]


@pytest.mark.parametrize("form", ["states", "logits"])
@pytest.mark.parametrize("name", OF_ALL_CLASSES)
@pytest.mark.parametrize(
    "pair", PAIRS, ids=lambda pair: "-".join(str(d).removeprefix("torch.") for d in pair)
)
@pytest.mark.covering(2)
def test_teachers_of_another_dtype(device, backend, name, pair, form):
    """The GEMM of a teacher runs in the dtype of the teacher; logits meet in the accumulation dtype of the
    student."""
    if pair[0] == torch.float64 and backend != "torch":
        pytest.skip("float64 is computed by the torch backend alone")
    tensors, (of_student, of_teacher) = make(device), pair
    tensors = {
        k: t.to(of_teacher if k.startswith("teacher") else of_student) if t.is_floating_point() else t
        for k, t in tensors.items()
    }
    module = DISTANCES[name][0](**DISTANCES[name][1])

    def ours(t):
        if form == "states":
            return call(name, module, t)
        return module(t["x"], t["weight"], t["labels"], t["bias"], teacher_logits=logits_of(t)[1])[0]

    exact = dict(tensors)
    if form == "logits":
        # What is given has no error of its own.
        exact |= {"teacher_x": logits_of(tensors)[1], "teacher_weight": torch.eye(VOCAB, device=device)}
        exact |= {"teacher_bias": torch.zeros(VOCAB, device=device)}
    found = with_gradients(ours, tensors)
    assert [t.dtype for t in found[1:]] == [of_student] * len(TENSORS)
    theirs = with_gradients(lambda t: plain(name, t), tensors)
    for what, *values in zip(
        ("loss", *TENSORS),
        found,
        theirs,
        with_gradients(lambda t: plain(name, t), exact, torch.float64),
        strict=True,
    ):
        # Logits reach 15.
        assert_as_exact_as_torch(*values, what, intermediate=16.0)
