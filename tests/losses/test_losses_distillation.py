# SPDX-License-Identifier: BSD-3-Clause
"""Distillation over a linear head: each loss against its formula over all logits, in float64."""

import pytest
import torch
from cases import DTYPES, assert_as_exact_as_torch
from distillation_cases import (
    BUDGETS,
    DISTANCES,
    LENGTH,
    SEQUENCES,
    TENSORS,
    call,
    logits_of,
    make,
    parts,
    plain,
    results,
    teacher_arguments,
    with_gradients,
)
from losses_cases import leaf

import liger
from liger import losses
from liger.ops.fused_linear_divergence import chunks as engine


@pytest.fixture(params=BUDGETS)
def budget(request):
    return BUDGETS[request.param]


WEIGHTS = {"both": (0.7, 0.4), "soft alone": (0.0, 1.0), "hard alone": (1.0, 0.0)}


@pytest.mark.covering(2)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DISTANCES)
def test_loss_and_gradients(device, name, dtype, temperature, weights, budget):
    tensors, (hard, soft) = make(device, dtype), WEIGHTS[weights]
    cls, options, _ = DISTANCES[name]
    options = options | {"weight_hard_loss": hard, "weight_soft_loss": soft, "temperature": temperature}
    module = cls(**options, memory_budget=budget)
    how = {"hard": hard, "soft": soft, "temperature": temperature}
    results = (
        with_gradients(lambda t: call(name, module, t), tensors),
        with_gradients(lambda t: plain(name, t, **how), tensors),
        with_gradients(lambda t: plain(name, t, **how), tensors, torch.float64),
    )
    for what, *values in zip(("loss", *TENSORS), *results, strict=True):
        # Logits reach 15.
        assert_as_exact_as_torch(*values, what, intermediate=16.0)


@pytest.fixture
def products(monkeypatch):
    """Rows in each product of a head, by its weight."""
    counted = {}
    for name in ("write_linear", "write_wide_linear"):
        write = getattr(engine, name)

        def seen(x, weight, bias, out, write=write):
            counted.setdefault(weight.data_ptr(), []).append(x.shape[0])
            write(x, weight, bias, out)

        monkeypatch.setattr(engine, name, seen)
    return counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", ["jsd", "cosine", "top k"])
def test_logits_are_computed_once(name, weights, dtype, budget, products):
    """The student's logits serve both parts; the teacher's only where there is a distance."""
    tensors, (hard, soft) = make("cpu", dtype), WEIGHTS[weights]
    module = DISTANCES[name][0](
        weight_hard_loss=hard, weight_soft_loss=soft, temperature=2.0, memory_budget=budget
    )
    given = call(name, module, tensors | {"x": leaf(tensors["x"])})
    student, teacher = (products.get(tensors[n].data_ptr(), []) for n in ("weight", "teacher_weight"))
    rows = SEQUENCES * LENGTH
    assert sum(student) == rows and sum(teacher) == (0 if name == "top k" or soft == 0 else rows)
    if budget is not None:
        assert len(student) > 1
    given.backward()
    assert sum(products[tensors["weight"].data_ptr()]) == rows


@pytest.mark.parametrize("name", DISTANCES)
def test_layouts_and_masks(device, name):
    """Packed is padded without its shape; a mask is labels that are ignored, and what is there is never
    looked at."""
    tensors, module = make(device), DISTANCES[name][0](**DISTANCES[name][1])
    expected = parts(name, module, tensors)
    live, per_token = tensors["labels"] != -100, ("x", "teacher_x", "labels")
    for shape in ((-1,), (1, -1)):
        packed = {k: t[live].unflatten(0, shape) if k in per_token else t for k, t in tensors.items()}
        torch.testing.assert_close(parts(name, module, packed), expected, rtol=1e-5, atol=1e-6)
    garbage = dict(tensors)
    for key in ("x", "teacher_x"):
        garbage[key] = tensors[key].masked_fill(~live.unsqueeze(-1), torch.nan)
    garbage["labels"] = tensors["labels"].masked_fill(~live, 3)
    garbage["x"] = leaf(garbage["x"])
    found = parts(name, module, garbage, mask=live.long())
    torch.testing.assert_close([r.detach() for r in found], expected, rtol=1e-5, atol=1e-6)
    found[0].backward()
    assert not garbage["x"].grad[~live].any() and garbage["x"].grad[live].all(-1).any()
    # Without labels the mask alone says what counts.
    soft = DISTANCES[name][0](**DISTANCES[name][1], weight_hard_loss=0, weight_soft_loss=1)
    without = call(name, soft, garbage | {"labels": None}, mask=live)
    torch.testing.assert_close(without, expected[1], rtol=1e-5, atol=1e-6)


def test_parts_of_the_loss(device):
    tensors = make(device)
    module = losses.FusedLinearJSDLoss(beta=0.3, weight_hard_loss=0.7, weight_soft_loss=0.2)
    loss, soft, hard = parts("jsd", module, tensors | {"x": leaf(tensors["x"])})
    assert loss.requires_grad and not soft.requires_grad and not hard.requires_grad
    torch.testing.assert_close(soft, plain("jsd", tensors, 0, 1))
    torch.testing.assert_close(hard, plain("jsd", tensors, 1, 0))
    torch.testing.assert_close(loss.detach(), 0.2 * soft + 0.7 * hard)
    for factors, missing in (((0.7, 0.0), 1), ((0.0, 0.2), 2)):
        module = losses.FusedLinearJSDLoss(weight_hard_loss=factors[0], weight_soft_loss=factors[1])
        assert [part is None for part in parts("jsd", module, tensors)] == [i == missing for i in range(3)]


@pytest.mark.parametrize(
    "requested", [("logprobs",), ("entropy",), ("argmax", "entropy", "logprobs")], ids=str
)
@pytest.mark.parametrize("name", ["jsd", "top k"])
def test_metrics_of_tokens(device, name, requested):
    """Of the student, at temperature 1, in the shape of the target."""
    tensors = make(device)
    module = DISTANCES[name][0](temperature=2.0, metrics=requested)
    layer = [tensors[key] for key in ("x", "weight", "labels", "bias")]
    expected = liger.fused_linear_logprobs(*layer, metrics=("entropy", "argmax"))
    _, metrics = results(name, module, tensors | {"x": leaf(tensors["x"])})
    for metric in losses.TokenMetrics._fields:
        value = getattr(metrics, metric)
        if metric in requested:
            assert not value.requires_grad
            torch.testing.assert_close(value, getattr(expected, metric))
        else:
            assert value is None


def test_metrics_without_a_target(device):
    """The mask alone says which tokens count; without one all do. There is no log-probability of the
    target."""
    tensors, mask = make(device), None
    options = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0}
    module = losses.FusedLinearKLDivLoss(metrics=("entropy", "argmax"), **options)
    layer = [tensors[key] for key in ("x", "weight", "labels", "bias")]
    layer[2] = layer[2].clamp_min(0)
    expected = liger.fused_linear_logprobs(*layer, metrics=("entropy", "argmax"))
    for mask in (None, tensors["labels"] != -100):
        _, metrics = results("kl", module, tensors | {"labels": None}, mask=mask)
        valid = torch.ones_like(expected.argmax, dtype=torch.bool) if mask is None else mask
        torch.testing.assert_close(metrics.entropy, expected.entropy.where(valid, 0.0))
        assert torch.equal(metrics.argmax, expected.argmax.where(valid, -1))
    module = losses.FusedLinearKLDivLoss(metrics=("logprobs",), **options)
    with pytest.raises(
        ValueError, match="FusedLinearKLDivLoss: no target, expected one for the metric 'logprobs'"
    ):
        call("kl", module, tensors | {"labels": None})


@pytest.mark.parametrize("name", DISTANCES)
def test_denominator(device, name):
    """Micro-batches add up to the batch."""
    tensors, module = make(device), DISTANCES[name][0](**DISTANCES[name][1])
    whole = with_gradients(lambda t: call(name, module, t), tensors)
    count, total, per_token = (tensors["labels"] != -100).sum(), None, ("x", "teacher_x", "labels")
    for i, items in enumerate((count, int(count), count.reshape(1))):
        part = {k: t[i : i + 1] if k in per_token else t for k, t in tensors.items()}
        found = with_gradients(lambda t, n=items: call(name, module, t, denominator=n), part)
        found = [f for f, what in zip(found, ("loss", *TENSORS), strict=True) if what != "x"]
        total = found if total is None else [a + b for a, b in zip(total, found, strict=True)]
    torch.testing.assert_close(total, [whole[0], *whole[2:]], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", DISTANCES)
def test_nothing_counts(device, name, budget):
    tensors = make(device)
    tensors["labels"] = torch.full_like(tensors["labels"], -100)
    module = DISTANCES[name][0](**DISTANCES[name][1], memory_budget=budget, temperature=1.5)
    for found in with_gradients(lambda t: call(name, module, t), tensors):
        assert not found.any() and torch.isfinite(found).all()
    empty = {k: t[:, :0] if k in ("x", "teacher_x", "labels") else t for k, t in tensors.items()}
    for found in with_gradients(lambda t: call(name, module, t), empty):
        assert not found.any()


@pytest.mark.parametrize("name", DISTANCES)
def test_autocast(device, name):
    dtype = torch.bfloat16 if torch.bfloat16 in DTYPES else torch.float16
    tensors, module = make(device), DISTANCES[name][0](**DISTANCES[name][1])
    low = {k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors.items()}
    # Log-probabilities of a teacher are no operand of a product.
    of_teacher = teacher_arguments(name, low) if name.startswith("top k") else None
    expected = call(name, module, low)
    x = leaf(tensors["x"])
    with torch.autocast(device.type, dtype):
        if of_teacher is None:
            loss = call(name, module, tensors | {"x": x})
        else:
            loss, _ = module(x, tensors["weight"], tensors["labels"], tensors["bias"], **of_teacher)
    torch.testing.assert_close(loss.detach(), expected)
    loss.backward()
    assert loss.dtype == torch.float32 and x.grad.dtype == torch.float32 and x.grad.any()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_as_the_trainer_of_trl(device, beta, temperature):
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    from trl.experimental.gkd import GKDTrainer

    tensors = make(device)
    student, teacher = logits_of(tensors)
    module = losses.FusedLinearJSDLoss(
        beta=beta, temperature=temperature, weight_hard_loss=0, weight_soft_loss=1
    )
    for items in (None, torch.tensor(31, device=device)):
        expected = GKDTrainer.generalized_jsd_loss(
            student, teacher, tensors["labels"], beta, temperature, num_items_in_batch=items
        )
        loss = call("jsd", module, tensors, denominator=items)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
