# SPDX-License-Identifier: BSD-3-Clause
"""Divergences of two linear layers in chunks, against the same in one piece and in float64."""

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, assert_as_exact_as_torch
from errors import error_about
from test_near_teacher import forward_kl, jsd, reverse_kl

import liger
from liger.ops.fused_linear_divergence import chunks as module

FORMS = {
    "kl": (liger.fused_linear_kl_div, liger.kl_div, {}),
    "reverse kl": (liger.fused_linear_kl_div, liger.kl_div, {"reverse": True}),
    "jsd 0.3": (liger.fused_linear_jsd, liger.jsd, {"beta": 0.3}),
}
ROWS, HIDDEN, TEACHER, VOCAB = 14, 24, 40, 57


def make(device, dtype=torch.float32, rows=ROWS):
    def tensor(*shape):
        return (torch.randn(shape, device=device) / shape[-1] ** 0.25).to(dtype)

    return {
        "input": tensor(rows, HIDDEN),
        "weight": tensor(VOCAB, HIDDEN),
        "teacher_input": tensor(rows, TEACHER),
        "teacher_weight": tensor(VOCAB, TEACHER),
        "bias": tensor(VOCAB),
        "teacher_bias": tensor(VOCAB),
    }


def budget(dtype, rows=4):
    """For two slabs of so many rows."""
    return 2 * rows * -(-VOCAB * dtype.itemsize // 16) * 16


def plain(name, t, *arguments, **options):
    teacher = t.get("teacher_logits")
    if teacher is None:
        teacher = F.linear(t["teacher_input"], t["teacher_weight"], t["teacher_bias"])
    return FORMS[name][1](
        F.linear(t["input"], t["weight"], t["bias"]), teacher, *arguments, **FORMS[name][2], **options
    )


def fused(name, t, target=None, **options):
    return FORMS[name][0](**t, target=target, **FORMS[name][2], **options)


LEAVES = ("input", "weight", "bias")


def with_gradients(function, tensors, upstream=None, leaves=LEAVES):
    tensors = dict(tensors)
    for leaf in leaves:
        tensors[leaf] = tensors[leaf].detach().clone().requires_grad_()
    loss = function(tensors)
    upstream = None if upstream is None else upstream.to(loss.dtype)
    return [loss, *torch.autograd.grad(loss, [tensors[leaf] for leaf in leaves], upstream)]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunked", [False, True], ids=["one chunk", "four chunks"])
def test_loss_and_gradients(device, name, dtype, chunked):
    tensors = make(device, dtype)
    target = torch.zeros(ROWS, dtype=torch.int64, device=device)
    target[3] = -100
    options = {"token_weight": torch.rand(ROWS, device=device), "temperature": 1.5}
    room = {"memory_budget": budget(dtype)} if chunked else {}
    actual = with_gradients(lambda t: fused(name, t, target, **options, **room), tensors)
    expected = with_gradients(lambda t: plain(name, t, target, **options), tensors)
    wide = {k: t.double().cpu() for k, t in tensors.items()}
    on_cpu = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    with liger.use_backend("torch"):
        exact = with_gradients(lambda t: plain(name, t, target.cpu(), **on_cpu), wide)
    for what, *values in zip(("loss", *LEAVES), actual, expected, exact, strict=True):
        # Logits are rounded once more than in float32, by both.
        values = [v.cpu() for v in values]
        assert_as_exact_as_torch(*values, what, intermediate=8.0)


@pytest.mark.parametrize("name", FORMS)
def test_loss_of_each_row(device, name):
    tensors = make(device)
    upstream = torch.randn(ROWS, device=device)
    options = {"reduction": "none", "token_weight": torch.rand(ROWS, device=device)}
    actual = with_gradients(
        lambda t: fused(name, t, memory_budget=budget(torch.float32), **options), tensors, upstream
    )
    expected = with_gradients(lambda t: plain(name, t, **options), tensors, upstream)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("other", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["states", "logits"])
@pytest.mark.covering(2)
def test_a_teacher_of_another_dtype(device, name, dtype, other, form):
    """As of the same tensors in float32: nothing is rounded to the narrower of the two."""
    tensors = {k: t.to(other if k.startswith("teacher") else dtype) for k, t in make(device).items()}
    if form == "logits":
        teacher = [tensors.pop(f"teacher_{k}") for k in ("input", "weight", "bias")]
        tensors["teacher_logits"] = F.linear(*teacher)
    found = with_gradients(lambda t: fused(name, t, memory_budget=budget(dtype)), tensors)
    wide = {k: t.float() for k, t in tensors.items()}
    assert [t.dtype for t in found] == [torch.float32, *[dtype] * len(LEAVES)]
    expected = with_gradients(lambda t: plain(name, t), wide)
    with liger.use_backend("torch"):
        exact = with_gradients(lambda t: plain(name, t), {k: t.double() for k, t in tensors.items()})
    assert_as_exact_as_torch(found[0], expected[0], exact[0], "loss", intermediate=8.0)
    same = with_gradients(lambda t: plain(name, t), {k: t.to(dtype) for k, t in tensors.items()})
    for what, *values in zip(LEAVES, found[1:], same[1:], exact[1:], strict=True):
        assert_as_exact_as_torch(*values, what, intermediate=8.0)


def test_logits_of_the_teacher(device):
    tensors = make(device)
    logits = F.linear(tensors["teacher_input"], tensors["teacher_weight"], tensors["teacher_bias"])
    given = {name: tensors[name] for name in ("input", "weight", "bias")} | {"teacher_logits": logits}
    small = budget(torch.float32)
    expected = with_gradients(lambda t: plain("jsd 0.3", t), tensors)
    whole = with_gradients(lambda t: fused("jsd 0.3", t), given)
    chunked = with_gradients(lambda t: fused("jsd 0.3", t, memory_budget=small), given)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(chunked, expected, rtol=1e-4, atol=1e-5)


def test_leading_dimensions_and_an_upstream_factor(device):
    tensors = make(device)
    shaped = {k: v.view(2, 7, -1) if k in ("input", "teacher_input") else v for k, v in tensors.items()}
    three = torch.tensor(3.0, device=device)
    actual = with_gradients(lambda t: fused("kl", t, reduction="batchmean"), shaped, three)
    expected = with_gradients(lambda t: plain("kl", t, reduction="sum"), tensors, three)
    assert actual[1].shape == (2, 7, HIDDEN)
    actual[1] = actual[1].view(ROWS, HIDDEN)
    torch.testing.assert_close([2 * a for a in actual], expected, rtol=1e-4, atol=1e-5)


def test_micro_batches_add_up(device):
    tensors = make(device)
    whole = with_gradients(lambda t: fused("kl", t), tensors)
    count, parts = torch.tensor(ROWS, device=device), []
    for rows in (slice(0, 5), slice(5, ROWS)):
        part = {k: v[rows] if k in ("input", "teacher_input") else v for k, v in tensors.items()}
        parts.append(with_gradients(lambda t: fused("kl", t, denominator=count), part))
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    torch.testing.assert_close(parts[0][2] + parts[1][2], whole[2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("times", [1, 512])
@pytest.mark.parametrize("name", FORMS)
def test_a_loss_scale_keeps_the_bits_of_float16(device, name, times):
    """A mean over many rows, or over many micro-batches, has gradients that are subnormal in float16."""
    rows, loss_scale = 1024, 2.0**12 * times
    tensors = make(device, rows=rows)
    tensors = {k: (v * (0.02 if "weight" in k else 1.0)).half() for k, v in tensors.items()}
    options = {"denominator": torch.tensor(float(rows * times), device=device)}
    upstream = torch.tensor(loss_scale, device=device)
    wide = {k: v.double() for k, v in tensors.items()}
    loss, *grads = with_gradients(lambda t: fused(name, t, **options), tensors, upstream)
    exact, *expected = with_gradients(
        lambda t: torch_divergence(name, t) / (rows * times), wide, upstream.double()
    )
    assert abs(loss.item() - exact.item()) < 1e-3 * exact.item()
    for grad, wanted in zip(grads, expected, strict=True):
        assert (grad.double() - wanted).norm() < 3e-3 * wanted.norm()


def torch_divergence(name, t):
    """Summed over rows, in torch."""
    student, teacher = (
        F.linear(t[key], t[f"{part}weight"], t[f"{part}bias"]).log_softmax(-1)
        for key, part in (("input", ""), ("teacher_input", "teacher_"))
    )
    form = {"kl": forward_kl, "reverse kl": reverse_kl, "jsd 0.3": jsd(0.3)}[name]
    return form(student, teacher).sum()


@pytest.mark.parametrize("leaf", LEAVES)
def test_no_product_for_what_is_frozen(device, leaf, monkeypatch):
    """One gradient at a time is the one of all, and of the others nothing is computed."""
    tensors, made = make(device), []
    original = module.LMHeadGradients.__init__

    def spy(self, *arguments):
        original(self, *arguments)
        made.append([g.numel() > 0 for g in (self.input, self.weight, self.bias)])

    monkeypatch.setattr(module.LMHeadGradients, "__init__", spy)
    every = with_gradients(lambda t: fused("kl", t), tensors)
    alone = with_gradients(lambda t: fused("kl", t), tensors, leaves=(leaf,))
    torch.testing.assert_close(alone[1], every[1 + LEAVES.index(leaf)])
    assert made == [[True] * 3, [leaf == other for other in LEAVES]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_fit_the_budget(device, monkeypatch, dtype):
    """Those of a part of a chunk, beside the gradients of the chunk; each row is multiplied once."""
    tensors, seen = make(device, dtype), {}
    for name in ("write_linear", "write_wide_linear"):
        write = getattr(module, name)

        def spy(x, weight, bias, out, write=write):
            assert out.dtype == torch.float32
            seen.setdefault(tuple(weight.shape), []).append(out.shape[0])
            write(x, weight, bias, out)

        monkeypatch.setattr(module, name, spy)
    chunks = []
    for cls in (module.LMHeadGradients, module.ScaledLMHeadGradients):

        def chunk(self, x, *rest, add=cls.add):
            chunks.append(x.shape[0])
            add(self, x, *rest)

        monkeypatch.setattr(cls, "add", chunk)
    lines, of_logits = (10, 2) if dtype == torch.float32 else (16, 4)
    room = lines * -(-VOCAB * dtype.itemsize // 16) * 16
    # A float32 sum over chunks would be more memory, which one chunk may use instead.
    with_gradients(lambda t: fused("kl", t, memory_budget=room, accum_dtype=dtype), tensors)
    student, teacher = (seen[tuple(tensors[name].shape)] for name in ("weight", "teacher_weight"))
    assert student == teacher and sum(student) == sum(chunks) == ROWS
    assert max(chunks) > max(student) and max(chunks) + of_logits * max(student) <= lines


@pytest.mark.parametrize("wide", [False, True], ids=["16-bit logits", "float32 logits"])
@pytest.mark.parametrize("products", [0, 1, 2])
@pytest.mark.parametrize("exact", [False, True], ids=["16-bit sum", "float32 sum"])
@pytest.mark.parametrize("rows", [100, 1500, 8192, 50000])
def test_chunks_of_large_heads(rows, exact, products, wide):
    """Chunks and their parts fit the budget, or the memory of the weight's gradient where the sum is
    elsewhere."""
    x, weight = (torch.empty(n, 4096, dtype=torch.bfloat16, device="meta") for n in (rows, 128256))
    beside = products * (2 if wide else 1)
    chunk, chunks, part = module._plan(x, weight, (True, True, True), exact, None, beside)
    assert chunk * (chunks - 1) < rows <= chunk * chunks and 1 <= part <= chunk
    room = weight.numel() if exact and chunks > 1 else (512 << 20) // 2
    single = exact and chunks == 1
    assert single or (chunk + beside * part) * weight.shape[0] <= room
    # Fewer chunks than if all had as much room as the gradient, and parts of whole tiles.
    assert chunks <= -(-rows // (room // weight.shape[0] // (1 + beside)))
    assert part == chunk or part % 128 == 0


@pytest.mark.parametrize("rows", [1, 100, 8192])
def test_parts_without_a_gradient(rows):
    """They are all there is."""
    x, weight = (torch.empty(n, 4096, dtype=torch.bfloat16, device="meta") for n in (rows, 128256))
    chunk, chunks, part = module._plan(x, weight, (False,) * 3, True, None, 4)
    assert chunk == part == min(rows, 512 // 128 * 128) and chunk * (chunks - 1) < rows <= chunk * chunks


def test_bad_input(device):
    tensors = make(device)

    def refuses(match, change=(), **options):
        with pytest.raises(error_about(match), match=match):
            fused("jsd 0.3", {**tensors, **dict(change)}, **options)

    none = {"teacher_input": None, "teacher_weight": None, "teacher_bias": None}
    logits = torch.zeros(ROWS, VOCAB - 1, device=device)
    refuses(
        "fused_linear_jsd: teacher_logits has shape .*, expected logits of 57 classes",
        {**none, "teacher_logits": logits},
    )
    for match, change in {
        "neither of teacher_input and teacher_logits were given": none,
        "both of teacher_input and teacher_logits were given": {"teacher_logits": logits},
        "teacher_input was given without teacher_weight": {"teacher_weight": None},
        "teacher_bias was given with teacher_logits": {
            **none, "teacher_logits": logits, "teacher_bias": tensors["teacher_bias"],
        },
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"fused_linear_jsd: {match}"):
            fused("jsd 0.3", {**tensors, **change})
    for name in ("teacher_weight", "teacher_bias"):
        match = f"fused_linear_jsd: {name} has dtype float16, expected the dtype of teacher_input, float32"
        refuses(match, {name: tensors[name].half()})
        raw = [tensors[k].half() if k == name else tensors[k] for k in ("teacher_weight", "teacher_bias")]
        call = torch.ops.liger.fused_linear_divergence_forward
        given = (
            tensors["input"].double(),
            tensors["weight"].double(),
            tensors["teacher_input"],
            raw[0],
            None,
            None,
        )
        rest = None, raw[1], None, "jsd", 0.5, 1.0, 1.0, 0.0, -100, False, None, None, False, False, False
        with pytest.raises(
            RuntimeError, match=f"{name} has dtype float16, expected the dtype of teacher, float32"
        ):
            call(*given, *rest)
    refuses("fused_linear_jsd: accum_dtype is float64, expected float32", accum_dtype=torch.float64)
    frozen = tensors["teacher_weight"].clone().requires_grad_()
    refuses("fused_linear_jsd: teacher_weight requires grad", {"teacher_weight": frozen})
