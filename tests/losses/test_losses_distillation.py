"""Distillation over a linear head: each loss against its formula over all logits, in float64."""

import copy

import pytest
import torch
from cases import DTYPES, assert_as_exact_as_torch
from distillation_cases import (
    BUDGETS,
    DISTANCES,
    LENGTH,
    SEQUENCES,
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

import liger
from liger import losses
from liger.ops import fused_linear_divergence_kernel as engine


@pytest.fixture(params=BUDGETS)
def budget(request):
    return BUDGETS[request.param]


WEIGHTS = {"both": (0.7, 0.4), "soft alone": (0.0, 1.0), "hard alone": (1.0, 0.0)}


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
    """Those of the student serve both parts; those of the teacher only where there is a distance."""
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


def test_logits_of_a_teacher(device, budget):
    tensors = make(device)
    module = losses.FusedLinearJSDLoss(memory_budget=budget)
    expected = call("jsd", module, tensors)
    x, labels = tensors["x"], tensors["labels"]
    logits = logits_of(tensors)[1]
    loss = module(x, tensors["weight"], logits, None, labels, tensors["bias"])
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", DISTANCES)
def test_layouts_and_masks(device, name):
    """Packed is padded without its shape; a mask is labels that are ignored, and what is there is never looked at."""
    tensors, module = make(device), DISTANCES[name][0](**DISTANCES[name][1], return_soft_hard_loss=True)
    expected = call(name, module, tensors)
    live, per_token = tensors["labels"] != -100, ("x", "teacher_x", "labels")
    for shape in ((-1,), (1, -1)):
        packed = {k: t[live].unflatten(0, shape) if k in per_token else t for k, t in tensors.items()}
        torch.testing.assert_close(call(name, module, packed), expected, rtol=1e-5, atol=1e-6)
    garbage = dict(tensors)
    for key in ("x", "teacher_x"):
        garbage[key] = tensors[key].masked_fill(~live.unsqueeze(-1), torch.nan)
    garbage["labels"] = tensors["labels"].masked_fill(~live, 3)
    garbage["x"] = leaf(garbage["x"])
    results = call(name, module, garbage, mask=live.long())
    torch.testing.assert_close([r.detach() for r in results], list(expected), rtol=1e-5, atol=1e-6)
    results[0].backward()
    assert not garbage["x"].grad[~live].any() and garbage["x"].grad[live].all(-1).any()
    # Without labels the mask alone says what counts.
    soft = DISTANCES[name][0](**DISTANCES[name][1], weight_hard_loss=0, weight_soft_loss=1)
    without = call(name, soft, garbage | {"labels": None}, mask=live)
    torch.testing.assert_close(without, expected[1], rtol=1e-5, atol=1e-6)


def test_parts_of_the_loss(device):
    tensors = make(device)
    module = losses.FusedLinearJSDLoss(
        beta=0.3, weight_hard_loss=0.7, weight_soft_loss=0.2, return_soft_hard_loss=True
    )
    loss, soft, hard = call("jsd", module, tensors | {"x": leaf(tensors["x"])})
    assert loss.requires_grad and not soft.requires_grad and not hard.requires_grad
    torch.testing.assert_close(soft, plain("jsd", tensors, 0, 1))
    torch.testing.assert_close(hard, plain("jsd", tensors, 1, 0))
    torch.testing.assert_close(loss.detach(), 0.2 * soft + 0.7 * hard)


@pytest.mark.parametrize("name", DISTANCES)
def test_number_of_items(device, name):
    """Micro-batches add up to the batch."""
    tensors, module = make(device), DISTANCES[name][0](**DISTANCES[name][1])
    whole = with_gradients(lambda t: call(name, module, t), tensors)
    count, total, per_token = (tensors["labels"] != -100).sum(), None, ("x", "teacher_x", "labels")
    for i, items in enumerate((count, int(count), count.reshape(1))):
        part = {k: t[i : i + 1] if k in per_token else t for k, t in tensors.items()}
        found = with_gradients(lambda t, n=items: call(name, module, t, num_items_in_batch=n), part)
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


@pytest.mark.parametrize("rest", ["tail", "renormalize"])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_teachers_of_some_classes(device, rest, temperature):
    """Rows are filled up with -inf of any class; none may be there, or all; a tail may be without mass."""
    tensors = make(device)
    module = losses.FusedLinearTopKLoss(rest=rest, temperature=temperature, return_soft_hard_loss=True)
    name = "top k" if rest == "tail" else "top k renormalised"
    log_p, indices = teacher_arguments(name, tensors, temperature)[0]

    def run(log_p, indices, mask=None):
        x, w = leaf(tensors["x"]), leaf(tensors["weight"])
        loss, *parts = module(x, w, log_p, indices, tensors["labels"], tensors["bias"], mask=mask)
        return [loss.detach(), *parts, *torch.autograd.grad(loss, (x, w))]

    expected = run(log_p, indices)
    fill = torch.full_like(log_p[..., :2], -torch.inf)
    # In front and behind; the class of one of them is that of a real entry, and that of the label.
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
    others = module(
        tensors["x"], tensors["weight"], log_p, indices, labels, tensors["bias"],
        num_items_in_batch=(tensors["labels"] != -100).sum(),
    )  # fmt: skip
    torch.testing.assert_close(soft, others[1], rtol=1e-5, atol=1e-6)
    ce = losses.FusedLinearTopKLoss(weight_soft_loss=0)
    x = leaf(tensors["x"])
    ce(x, tensors["weight"], log_p, indices, tensors["labels"], tensors["bias"]).backward()
    torch.testing.assert_close(grad[0, 1], x.grad[0, 1], rtol=1e-4, atol=1e-6)

    # All classes: no tail, whose mass is at most rounding.
    full = logits_of(tensors)[1].div(temperature).log_softmax(-1).sort(-1, descending=True)
    _, soft, *_, grad, _ = run(*full)
    expected = losses.FusedLinearKLDivLoss(temperature=temperature)
    x = leaf(tensors["x"])
    call("kl", expected, tensors | {"x": x}).backward()
    torch.testing.assert_close(grad, x.grad, rtol=1e-4, atol=1e-6)
    assert torch.isfinite(soft)


@pytest.mark.parametrize("leaf_name", TENSORS)
@pytest.mark.parametrize("name", DISTANCES)
def test_only_what_needs_a_gradient(device, name, leaf_name):
    tensors, module = make(device), DISTANCES[name][0](**DISTANCES[name][1])
    expected = with_gradients(lambda t: call(name, module, t), tensors)
    alone = tensors | {leaf_name: leaf(tensors[leaf_name])}
    loss = call(name, module, alone)
    (grad,) = torch.autograd.grad(loss * 0.5, alone[leaf_name])
    torch.testing.assert_close([loss.detach(), grad], [expected[0], expected[1 + TENSORS.index(leaf_name)]])
    assert not call(name, module, tensors).requires_grad


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name", DISTANCES)
def test_compiled(device, name, temperature, budget):
    tensors = make(device)
    module = DISTANCES[name][0](**DISTANCES[name][1], temperature=temperature, memory_budget=budget)
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: call(name, module, t), fullgraph=True, backend="aot_eager")
    expected = with_gradients(lambda t: call(name, module, t), tensors)
    torch.testing.assert_close(with_gradients(compiled, tensors), expected)


def test_second_backward(device):
    tensors, module = make(device), losses.FusedLinearJSDLoss(temperature=2.0)
    tensors |= {name: leaf(tensors[name]) for name in TENSORS}
    loss = call("jsd", module, tensors)
    leaves = [tensors[name] for name in TENSORS]
    first = torch.autograd.grad(loss, leaves, torch.tensor(3.0, device=device), retain_graph=True)
    second = torch.autograd.grad(loss, leaves, torch.tensor(3.0, device=device))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    again = torch.autograd.grad(call("jsd", module, tensors), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="is not differentiable"):
        again[0].sum().backward()


@pytest.mark.parametrize("name", DISTANCES)
def test_autocast(device, name):
    dtype = torch.bfloat16 if torch.bfloat16 in DTYPES else torch.float16
    tensors, module = make(device), DISTANCES[name][0](**DISTANCES[name][1])
    low = {k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors.items()}
    # Log-probabilities of a teacher are no operand of a product.
    of_teacher = teacher_arguments(name, low)[0] if name.startswith("top k") else None
    expected = call(name, module, low)
    x = leaf(tensors["x"])
    with torch.autocast(device.type, dtype):
        if of_teacher is None:
            loss = call(name, module, tensors | {"x": x})
        else:
            loss = module(x, tensors["weight"], *of_teacher, tensors["labels"], tensors["bias"])
    torch.testing.assert_close(loss.detach(), expected)
    loss.backward()
    assert loss.dtype == torch.float32 and x.grad.dtype == torch.float32 and x.grad.any()


def test_copies(device):
    tensors, module = make(device), losses.FusedLinearJSDLoss()
    torch.testing.assert_close(call("jsd", copy.deepcopy(module), tensors), call("jsd", module, tensors))


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
        loss = call("jsd", module, tensors, num_items_in_batch=items)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", DISTANCES)
def test_ignored_tokens_may_hold_anything(device, name, budget):
    """A nan of the student, of the teacher or in a teacher's logits goes into no gradient, nor does any label."""
    tensors, module = make(device), DISTANCES[name][0](**DISTANCES[name][1], memory_budget=budget)
    expected = with_gradients(lambda t: call(name, module, t), tensors)
    ignored = (tensors["labels"] == -100).unsqueeze(-1)
    of_teacher, bias = teacher_arguments(name, tensors, 1.0)
    if name.startswith("top k"):
        of_teacher = [of_teacher[0], of_teacher[1].masked_fill(ignored, VOCAB + 9)]
    spoilt = tensors | {"x": tensors["x"].masked_fill(ignored, torch.nan)}
    of_teacher[0] = of_teacher[0].masked_fill(ignored, torch.nan)

    def spoilt_call(t):
        return module(t["x"], t["weight"], *of_teacher, t["labels"], t["bias"], *bias)

    found = with_gradients(spoilt_call, spoilt)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    if not name.startswith("top k"):
        logits = logits_of(tensors)[1].masked_fill(ignored, torch.nan)
        by_logits = with_gradients(
            lambda t: module(t["x"], t["weight"], logits, None, t["labels"], t["bias"]), spoilt
        )
        torch.testing.assert_close(by_logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name", [n for n in DISTANCES if not n.startswith("top k")])
def test_logits_of_a_teacher_stay_as_they_are(device, backend, name, temperature, dtype):
    """Also where nothing may be written: expanded, and of inference mode."""
    if dtype == torch.float64 and backend != "torch":
        pytest.skip("float64 is computed by the torch backend alone")
    if dtype not in DTYPES and dtype != torch.float64:
        pytest.skip("not computed by Triton's interpreter")
    tensors, module = make(device, dtype), DISTANCES[name][0](**DISTANCES[name][1], temperature=temperature)
    row = logits_of(tensors)[1][0, 0].detach()
    with torch.inference_mode():
        of_inference = row.expand(SEQUENCES, LENGTH, VOCAB).clone()
    teachers = (
        row.expand(SEQUENCES, LENGTH, VOCAB).clone(),
        row.expand(SEQUENCES, LENGTH, VOCAB),
        of_inference,
    )
    before, results = row.clone(), []
    for teacher in teachers:
        given = tensors | {"x": leaf(tensors["x"])}
        loss = module(given["x"], given["weight"], teacher, None, given["labels"], given["bias"])
        results.append([loss.detach(), *torch.autograd.grad(loss, given["x"])])
        assert torch.equal(teacher, before.expand_as(teacher))
    # Rows that lie differently are added up in another order.
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], **tolerance)


@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**32 + 5])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name", DISTANCES)
def test_label_that_is_no_class(device, name, temperature, wrong):
    """An error on the CPU; on a GPU, where nothing is waited for, the row is nan, as with liger.cross_entropy."""
    tensors = make(device)
    module = DISTANCES[name][0](**DISTANCES[name][1], temperature=temperature, return_soft_hard_loss=True)
    tensors["labels"][0, 1] = wrong
    tensors["x"] = leaf(tensors["x"])
    if device.type == "cpu":
        with pytest.raises(
            RuntimeError,
            match=f"FusedLinear.*Loss: true_labels at row 1 is {wrong}, expected 0 <= true_labels < {VOCAB}",
        ):
            call(name, module, tensors)
    else:
        loss, soft, hard = call(name, module, tensors)
        (grad,) = torch.autograd.grad(loss, tensors["x"])
        nan = grad.isnan().any(-1)
        assert loss.isnan() and hard.isnan() and soft.isfinite()
        assert nan.nonzero().tolist() == [[0, 1]]
    # Without cross entropy they say no more than which tokens count.
    soft = DISTANCES[name][0](**DISTANCES[name][1], weight_hard_loss=0.0, weight_soft_loss=1.0)
    assert call(name, soft, tensors).isfinite()


@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**32 + 5])
@pytest.mark.parametrize("name", ["top k", "top k renormalised"])
def test_index_of_a_teacher_that_is_no_class(device, name, wrong):
    tensors, module = make(device), DISTANCES[name][0](**DISTANCES[name][1])
    (log_p, indices), _ = teacher_arguments(name, tensors)
    indices[0, 1, 2] = wrong
    x = leaf(tensors["x"])

    def run():
        return module(x, tensors["weight"], log_p, indices, tensors["labels"], tensors["bias"])

    if device.type == "cpu":
        message = (
            rf"FusedLinearTopKLoss: teacher_indices at index \(1, 2\) is {wrong}, expected 0 <= .* < {VOCAB}"
        )
        with pytest.raises(RuntimeError, match=message):
            run()
    else:
        loss = run()
        (grad,) = torch.autograd.grad(loss, x)
        assert loss.isnan() and grad.isnan().any(-1).nonzero().tolist() == [[0, 1]]
    # Where the log-probability is -inf, the index means nothing.
    log_p[0, 1, 2] = -torch.inf
    assert run().isfinite()


@pytest.mark.parametrize("name", DISTANCES)
def test_default_dtype(device, name):
    tensors, module = make(device), DISTANCES[name][0](**DISTANCES[name][1])
    expected = with_gradients(lambda t: call(name, module, t), tensors)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = with_gradients(lambda t: call(name, module, t), tensors)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_options():
    for message, cls, options in (
        ("FusedLinearJSDLoss: temperature is 0", losses.FusedLinearJSDLoss, {"temperature": 0}),
        ("FusedLinearKLDivLoss: temperature is nan", losses.FusedLinearKLDivLoss, {"temperature": float("nan")}),
        ("beta is 1.5, expected a value between 0 and 1", losses.FusedLinearJSDLoss, {"beta": 1.5}),
        ("beta is 0, expected a positive, finite value", losses.FusedLinearCosineSimilarityLoss, {"beta": 0}),
        ("weight_hard_loss is -1", losses.FusedLinearJSDLoss, {"weight_hard_loss": -1}),
        ("not both 0", losses.FusedLinearJSDLoss, {"weight_hard_loss": 0, "weight_soft_loss": 0}),
        ("unknown rest 'nothing', expected one of tail, renormalize", losses.FusedLinearTopKLoss, {"rest": "nothing"}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            cls(**options)
    with pytest.raises(TypeError):
        losses.FusedLinearJSDLoss(chunk_size=4)


def test_bad_input(device):
    tensors = make(device)

    def refuses(error, match, change=(), name="jsd", **how):
        with pytest.raises(error, match=match):
            call(name, DISTANCES[name][0](), tensors | dict(change), **how)

    short = {"teacher_weight": tensors["teacher_weight"][:50], "teacher_bias": None}
    refuses(RuntimeError, "FusedLinearJSDLoss: teacher_weight has 50 classes, expected 57", short)
    logits = {"teacher_x": torch.zeros(SEQUENCES, LENGTH, 60, device=device), "teacher_weight": None}
    refuses(RuntimeError, "teacher_input, without teacher_weight, has 60 classes, expected 57", logits)
    refuses(ValueError, "FusedLinearJSDLoss: no true_labels", {"labels": None})
    refuses(RuntimeError, r"true_labels has shape \(18,\)", {"labels": tensors["labels"].flatten()})
    refuses(RuntimeError, r"mask has shape \(3,\)", mask=tensors["labels"][:, 0])
    refuses(RuntimeError, r"teacher_input has shape \(3, 5, 40\)", {"teacher_x": tensors["teacher_x"][:, 1:]})
    refuses(RuntimeError, r"student_input has shape \(24,\)", {"x": tensors["x"][0, 0]})
    refuses(RuntimeError, "num_items_in_batch has shape", num_items_in_batch=tensors["labels"])
    refuses(RuntimeError, "teacher requires grad", {"teacher_x": leaf(tensors["teacher_x"])})
    refuses(RuntimeError, "student_weight has dtype float64", {"weight": tensors["weight"].double()})
    refuses(RuntimeError, "true_labels has dtype float32", {"labels": tensors["labels"].float()})
    refuses(
        RuntimeError,
        r"teacher_weight has shape \(57, 39\), expected .* of teacher_input, 40",
        {"teacher_weight": tensors["teacher_weight"][:, 1:]},
    )

    (log_p, indices), _ = teacher_arguments("top k", tensors)
    module = losses.FusedLinearTopKLoss()
    for match, *arguments in (
        (r"teacher_indices has shape \(3, 5, 5\)", log_p, indices[:, 1:]),
        (r"teacher_indices has shape \(3, 6, 4\)", log_p, indices[..., 1:]),
        ("teacher_indices has dtype float32", log_p, indices.float()),
        ("teacher_logprobs has dtype int64", indices, indices),
        ("at least one class", log_p[..., :0], indices[..., :0]),
        ("teacher requires grad", leaf(log_p), indices),
    ):
        with pytest.raises(RuntimeError, match=match):
            module(tensors["x"], tensors["weight"], *arguments, tensors["labels"])


def test_bad_arguments_of_the_op(device):
    """What no module passes."""
    tensors = make(device)
    x, teacher = (tensors[name].flatten(0, 1) for name in ("x", "teacher_x"))
    of_heads = [x, tensors["weight"], teacher, tensors["teacher_weight"]]

    def refuses(match, divergence="jsd", indices=None, soft=1.0, hard=0.0, heads=of_heads):
        with pytest.raises(RuntimeError, match=match):
            torch.ops.liger.fused_linear_divergence_forward(
                *heads, indices, *(None,) * 4, divergence, 0.5, 1.0, soft, hard, -100, False, None, None, *(False,) * 3
            )  # fmt: skip

    refuses("divergence is 'hellinger'", "hellinger")
    refuses("soft is -1 and hard is 0", soft=-1.0)
    refuses("soft is 0 and hard is 0", soft=0.0)
    refuses("no target", hard=1.0)
    refuses("teacher_indices was given with divergence 'jsd'", indices=teacher.long())
    refuses("no teacher_indices", "topk", heads=[*of_heads[:3], None])
    refuses("teacher_weight or teacher_bias was given", "topk", indices=teacher.long())


def test_public_names():
    for name in ("JSD", "KLDiv", "CosineSimilarity", "TopK"):
        assert issubclass(getattr(liger.losses, f"FusedLinear{name}Loss"), losses.DistillationLoss)
