# SPDX-License-Identifier: BSD-3-Clause
"""grouped_experts on the grouped GEMMs of compute capability 9.0: on a GPU, and on the CPU with their ops in
plain torch, which have the schemas of csrc/experts/sm90."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_grouped_experts import ROUTINGS, check, distinct, gated, make

import liger
from liger.ops.grouped_experts import sm90 as kernels

CSRC = Path(__file__).parents[3] / "csrc/experts/sm90"
GPT_OSS = {"activation": "gpt_oss", "is_transposed": True, "is_interleaved": True, "limit": 0.71}
FORMS = {"silu": {}, "gelu_tanh": {"activation": "gelu_tanh"}, "clamped": {"limit": 0.71}, "gpt_oss": GPT_OSS}
# (tokens, choices, experts, hidden, intermediate): experts with more rows than a tile and without rows,
# partial tiles of columns and of the summed dimension, one token.
SIZES = [(700, 3, 5, 136, 104), (90, 2, 64, 64, 200), (1, 1, 1, 8, 8), (300, 4, 128, 264, 192)]
HALVES = torch.bfloat16, torch.float16


@pytest.fixture
def used(monkeypatch):
    """Forces the kernels; at the end they must have served every call."""
    served, serves = [], kernels.serves
    monkeypatch.setattr(kernels, "serves", lambda a: served.append(serves(a)) or served[-1])
    with kernels.forced():
        yield
    assert served and all(served)


def check_form(device, form, sizes, dtype, routing="distinct", **options):
    index = ROUTINGS[routing](*sizes[:3]).to(device)
    transposed = FORMS[form].get("is_transposed", False)
    biased = form in ("gpt_oss", "clamped")
    # The gradient of a single routing weight is one number, of terms that cancel.
    draws = [
        make(device, dtype, *sizes, biased=biased, transposed=transposed)
        for _ in range(16 if index.numel() == 1 else 1)
    ]
    if biased:
        # Gate and up are multiples of 1/64, which are exact near the limit: no rounding moves one across it.
        for inputs in draws:
            for i, unit in ((0, 2), (2, 32), (4, 2)):
                inputs[i] = (unit * inputs[i]).round() / unit
    check(index, *draws, **FORMS[form], **options)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("routing", [name for name in ROUTINGS if name != "sentinels alone"])
def test_routings(sm90, used, routing, dtype, recompute):
    check_form(sm90, "silu", SIZES[0], dtype, routing, recompute=recompute)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_forms(sm90, used, form, sizes, dtype):
    check_form(sm90, form, sizes, dtype)


@pytest.mark.gpu
def test_the_same_bits(sm90, used):
    inputs = [t.requires_grad_() for t in make(sm90, torch.bfloat16, *SIZES[0])]
    index = distinct(*SIZES[0][:3]).to(sm90)

    def results():
        y = liger.grouped_experts(inputs[0], index, *inputs[1:])
        return y, *torch.autograd.grad(y.float().square().sum(), inputs)

    first = results()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))


# --- on the CPU ---------------------------------------------------------------------------------------------


def groups(ends):
    return list(enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False)))


def gate_up(x, tokens, ends, weight, bias, activation, is_interleaved, alpha, limit, kept, product):
    for e, (begin, end) in groups(ends):
        matrix = weight[e] if is_interleaved else weight[e].t()
        both = x[tokens[begin:end]].float() @ matrix.float()
        both = both if bias is None else both + bias[e]
        if len(kept):
            kept[begin:end] = both
        product[begin:end] = gated(both, activation, is_interleaved, alpha, limit)


def rows(inputs, ends, matrices, k_first, bias, weights, out):
    out.fill_(float("nan"))
    for e, (begin, end) in groups(ends):
        result = inputs[begin:end].float() @ (matrices[e] if k_first else matrices[e].t()).float()
        result = result if bias is None else result + bias[e]
        out[begin:end] = result if weights is None else result * weights.view(-1, 1)[begin:end]


def sum_choices(inputs, inverse, out):
    chosen = inputs[inverse].float().masked_fill_((inverse == len(inputs) - 1)[..., None], 0)
    out.copy_(chosen.sum(1))


def grad_product(
    grad_y, tokens, ends, down, activation, is_interleaved, alpha, limit, weights, both, product, sums
):
    sums.zero_()
    for e, (begin, end) in groups(ends):
        matrix = down[e].t() if is_interleaved else down[e]
        grad = grad_y[tokens[begin:end]].float() @ matrix.float()
        with torch.enable_grad():
            leaf = both[begin:end].float().requires_grad_()
            value = gated(leaf, activation, is_interleaved, alpha, limit)
        weight = weights.view(-1, 1)[begin:end]
        both[begin:end] = torch.autograd.grad(value, leaf, weight * grad)[0]
        product[begin:end] = weight * value.detach()
        sums[0, begin:end] = (value.detach() * grad).sum(-1)


def grad_matrix(a, tokens, b, ends, is_transposed, out):
    for e, (begin, end) in groups(ends):
        result = a[tokens[begin:end]].float().t() @ b[begin:end].float()
        out[e] = result.t() if is_transposed else result


IN_TORCH = {
    "experts_gate_up": gate_up, "experts_rows": rows, "experts_sum": sum_choices,
    "experts_grad_product": grad_product, "experts_grad_matrix": grad_matrix,
}  # fmt: skip


@pytest.fixture
def in_torch(monkeypatch):
    """The ops of the kernels for CPU tensors."""
    if not CSRC.is_dir():
        pytest.skip("not a checkout")
    text = (CSRC / "forward.cu").read_text() + (CSRC / "backward.cu").read_text()
    schemas = {s.partition("(")[0]: s for s in re.findall(r'm\.def\("(.*?)"\)', text)}
    assert schemas.keys() == {*IN_TORCH, "takes_experts"}
    library = torch.library.Library("liger_sm90", "FRAGMENT")
    for name, function in IN_TORCH.items():
        if not hasattr(torch.ops.liger_sm90, name):
            library.define(schemas[name])
        library.impl(name, function, "CPU")
    monkeypatch.setattr(kernels, "has_kernels", lambda x: True)
    yield
    library._destroy()
    for name in IN_TORCH:
        torch.ops.liger_sm90.__dict__.pop(name, None)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("routing", ["distinct", "sentinels", "one expert"])
def test_calls(in_torch, used, routing, form, dtype, recompute):
    check_form(torch.device("cpu"), form, (13, 3, 5, 16, 24), dtype, routing, recompute=recompute)


def arguments(**changed):
    x, weights, gate_up_proj, down_proj = make("cpu", torch.bfloat16)
    given = dict(
        x=x, top_k_index=torch.zeros(13, 3, dtype=torch.int64), top_k_weights=weights, gate_up_proj=gate_up_proj,
        down_proj=down_proj, activation="silu", is_transposed=False, is_interleaved=False,
    )  # fmt: skip
    return SimpleNamespace(**given | changed)


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"x": torch.zeros(13, 16)}, "x has dtype torch.float32"),
        ({"top_k_weights": torch.zeros(13, 3, dtype=torch.float64)}, "top_k_weights has dtype"),
        ({"activation": "gelu"}, "'gelu'"),
        ({"is_interleaved": True}, "is_interleaved"),
        ({"down_proj": torch.zeros(5, 16, 20)}, "intermediate size 20"),
        ({"down_proj": torch.zeros(1025, 16, 24)}, "1025 experts"),
        ({"top_k_index": torch.zeros(0, 3)}, "0 elements"),
        ({"down_proj": torch.zeros(5, 24, 16).transpose(1, 2)}, "down_proj is not contiguous"),
    ],
)
def test_what_the_kernels_do_not_take(monkeypatch, changed, words):
    monkeypatch.setattr(kernels, "has_kernels", lambda x: True)
    assert kernels.unsupported(arguments()) is None
    assert words in kernels.unsupported(arguments(**changed))


def test_a_cpu_has_no_kernels_and_nothing_is_forced():
    assert "no such kernels" in kernels.unsupported(arguments())
    assert not kernels.serves(arguments())
