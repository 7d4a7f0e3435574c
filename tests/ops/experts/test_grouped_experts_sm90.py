# SPDX-License-Identifier: BSD-3-Clause
"""grouped_experts on the grouped GEMMs of compute capability 9.0: on a GPU, and on the CPU with their ops in
plain torch, which have the schemas of csrc/experts/sm90. Which calls they serve, and what these save."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from live_bytes import LiveBytes
from test_grouped_experts import ROUTINGS, check, distinct, gated, gradients, make, plain, saved_bytes
from torch.fx.experimental.proxy_tensor import make_fx

import liger
from liger.ops.grouped_experts import sm90 as kernels
from liger.ops.grouped_experts.routing import Gate
from liger_bench import expert_kernels as bench

CSRC = Path(__file__).parents[3] / "csrc/experts/sm90"
GPT_OSS = {"activation": "gpt_oss", "is_transposed": True, "is_interleaved": True, "limit": 0.71}
FORMS = {"silu": {}, "gelu_tanh": {"activation": "gelu_tanh"}, "clamped": {"limit": 0.71}, "gpt_oss": GPT_OSS}
# (tokens, choices, experts, hidden, intermediate): experts with more rows than a tile and without rows,
# partial tiles of columns and of the summed dimension, one token, the maximum number of torch's kernel.
SIZES = [
    (700, 3, 5, 136, 104),
    (90, 2, 64, 64, 200),
    (1, 1, 1, 8, 8),
    (300, 4, 128, 264, 192),
    (64, 2, 1023, 64, 64),
]
HALVES = torch.bfloat16, torch.float16


@pytest.fixture(params=[math.inf, 0], ids=["gathering", "gathered"])
def gather_first(request, monkeypatch):
    """Kernels that gather rows, and kernels that load gathered ones."""
    monkeypatch.setattr(kernels, "GATHER_FIRST", request.param)


@pytest.fixture
def served(monkeypatch):
    """Whether the kernels have served the calls so far, forwards and backwards."""
    found, unsupported = [], kernels.unsupported

    def observed(a):
        reason = unsupported(a)
        found.append(reason is None)
        return reason

    monkeypatch.setattr(kernels, "unsupported", observed)
    return found


@pytest.fixture
def used(served):
    """At the end the kernels must have served every call."""
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
def test_routings(sm90, used, gather_first, routing, dtype, recompute):
    check_form(sm90, "silu", SIZES[0], dtype, routing, recompute=recompute)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_forms(sm90, used, gather_first, form, sizes, dtype):
    check_form(sm90, form, sizes, dtype)


@pytest.mark.gpu
def test_the_same_bits(sm90, used, gather_first):
    inputs = [t.requires_grad_() for t in make(sm90, torch.bfloat16, *SIZES[0])]
    index = distinct(*SIZES[0][:3]).to(sm90)

    def results():
        y = liger.grouped_experts(inputs[0], index, *inputs[1:])
        return y, *torch.autograd.grad(y.float().square().sum(), inputs)

    first = results()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("change", ["float32", "LIGER_WGMMA", "backend"])
def test_the_default_path(sm90, served, monkeypatch, change):
    """The same calls where the kernels do not serve them."""
    sizes, dtype = SIZES[0], torch.bfloat16
    if change == "float32":
        dtype = torch.float32
    elif change == "LIGER_WGMMA":
        monkeypatch.setenv("LIGER_WGMMA", "0")
    with liger.use_backend("triton" if change == "backend" else "cuda"):
        for form in FORMS:
            check_form(sm90, form, sizes, dtype, "sentinels")
    assert served and not any(served)


@pytest.mark.gpu
def test_an_invalid_variable(sm90, monkeypatch):
    monkeypatch.setenv("LIGER_WGMMA", "yes")
    with pytest.raises(RuntimeError, match="LIGER_WGMMA: expected 0 or 1, got 'yes'"):
        check_form(sm90, "silu", SIZES[0], torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_infinite_gradients(sm90, used, gather_first, form):
    """No element is negative, so the sums are infinite, not NaN."""
    options = FORMS[form]
    transposed = options.get("is_transposed", False)
    inputs = [t.abs() for t in make(sm90, torch.bfloat16, *SIZES[0], transposed=transposed)]
    index, upstream = distinct(*SIZES[0][:3]).to(sm90), torch.rand_like(inputs[0])
    upstream[::3, 5] = torch.inf
    found = gradients(inputs, index, upstream, **options)
    leaves = [t.float().requires_grad_() for t in inputs]
    y = plain(leaves[0], index, *leaves[1:], **options)
    expected = [y, *torch.autograd.grad(y, leaves, upstream.float())]
    assert expected[2].isinf().any()
    # Where gate and up are clamped, their gradients are 0 times infinity.
    for i in range(5) if form == "silu" else (0, 2):
        assert not found[i].isnan().any() and torch.equal(found[i].isinf(), expected[i].isinf())


# --- on the CPU ---------------------------------------------------------------------------------------------


def groups(ends):
    return list(enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False)))


def rows_between(source, tokens, begin, end):
    return source[begin:end] if tokens is None else source[tokens[begin:end]]


def gate_up(x, tokens, ends, weight, bias, activation, is_interleaved, alpha, limit, kept, product):
    for e, (begin, end) in groups(ends):
        matrix = weight[e] if is_interleaved else weight[e].t()
        both = rows_between(x, tokens, begin, end).float() @ matrix.float()
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
        grad = rows_between(grad_y, tokens, begin, end).float() @ matrix.float()
        wide, weight = both[begin:end].float(), weights.view(-1, 1)[begin:end]
        value = gated(wide, activation, is_interleaved, alpha, limit)
        product[begin:end] = weight * value
        sums[0, begin:end] = (value * grad).sum(-1)
        Gate(activation, is_interleaved, alpha, limit).backward_(weight * grad, wide)
        both[begin:end] = wide


def grad_matrix(a, tokens, b, ends, is_transposed, out):
    for e, (begin, end) in groups(ends):
        result = rows_between(a, tokens, begin, end).float().t() @ b[begin:end].float()
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
def test_calls(in_torch, used, gather_first, routing, form, dtype, recompute):
    check_form(torch.device("cpu"), form, (13, 3, 5, 16, 24), dtype, routing, recompute=recompute)


# Bounds of the errors of y and of the gradients of x, routing weights, gate_up_proj and down_proj, relative
# to the error of float32 that is rounded once: gate and up, the product and the rows are rounded, too, and
# the default path rounds inputs and results of each activation.
RATIOS = {"kernels": (1.8, 2.15, 1.75, 1.9, 2.2), "default": (2.45, 2.6, 2.4, 2.4, 2.45)}


@pytest.mark.parametrize("path", RATIOS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("form", bench.FORMS)
@pytest.mark.parametrize("routing", ["distinct", "one expert", "sentinels"])
def test_errors_relative_to_one_rounding(in_torch, monkeypatch, routing, form, dtype, path):
    monkeypatch.setattr(kernels, "has_kernels", lambda x: path == "kernels")
    torch.manual_seed(1)
    inputs = bench.random_case((256, 8, 16, 256, 192), routing, form, dtype, "cpu")
    found, options = bench.results(inputs, bench.FORMS[form], path), bench.FORMS[form]
    exact, wide = (bench.reference(inputs, options, t) for t in (torch.float64, torch.float32))
    ratios = [error / rounded for error, _, rounded in bench.errors_of(found, found, wide, exact).values()]
    assert all(ratio <= bound for ratio, bound in zip(ratios, RATIOS[path], strict=True)), ratios


def misaligned(tensor):
    if not tensor.is_floating_point():
        return tensor
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


def test_hooks_on_saved_tensors(in_torch, used, monkeypatch):
    """What they return is copied if it is not aligned. (Weights that are not take the default path.)"""
    inputs, index = make("cpu", torch.bfloat16), distinct(13, 3, 5)
    upstream, weights = torch.randn_like(inputs[0]), inputs[2:]
    expected = gradients(inputs, index, upstream)
    op, seen = torch.ops.liger_sm90.experts_grad_product.default, []

    def checked(*args):
        seen.extend(args[i] for i in (0, 3, 9))
        return op(*args)

    monkeypatch.setattr(torch.ops.liger_sm90.experts_grad_product, "default", checked)
    shapes = [t.shape for t in weights]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t if t.shape in shapes else misaligned(t)
    ):
        found = gradients(inputs, index, misaligned(upstream))
    assert len(seen) == 3 and not any(t.data_ptr() % 16 for t in seen)
    assert all(map(torch.equal, found, expected))


class Experts(torch.nn.Module):
    def forward(self, x, index, *rest):
        return liger.grouped_experts(x, index, *rest)


PROGRAMS = {
    "compile": lambda experts, given: torch.compile(experts, backend="aot_eager", fullgraph=True),
    "export": lambda experts, given: torch.export.export(experts, given).module(),
    "make_fx": lambda experts, given: make_fx(experts)(*given),
}


@pytest.mark.parametrize("made_with", ["kernels", "default"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_decide_in_each_call(in_torch, served, monkeypatch, program, made_with):
    """Also in the backward; a program has the op, whichever path the call took that it was made with."""
    x, *rest = [t.requires_grad_() for t in make("cpu", torch.bfloat16)]
    given = (x, distinct(13, 3, 5), *rest)
    monkeypatch.setattr(kernels, "has_kernels", lambda x: made_with == "kernels")
    called = PROGRAMS[program](Experts(), given)
    torch.autograd.grad(called(*given).sum(), [x, *rest])
    for path in ("kernels", "default"):
        monkeypatch.setattr(kernels, "has_kernels", lambda x, path=path: path == "kernels")
        served.clear()
        torch.autograd.grad(called(*given).sum(), [x, *rest])
        assert served == [path == "kernels"] * 2


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_memory(in_torch, used, gather_first, monkeypatch, recompute):
    """Saved: what the default path saves. The backward adds as many bytes as results, the larger ones of
    product and rows of the gradient of x, and small ones per slot; also rows of grad_y that are gathered
    first."""
    tokens, _, _, hidden, intermediate = sizes = 1500, 2, 3, 64, 256
    inputs = [t.requires_grad_() for t in make("cpu", torch.bfloat16, *sizes)]
    index, upstream = distinct(*sizes[:3]), torch.randn(tokens, hidden, dtype=torch.bfloat16)

    def call():
        return liger.grouped_experts(inputs[0], index, *inputs[1:], recompute=recompute)

    rows, size = index.numel() + 1, inputs[0].element_size()
    gate_up = rows * 2 * intermediate * size
    kept = 0 if recompute else gate_up
    assert saved_bytes(call, *inputs, index) == kept
    y = call()
    # Kept gate and up appear in the backward as a tensor of it, too.
    with LiveBytes(*inputs, index, upstream) as live:
        grads = torch.autograd.grad(y, inputs, upstream)
    of_results = sum(t.nbytes for t in grads)
    others = max(intermediate, hidden) + (hidden if kernels.GATHER_FIRST == 0 else 0)
    assert live.peak <= of_results + gate_up + rows * others * size + 100 * rows
    monkeypatch.setattr(kernels, "unsupported", lambda a: "the default path is compared")
    assert saved_bytes(call, *inputs, index) == kept


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


def test_a_cpu_has_no_kernels():
    assert "no such kernels" in kernels.unsupported(arguments())
