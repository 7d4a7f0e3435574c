# SPDX-License-Identifier: BSD-3-Clause
"""lora_a, lora_b and lora_scale of fused_linear_ce and fused_linear_logprobs, against plain torch in
float64."""

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, assert_as_exact_as_torch
from cross_entropy_reference import reference
from cuda_graphs import capture
from errors import error_about
from live_bytes import LiveBytes
from torch.nn.functional import linear

import liger
from liger._core.head import chunks, lm_head
from liger._core.math import computed_rows

ROWS, HIDDEN, VOCAB, RANK, SCALE = 23, 16, 37, 4, 0.7
BUDGETS = {"chunks": 3 * 40 * 4, "whole": None}
NAMES = ("hidden", "weight", "bias", "lora_a", "lora_b")


def make(device, dtype=torch.float32, factors=None):
    """(hidden, weight, bias, lora_a, lora_b), target. The term is as large as the product with the weight."""
    shapes = ((ROWS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,), (RANK, HIDDEN), (VOCAB, RANK))
    scales = 1.0, 0.5, 1.0, 0.5, 0.5
    tensors = [torch.randn(shape, device=device) * s for shape, s in zip(shapes, scales, strict=True)]
    tensors = [t.to(dtype) for t in tensors[:3]] + [t.to(factors or dtype) for t in tensors[3:]]
    target = torch.randint(VOCAB, (ROWS,), device=device)
    target[3] = target[-1] = -100
    return tensors, target


def leaves(tensors, dtype=None, trained=(True,) * 5):
    return [
        t.detach().to(dtype or t.dtype).clone().requires_grad_(want)
        for t, want in zip(tensors, trained, strict=True)
    ]


def plain_logits(x, weight, bias, lora_a, lora_b):
    """As PEFT computes them: the factors in the dtype of x."""
    down = SCALE * linear(x, lora_a.to(x.dtype))
    return linear(x, weight, bias) + linear(down, lora_b.to(x.dtype))


def given(tensors):
    x, weight, bias, lora_a, lora_b = tensors
    return (x, weight), {"bias": bias, "lora_a": lora_a, "lora_b": lora_b, "lora_scale": SCALE}


def assert_all_exact(results, names):
    single = torch.finfo(torch.float32).eps
    for name, mine, torchs, exact in zip(names, *results, strict=True):
        # Three roundings of logits up to about 8 in the reference, two here. The reference's may cancel by
        # chance in a mean over rows, which has a quarter of one rounding.
        mean = torch.finfo(results[0][1].dtype).eps / single / 4 if mine.ndim == 0 else 0.0
        assert_as_exact_as_torch(mine, torchs, exact.detach(), name, intermediate=8.0 + mean)


# --- fused_linear_ce ----------------------------------------------------------------------------------------


def ce_options(device):
    return {
        "plain": {},
        "softcap": {"softcap": 3.0},
        "smoothing and z-loss": {"label_smoothing": 0.1, "lse_square_scale": 1e-2},
        "weights": {
            "ce_weight": torch.rand(VOCAB, device=device) + 0.1,
            "token_weight": torch.rand(ROWS, device=device) + 0.1,
        },
        "denominator": {"denominator": torch.tensor(7.0, device=device), "reduction": "sum"},
        "none": {"reduction": "none", "softcap": 3.0},
    }


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("options", ce_options("cpu"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ce_against_float64(device, dtype, options, budget):
    options = ce_options(device)[options]
    tensors, target = make(device, dtype)
    results = []
    for wide in (None, None, torch.float64):
        inputs = leaves(tensors, wide)
        if not results:
            positional, keywords = given(inputs)
            loss = liger.fused_linear_ce(
                *positional, target, **keywords, **options, memory_budget=BUDGETS[budget]
            )
        else:
            loss = reference(plain_logits(*inputs), target, **options)["loss"]
        upstream = torch.linspace(0.5, 2, max(loss.numel(), 1), device=device).view(loss.shape).to(loss.dtype)
        results.append([loss.detach(), *torch.autograd.grad(loss, inputs, upstream)])
    assert_all_exact(results, ("loss", *NAMES))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_ce_metrics(device, reduction):
    tensors, target = make(device)
    positional, keywords = given(tensors)
    names = ("z_loss", "token_accuracy", "argmax", "logprobs", "entropy")
    out = liger.fused_linear_ce(
        *positional, target, **keywords, reduction=reduction, lse_square_scale=1e-2, memory_budget=480,
        metrics=names,
    )  # fmt: skip
    other = liger.cross_entropy(
        plain_logits(*tensors), target, reduction=reduction, lse_square_scale=1e-2,
        metrics=names,
    )  # fmt: skip
    for name, mine, expected in zip(out._fields, out, other, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


# --- fused_linear_logprobs ----------------------------------------------------------------------------------


def plain_logprobs(inputs, target, temperature=1.0, softcap=None):
    """(log-probabilities, entropies, argmax, log_sum_sq_probs, mean_logits)"""
    z = plain_logits(*inputs)
    z = z if z.dtype == torch.float64 else z.float()
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    z = z / temperature
    logp, live = z.log_softmax(-1), target != -100
    chosen = logp.gather(1, target.clamp_min(0)[:, None])[:, 0]
    per_row = chosen, -(logp.exp() * logp).sum(-1), (2 * logp).logsumexp(-1), z.mean(-1)
    chosen, entropy, squares, means = (t.where(live, 0.0) for t in per_row)
    return chosen, entropy, logp.argmax(-1).where(live, -1), squares, means


EVERYTHING = {"metrics": ("entropy", "argmax", "log_sum_sq_probs", "mean_logits")}


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7, "softcap": 3.0}, {"logits_dtype": torch.float32}],
    ids=["plain", "softcap", "float32"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logprobs_against_float64(device, dtype, options, budget):
    tensors, target = make(device, dtype)
    plain = {name: value for name, value in options.items() if name != "logits_dtype"}
    ramp = torch.linspace(-1, 2, ROWS, device=device)
    results = []
    for wide in (None, None, torch.float64):
        inputs = leaves(tensors, wide)
        if not results:
            positional, keywords = given(inputs)
            out = liger.fused_linear_logprobs(
                *positional, target, **keywords, **options, **EVERYTHING, memory_budget=BUDGETS[budget]
            )
            assert out.argmax.dtype == torch.int64 and not out.mean_logits.requires_grad
        else:
            out = plain_logprobs(inputs, target, **plain)
        total = (out[0] * ramp).sum() + (out[1] * ramp.flip(0)).sum()
        values = [t.detach() for i, t in enumerate(out) if i != 2]
        results.append([*values, *torch.autograd.grad(total, inputs)])
    assert_all_exact(results, ("logprobs", "entropy", "squares", "means", *NAMES))
    if "logits_dtype" in options:
        for mine, exact in zip(results[0][:4], results[2][:4], strict=True):
            assert (mine - exact).abs().max() < 1e-5


# --- both ---------------------------------------------------------------------------------------------------


def ce(x, weight, target, **keywords):
    return liger.fused_linear_ce(x, weight, target, **keywords)


def summed_logprobs(x, weight, target, **keywords):
    return liger.fused_linear_logprobs(x, weight, target, **keywords).sum()


BOTH = pytest.mark.parametrize("function", [ce, summed_logprobs])


@BOTH
def test_factors_in_float32_with_hidden_states_in_bfloat16(device, function):
    """As PEFT has them: they are rounded for the products, and their gradients are float32."""
    tensors, target = make(device, torch.bfloat16, torch.float32)
    inputs = leaves(tensors)
    positional, keywords = given(inputs)
    grads = torch.autograd.grad(function(*positional, target, **keywords), inputs)
    assert [g.dtype for g in grads] == [t.dtype for t in tensors]
    rounded = leaves([t.bfloat16() for t in tensors])
    positional, keywords = given(rounded)
    others = torch.autograd.grad(function(*positional, target, **keywords), rounded)
    for mine, other in zip(grads[3:], others[3:], strict=True):
        assert torch.equal(mine.bfloat16(), other) and not torch.equal(mine, other.float())


def test_ignored_rows_have_no_products(monkeypatch):
    rows, write = [], lm_head.write_linear
    monkeypatch.setattr(lm_head, "write_linear", lambda x, *rest: rows.append(len(x)) or write(x, *rest))
    tensors, target = make("cpu")
    target[4:] = -100
    positional, keywords = given(tensors)
    liger.fused_linear_ce(*positional, target, **keywords)
    assert rows == [3]


def test_autocast(device):
    """Hidden states and weight are cast as by a linear layer, the factors with them."""
    tensors, target = make(device)
    positional, keywords = given(leaves(tensors))
    with torch.autocast(device.type, torch.bfloat16):
        loss = liger.fused_linear_ce(*positional, target, **keywords)
    narrow, others = given([t.bfloat16() for t in tensors])
    assert torch.equal(loss, liger.fused_linear_ce(*narrow, target, **others))
    loss.backward()
    assert keywords["lora_a"].grad.dtype == torch.float32


@BOTH
def test_memory_of_a_frozen_weight(function):
    """Nothing of the size of the weight or of all logits is allocated, neither in the forward nor in the
    backward."""
    rows, hidden, vocab, rank = 256, 64, 20000, 4
    x, lora_a = torch.randn(rows, hidden, requires_grad=True), torch.randn(rank, hidden, requires_grad=True)
    weight, lora_b = torch.randn(vocab, hidden), torch.randn(vocab, rank, requires_grad=True)
    target = torch.randint(vocab, (rows,))
    budget = 16 * vocab * 4
    with LiveBytes(x, lora_a, weight, lora_b, target) as memory:
        function(x, weight, target, lora_a=lora_a, lora_b=lora_b, memory_budget=budget).backward()
    assert memory.peak < 2 * budget + 4 * lora_b.nbytes < weight.nbytes


BAD = {
    "lora_a is None, expected a tensor with lora_b": {"lora_a": None},
    "lora_b is None, expected a tensor with lora_a": {"lora_b": None},
    r"lora_b has shape \(37, 3\)|lora_a has shape \(4, 16\)": {"lora_b": torch.randn(VOCAB, 3)},
    r"lora_b has shape \(36, 4\), expected \(vocab, r\)": {"lora_b": torch.randn(VOCAB - 1, RANK)},
    r"lora_b has shape \(37, 0\)": {"lora_b": torch.randn(VOCAB, 0)},
    r"lora_a has shape \(4, 15\), expected \(r, hidden\), \(4, 16\)": {"lora_a": torch.randn(RANK, 15)},
    "lora_a has dtype int64": {"lora_a": torch.ones(RANK, HIDDEN, dtype=torch.int64)},
    "lora_scale is inf, expected a finite value": {"lora_scale": float("inf")},
    "accumulate_grad_weight is True, expected False with lora_a": {"accumulate_grad_weight": True},
}


@BOTH
@pytest.mark.parametrize("message", BAD)
def test_bad_input(function, message):
    tensors, target = make("cpu")
    positional, keywords = given(tensors)
    name = "fused_linear_ce" if function is ce else "fused_linear_logprobs"
    with pytest.raises(error_about(message), match=f"{name}: ({message})"):
        function(*positional, target, **{**keywords, **BAD[message]})


def test_bad_input_of_the_logprobs_and_of_the_op():
    tensors, target = make("cpu")
    (x, weight), keywords = given(tensors)
    with pytest.raises(ValueError, match="recompute is False, expected None or True with lora_a and lora_b"):
        liger.fused_linear_logprobs(x, weight, target, **keywords, recompute=False)
    op, rest = torch.ops.liger.fused_linear_logprobs_lora_forward, (1.0, 1.0, -100, None, None, False, False)
    down = torch.randn(ROWS, RANK)
    for a, given_down, message in (
        (None, None, "expected either lora_a or down, got none"),
        (tensors[3], down, "expected either lora_a or down, got both"),
        (None, down[1:], r"down has shape \(22, 4\)"),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(x, weight, target, None, a, tensors[4], given_down, *rest)


def test_zero_factors_change_nothing(device):
    """As in a fresh adapter, whose B is zero: the loss is the layer's alone, and B has a gradient."""
    tensors, target = make(device)
    tensors[4].zero_()
    inputs = leaves(tensors)
    positional, keywords = given(inputs)
    loss = liger.fused_linear_ce(*positional, target, **keywords)
    torch.testing.assert_close(loss, F.cross_entropy(linear(*positional, keywords["bias"]), target))
    *_, grad_a, grad_b = torch.autograd.grad(loss, inputs)
    assert not grad_a.any() and grad_b.any()


@BOTH
def test_all_rows_are_computed_under_capture(device, function, monkeypatch):
    """A CUDA graph has no number of valid rows: results are the same, and NaN in ignored rows affects
    nothing."""
    tensors, target = make(device)
    target[5:12] = -100
    results = []
    for skip in (True, False):
        monkeypatch.setattr(
            chunks,
            "computed_rows",
            lambda target, ignore_index, skip, chosen=skip: computed_rows.computed_rows(
                target, ignore_index, chosen
            ),
        )
        inputs = leaves(tensors)
        with torch.no_grad():
            inputs[0][target == -100] = torch.nan
        positional, keywords = given(inputs)
        total = function(*positional, target, **keywords, memory_budget=480)
        results.append([total.detach(), *torch.autograd.grad(total, inputs)])
    for mine, other in zip(*results, strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True], ids=["", "graph"])
@BOTH
def test_sizes_of_a_model(device, function, graph):
    """Several chunks, tensor cores, a rank that PEFT's users take; alone and as a CUDA graph."""
    if device.type != "cuda":
        pytest.skip("sizes for a GPU")
    rows, hidden, vocab, rank = 2048, 512, 8200, 16
    x, weight = (
        torch.randn(rows, hidden, device=device),
        torch.randn(vocab, hidden, device=device) / hidden**0.5,
    )
    lora_a, lora_b = (torch.randn(s, device=device) / 8 for s in ((rank, hidden), (vocab, rank)))
    narrow = leaves([t.bfloat16() for t in (x, weight, lora_a, lora_b)], trained=(True,) * 4)
    target = torch.randint(vocab, (rows,), device=device)
    target[::3] = -100

    def grads(x, weight, lora_a, lora_b):
        factors = {"lora_a": lora_a, "lora_b": lora_b, "lora_scale": SCALE}
        total = function(x, weight, target, **factors, memory_budget=700 * vocab * 2)
        return torch.autograd.grad(total, (x, weight, lora_a, lora_b))

    if graph:
        captured, found = capture(lambda: grads(*narrow))
        captured.replay()
    else:
        found = grads(*narrow)
    exact = leaves(narrow, torch.float64, (True,) * 4)
    logits = linear(exact[0], exact[1]) + SCALE * linear(linear(exact[0], exact[2]), exact[3])
    total = F.cross_entropy(logits, target, reduction="mean" if function is ce else "sum")
    wanted = torch.autograd.grad(total if function is ce else -total, exact)
    for mine, other in zip(found, wanted, strict=True):
        # Logits of a standard deviation of 2 are rounded to bfloat16.
        assert ((mine.double() - other).norm() / other.norm()).item() < 2e-2
