# SPDX-License-Identifier: BSD-3-Clause
"""logits_dtype=torch.float32: log-probabilities within 1e-5 of float32 logits, and gradients from
these probabilities, for every backend, combination of dtypes and option."""

import itertools

import pytest
import torch
from cases import DTYPES
from errors import error_about
from live_bytes import LiveBytes

import liger
from liger._core.math.float32_matmul import float32_product, split_product, write_float32_linear

ROWS, HIDDEN, VOCAB = 70, 96, 517
PAIRS = [(dtype, weight) for dtype in DTYPES for weight in dict.fromkeys((dtype, torch.float32))]
# A chunk of 8 rows, in any dtype; all rows.
BUDGETS = {"chunks": 8 * 520 * 6, "whole": None}
OPTIONS = {"plain": {}, "temperature": {"temperature": 0.6}, "softcap": {"softcap": 20.0, "temperature": 1.3}}
STATED = 1e-5
names = lambda pair: "-".join(str(dtype).removeprefix("torch.") for dtype in pair)  # noqa: E731


def make(device, dtypes, rows=ROWS, hidden=HIDDEN, vocab=VOCAB, std=2.5, bias=False):
    """Logits of this standard deviation; three ignored rows, one of which has hidden states that are not
    finite."""
    x = torch.randn(rows, hidden, device=device).to(dtypes[0])
    weight = (torch.randn(vocab, hidden, device=device) * std / hidden**0.5).to(dtypes[1])
    target = torch.randint(vocab, (rows,), device=device)
    target[1] = target[5] = target[-1] = -100
    x[5] = torch.nan
    return x, weight, target, torch.randn(vocab, device=device).to(dtypes[1]) if bias else None


def plain(x, weight, target, bias, dtype, temperature=1.0, softcap=None):
    """(log-probabilities, entropies), with logits in ``dtype``."""
    live = (target != -100).unsqueeze(1)
    logits = x.where(live, 0.0).to(dtype) @ weight.to(dtype).T
    logits = logits if bias is None else logits + bias.to(dtype)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = (logits / temperature).log_softmax(-1)
    chosen = logp.gather(1, target.clamp_min(0).unsqueeze(1))
    return chosen.where(live, 0.0)[:, 0], -(logp.exp() * logp).sum(-1).where(live[:, 0], 0.0)


def difference(a, b):
    return (a.double() - b.double()).abs().max().item()


def relative_error(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.covering(2)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtypes", PAIRS, ids=names)
def test_stated_error(device, dtypes, bias, options, budget):
    tensors, options = make(device, dtypes, bias=bias), OPTIONS[options]
    how = {**options, "memory_budget": BUDGETS[budget], "metrics": ("entropy", "argmax")}
    found = liger.fused_linear_logprobs(*tensors, **how, logits_dtype=torch.float32)
    assert found.logprobs.dtype == found.entropy.dtype == torch.float32
    exact = plain(*tensors, torch.float64, **options)
    # On the CPU, where float32 products are exact.
    float32 = plain(*(t if t is None else t.cpu() for t in tensors), torch.float32, **options)
    for mine, best, other in zip(found[:2], exact, float32, strict=True):
        assert difference(mine, best) < STATED
        assert difference(mine.cpu(), other) < STATED
    assert not found.logprobs[tensors[2] == -100].any()
    assert torch.equal(found.argmax == -1, tensors[2] == -100)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=str)
def test_rounded_logits_have_a_larger_error(device, dtype):
    """What the option is for; without it the engines of fewer than 256 rows round logits to the dtype."""
    x, weight, target, _ = make(device, (dtype, dtype))
    exact = plain(x, weight, target, None, torch.float64)[0]
    rounded = liger.fused_linear_logprobs(x, weight, target)
    assert difference(rounded, exact) > 50 * STATED


@pytest.mark.covering(2)
@pytest.mark.parametrize("entropy", [False, True], ids=["logprobs", "entropy"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtypes", PAIRS, ids=names)
def test_gradients(device, dtypes, options, budget, entropy):
    """Logits with a standard deviation of 15: in bfloat16 their rounding would change probabilities by some
    percent. A gradient has the error of its own rounding and, from operands of one 16-bit dtype, of the
    rounding of the gradient of the logits."""
    tensors = make(device, dtypes, std=15.0, bias=True)
    upstream = torch.randn(2, ROWS, device=device)
    options = OPTIONS[options]

    def grads(function, tensors):
        target = tensors[2]
        leaves = [t.detach().clone().requires_grad_() for t in (tensors[0], tensors[1], tensors[3])]
        logprobs, entropies = function(leaves[0], leaves[1], target, leaves[2])[:2]
        total = (logprobs * upstream[0]).sum()
        if entropy:
            total = total + (entropies * upstream[1]).sum()
        return torch.autograd.grad(total, leaves)

    how = {**options, "memory_budget": BUDGETS[budget], "metrics": ("entropy",)}
    mine = grads(lambda *t: liger.fused_linear_logprobs(*t, **how, logits_dtype=torch.float32), tensors)
    # Without the row of NaN, whose gradient here is as for a row that is left out.
    x = tensors[0].masked_fill((tensors[2] == -100).unsqueeze(1), 0.0)
    wide = [x.double(), tensors[1].double(), tensors[2], tensors[3].double()]
    exact = grads(lambda *t: plain(*t, torch.float64, **options), wide)
    narrow = dtypes[0] == dtypes[1]
    for name, g, best, leaf in zip(
        ("hidden", "weight", "bias"), mine, exact, (x, *tensors[1::2]), strict=True
    ):
        assert g.dtype == leaf.dtype and torch.isfinite(g).all(), name
        roundings = torch.finfo(g.dtype).eps / 2 + narrow * torch.finfo(dtypes[0]).eps / 2
        assert relative_error(g, best) < roundings + 2e-5, name
    assert not mine[0][tensors[2] == -100].any()


def test_small_gradients_in_float16(device):
    """Upstream gradients of a mean over many tokens, whose products with most probabilities underflow in
    float16."""
    x, weight, target, _ = make(device, (torch.float16, torch.float16))
    x, weight = (t.requires_grad_() for t in (x, weight))
    upstream = torch.randn(ROWS, device=device) * 2**-14
    x64, w64 = (t.detach().double().requires_grad_() for t in (x.nan_to_num(), weight))
    exact = torch.autograd.grad(
        (plain(x64, w64, target, None, torch.float64)[0] * upstream).sum(), (x64, w64)
    )
    for budget in BUDGETS.values():
        logprobs = liger.fused_linear_logprobs(
            x, weight, target, logits_dtype=torch.float32, memory_budget=budget
        )
        for mine, best in zip(
            torch.autograd.grad((logprobs * upstream).sum(), (x, weight)), exact, strict=True
        ):
            # Results below 2^-14 have fewer bits; the smallest distance is 2^-24.
            size = best.norm() / best.numel() ** 0.5
            assert relative_error(mine, best) < 1e-3 + 2**-24 / size


@pytest.fixture
def reduced_precision():
    """The process allows TF32 on a GPU, and bfloat16 in oneDNN."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtypes", PAIRS, ids=names)
def test_settings_for_float32_products_have_no_effect(device, dtypes, reduced_precision):
    x, weight, target, _ = make(device, dtypes, std=15.0)
    x, weight = (t.requires_grad_() for t in (x.nan_to_num(), weight))
    upstream = torch.randn(ROWS, device=device)
    logprobs = liger.fused_linear_logprobs(x, weight, target, logits_dtype=torch.float32)
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, weight))
    exact = plain(x64, w64, target, None, torch.float64)[0]
    assert difference(logprobs, exact) < 3 * STATED  # of logits up to 60
    mine = torch.autograd.grad((logprobs * upstream).sum(), (x, weight))
    best = torch.autograd.grad((exact * upstream).sum(), (x64, w64))
    if weight.dtype == torch.float32:
        assert relative_error(mine[1], best[1]) < 2e-5
    if x.dtype == torch.float32:
        assert relative_error(mine[0], best[0]) < 2e-5


OPERANDS = list(itertools.product((torch.float32, torch.float16, torch.bfloat16), repeat=2))


@pytest.mark.parametrize("add", [False, True], ids=["", "add"])
@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("function", [float32_product, split_product])
@pytest.mark.parametrize("dtypes", OPERANDS, ids=names)
def test_product_of_parts(dtypes, function, scale, add):
    """Sums of bfloat16 products are as exact as float32: magnitudes over many powers of ten, and strides."""
    a = (torch.randn(40, 64) * torch.logspace(-3, 3, 40).unsqueeze(1)).to(dtypes[0])
    b = (torch.randn(50, 64) * torch.logspace(-3, 3, 50).unsqueeze(1)).to(dtypes[1])
    before = torch.randn(40, 50)
    out = before.clone() if add else torch.full_like(before, torch.nan)
    function(a, b.t(), out, add, scale)
    exact = scale * (a.double() @ b.double().t()) + (before.double() if add else 0.0)
    size = a.double().abs() @ b.double().abs().t() + before.abs()
    assert ((out.double() - exact).abs() / size).max() < 4e-7


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", OPERANDS, ids=names)
def test_products_on_a_gpu(dtypes, reduced_precision):
    """The GEMMs that float32_product chooses there, whatever the process allows, over a long sum."""
    a = torch.randn(256, 2048, device="cuda").to(dtypes[0])
    b = torch.randn(384, 2048, device="cuda").to(dtypes[1])
    for scale, add in ((1.0, False), (0.37, True)):
        out = torch.ones(256, 384, device="cuda") if add else torch.full((256, 384), torch.nan, device="cuda")
        float32_product(a, b.t(), out, add, scale)
        exact = scale * (a.double() @ b.double().t()) + add
        assert ((out.double() - exact).abs() / (a.double().abs() @ b.double().abs().t())).max() < 1e-6


def test_linear_overwrites_memory_that_is_not_a_number():
    x, weight, _, bias = make("cpu", (torch.float32, torch.float32), bias=True)
    out = torch.full((ROWS, 520), torch.nan)[:, :VOCAB]
    write_float32_linear(x, weight, bias, out, 0.5)
    expected = 0.5 * (x.double() @ weight.double().T + bias.double())
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtypes", PAIRS, ids=names)
def test_memory(dtypes):
    """The logits of a chunk and their rounded gradient fit the budget; there is no copy of all logits."""
    vocab, budget = 8192, 16 * 8192 * 6
    x, weight, target, _ = make("cpu", dtypes, vocab=vocab)
    x, weight = x.nan_to_num().requires_grad_(), weight.requires_grad_()
    threads = torch.get_num_threads()
    with LiveBytes(x, weight, target) as memory:
        logprobs = liger.fused_linear_logprobs(
            x, weight, target, logits_dtype=torch.float32, memory_budget=budget
        )
        forward = memory.peak
        logprobs.sum().backward()
    # Exponentials of the torch backend, and copies of the CPU's operands in float32, in blocks of 512 KiB per
    # thread.
    temporaries = 6 * threads * (1 << 19) + 8 * x.numel() * 4
    assert forward < budget + temporaries
    sums = weight.numel() * 4 if weight.dtype != torch.float32 else 0
    grads = x.grad.nbytes + weight.grad.nbytes
    assert memory.peak < grads + sums + budget + temporaries
    # All logits in float32 would not fit.
    assert ROWS * vocab * 4 > 2 * budget


def test_autocast_casts_nothing(device):
    dtypes = (torch.float16, torch.float32)
    x, weight, target, _ = make(device, dtypes)
    expected = plain(x, weight, target, None, torch.float64)[0]
    with torch.autocast(device.type, torch.bfloat16):
        found = liger.fused_linear_logprobs(x, weight, target, logits_dtype=torch.float32)
    assert difference(found, expected) < STATED


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_ignored_rows_are_left_out(monkeypatch, backward):
    """Products have the valid rows only."""
    x, weight, target, _ = make("cpu", (torch.float32,) * 2)
    target[:40] = -100
    x, weight = (t.requires_grad_() for t in (x.nan_to_num(), weight))
    rows = []

    def product(a, b, *rest, **how):
        rows.append(ROWS - 41 in (*a.shape, *b.shape))
        return float32_product(a, b, *rest, **how)

    logprobs = liger.fused_linear_logprobs(x, weight, target, logits_dtype=torch.float32)
    for module in ("math.float32_matmul", "head.float32"):
        monkeypatch.setattr(f"liger._core.{module}.float32_product", product)
    if backward:
        logprobs.sum().backward()
    else:
        liger.fused_linear_logprobs(x, weight, target, logits_dtype=torch.float32)
    assert rows and all(rows)


BAD = {
    "logits_dtype is float16, expected float32 or None": ({"logits_dtype": torch.float16}, {}),
    "logits_dtype is 'float32', expected a torch.dtype": ({"logits_dtype": "float32"}, {}),
    "input has dtype float64, expected float16, bfloat16 or float32 with": (
        {}, {"input": torch.float64, "weight": torch.float64},
    ),
    "weight has dtype bfloat16, expected float32 or the dtype of input, float16": (
        {}, {"input": torch.float16, "weight": torch.bfloat16},
    ),
    "weight has dtype float16, expected float32 or the dtype of input, float32": ({}, {"weight": torch.float16}),
    "bias has dtype float16, expected float32 or the dtype of input, bfloat16": (
        {}, {"input": torch.bfloat16, "bias": torch.float16},
    ),
    "weight has dtype float32, expected the dtype of input, bfloat16": (
        {"logits_dtype": None}, {"input": torch.bfloat16},
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    options, dtypes = BAD[message]
    x, weight, target, bias = make("cpu", (torch.float32,) * 2, bias=True)
    tensors = {"input": x, "weight": weight, "bias": bias}
    tensors = {name: t.to(dtypes.get(name, t.dtype)) for name, t in tensors.items()}
    error = TypeError if "torch.dtype" in message else error_about(message)
    with pytest.raises(error, match=f"fused_linear_logprobs: {message}"):
        liger.fused_linear_logprobs(**tensors, target=target, **{"logits_dtype": torch.float32, **options})


def test_bad_input_of_the_op():
    x, weight, target, _ = make("cpu", (torch.float32,) * 2)
    op = torch.ops.liger.fused_linear_logprobs_forward
    rest = (target, None, 1.0, -100, None, None, False, False)
    with pytest.raises(RuntimeError, match="logits_dtype is float16, expected float32 or None"):
        op(x, weight, *rest, logits_dtype=torch.float16)
    with pytest.raises(
        RuntimeError, match="weight has dtype bfloat16, expected float32 or the dtype of input, float32"
    ):
        op(x, weight.bfloat16(), *rest, logits_dtype=torch.float32)
    with pytest.raises(RuntimeError, match="input has dtype float64"):
        op(x.double(), weight.double(), *rest, logits_dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtypes", PAIRS, ids=names)
@pytest.mark.parametrize("hidden", [2048, 4096])
def test_stated_error_with_large_hidden_sizes(device, hidden, dtypes, options):
    """Tensor cores truncate long sums: in one GEMM the error would be 3e-5 to 7e-5. It grows with the logits,
    which are divided by the temperature."""
    rows = 1024 if device.type == "cuda" else 64
    x, weight, target, _ = make(device, dtypes, rows=rows, hidden=hidden, vocab=16384, std=2.5)
    options = OPTIONS[options]
    found = liger.fused_linear_logprobs(x, weight, target, logits_dtype=torch.float32, **options)
    exact = plain(x, weight, target, None, torch.float64, **options)[0]
    assert difference(found, exact) * min(options.get("temperature", 1.0), 1.0) < STATED
