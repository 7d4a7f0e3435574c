# SPDX-License-Identifier: BSD-3-Clause
"""swiglu and geglu, separate and packed, against float64, and their in-place backward, in every backend that
runs."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, assert_as_exact_as_torch, check_op

import liger

# One and several blocks of 128 threads with a 16-byte vector each; columns of no whole vectors (129, 20001)
# or of none in half types only (4100).
SHAPES = [(8,), (1, 1), (5, 64), (2, 3, 129), (7, 1000), (3, 4100), (300, 256), (2, 2, 2, 6), (1, 20001)]
# family -> (public functions' options, activation in plain torch)
FAMILIES = {
    "swiglu": ({}, F.silu),
    "geglu": ({"approximate": "none"}, F.gelu),
    "geglu_tanh": ({"approximate": "tanh"}, partial(F.gelu, approximate="tanh")),
}
NAMES = [family + form for family in FAMILIES for form in ("", "_packed")]


def is_packed(name):
    return name.endswith("_packed")


def op_name(name):
    """The op that a name of NAMES stands for."""
    return name.replace("_tanh", "")


def options_of(name):
    return FAMILIES[name.removesuffix("_packed")][0]


def function_of(name):
    return partial(getattr(liger, op_name(name)), **options_of(name))


def plain_of(name):
    activation = FAMILIES[name.removesuffix("_packed")][1]

    def plain(*tensors):
        gate, up = tensors[0].chunk(2, -1) if is_packed(name) else tensors
        return activation(gate) * up

    return plain


def op_of(name, suffix):
    """An op of the family, such as ``"_backward"``, with its options."""
    return partial(getattr(torch.ops.liger, op_name(name) + suffix), **options_of(name))


def make(device, name="swiglu", shape=(6, 40), dtype=torch.float32):
    """The inputs of one op: [gate, up], or [gate_up] with both side by side."""
    parts = [torch.randn(shape, device=device, dtype=dtype) * 3 for _ in range(2)]
    return [torch.cat(parts, -1)] if is_packed(name) else parts


def leaves(*tensors):
    return [t.detach().requires_grad_() for t in tensors]


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture(params=FAMILIES)
def family(request):
    """The form of two tensors alone."""
    return request.param


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(device, name, shape, dtype):
    check_op(function_of(name), plain_of(name), make(device, name, shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_magnitudes(device, name, dtype):
    """No overflow in exp, and a gradient of the sigmoid that is exactly 0 or 1 far from the origin."""
    gate = torch.tensor(
        [-3e4, -200.0, -90.0, -30.0, -0.0, 0.0, 30.0, 90.0, 200.0, 3e4], device=device, dtype=dtype
    )
    up = torch.ones_like(gate)
    inputs = [torch.cat([gate, up])] if is_packed(name) else [gate, up]
    check_op(function_of(name), plain_of(name), inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_of_the_backward(device, name, dtype):
    inputs = make(device, name, (7, 130), dtype)
    output = function_of(name)(*inputs)
    backward = op_of(name, "_backward")
    *grads, product = backward(torch.ones_like(output), *inputs, True)
    exact = plain_of(name)(*(t.double() for t in inputs))
    assert_as_exact_as_torch(product, plain_of(name)(*inputs), exact, "product")
    *others, nothing = backward(torch.ones_like(output), *inputs)
    assert nothing.numel() == 0
    for a, b in zip(grads, others, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_over_its_arguments_with_the_product(device, family, dtype):
    """Whole tensors, and the halves of a packed one: gradients over gate and up, the product over
    grad_out."""
    for gate, up in (make(device, dtype=dtype), torch.randn(6, 80, device=device).to(dtype).chunk(2, -1)):
        grad_out = torch.randn(6, 40, device=device).to(dtype)
        *grads, product = op_of(family, "_backward")(grad_out, gate, up, True)
        op_of(family, "_backward_product_")(grad_out, gate, up)
        assert all(torch.equal(a, b) for a, b in zip((gate, up, grad_out), (*grads, product), strict=True))


# --- inplace=True -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 129), (3, 4100)], ids=str)
def test_inplace_gives_the_same_gradients(device, name, shape, dtype):
    inputs = make(device, name, shape, dtype)
    results = []
    for inplace in (False, True):
        start = leaves(*inputs)
        output = function_of(name)(*(t * 1 for t in start), inplace=inplace)
        results.append([output, *torch.autograd.grad(output, start, torch.ones_like(output))])
    for functional, written in zip(*results, strict=True):
        assert torch.equal(functional, written)


def test_inplace_gradients_lie_over_the_inputs(device, name):
    start = leaves(*make(device, name))
    middle = [t * 1 for t in start]
    places = []
    for tensor in middle:
        tensor.register_hook(lambda grad: places.append(grad.data_ptr()))
    function_of(name)(*middle, inplace=True).sum().backward()
    assert sorted(places) == sorted(t.data_ptr() for t in middle)
    assert all(t._version > 0 for t in middle)
    assert all(t._version == 0 for t in start)


def test_inplace_and_another_use_of_the_input_raises(device, name):
    """The other use saved what the in-place backward has overwritten: torch must notice."""
    start = leaves(*make(device, name))
    middle = [t * 1 for t in start]
    other = middle[0].square().sum()
    function_of(name)(*middle, inplace=True).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_inplace_twice_on_the_same_input_raises(device, name):
    start = leaves(*make(device, name))
    middle = [t * 1 for t in start]
    total = sum(function_of(name)(*middle, inplace=True).sum() for _ in range(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_inplace_second_backward_raises(device, name):
    start = leaves(*make(device, name))
    output = function_of(name)(*(t * 1 for t in start), inplace=True).sum()
    output.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        output.backward()


@pytest.mark.parametrize("keep", [{"retain_graph": True}, {"create_graph": True}], ids=["retain", "create"])
def test_inplace_with_a_kept_graph_writes_nothing(device, name, keep):
    start = leaves(*make(device, name))
    middle = [t * 1 for t in start]
    kept = [t.detach().clone() for t in middle]
    output = function_of(name)(*middle, inplace=True).square().sum()
    first = torch.autograd.grad(output, start, **keep)
    assert all(torch.equal(now, before) for now, before in zip(middle, kept, strict=True))
    second = torch.autograd.grad(output, start)
    expected = torch.autograd.grad(function_of(name)(*start).square().sum(), start)
    for grads in (first, second):
        assert all(torch.equal(got, want) for got, want in zip(grads, expected, strict=True))


def test_inplace_over_a_leaf_raises(device, name):
    inputs = leaves(*make(device, name))
    first = "gate_up" if is_packed(name) else "gate"
    with pytest.raises(RuntimeError, match=f"^{op_name(name)}: {first} is a leaf that requires grad"):
        function_of(name)(*inputs, inplace=True)
    with pytest.raises(RuntimeError, match=f"^{op_name(name)}: {first} is a leaf that requires grad"):
        function_of(name)(*(t[:3] for t in inputs), inplace=True)
    with torch.no_grad():
        assert torch.equal(function_of(name)(*inputs, inplace=True), function_of(name)(*inputs))


@pytest.mark.parametrize(
    "share",
    [
        lambda t: (t, t),
        lambda t: t.chunk(2, -1),
        lambda t: (t[..., :-1], t[..., 1:]),
        lambda t: (t[:1].expand(6, -1), t * 2),
        lambda t: (t.flatten().unfold(0, 40, 20)[:6], t * 2),
    ],
    ids=["same", "chunks", "shifted", "expanded", "windows"],
)
def test_inplace_leaves_shared_memory_alone(device, family, share):
    """One write would disturb another there, so the functional form runs."""
    x = make(device)[0]
    grads = []
    for inplace in (False, True):
        (start,) = leaves(x)
        middle = share(start * 1)
        function_of(family)(*middle, inplace=inplace).square().sum().backward()
        grads.append(start.grad)
        assert all(t._version == 0 for t in middle)
    assert torch.equal(*grads)


def test_inplace_has_no_effect_in_compiled_code(device, name):
    start = leaves(*make(device, name))
    kept = [t.detach().clone() for t in start]
    function = torch.compile(
        lambda *t: function_of(name)(*t, inplace=True), backend="aot_eager", fullgraph=True
    )
    middle = [t * 1 for t in start]
    output = function(*middle)
    grads = torch.autograd.grad(output.square().sum(), start, retain_graph=True)
    expected = torch.autograd.grad(function_of(name)(*start).square().sum(), start)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert all(torch.equal(now, before) for now, before in zip(middle, kept, strict=True))


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", "_backward", "_backward_", "_backward_product_"])
def test_unknown_approximation(device, suffix):
    tensors = [torch.ones(4, 8, device=device) for _ in range(3 if suffix else 2)]
    with pytest.raises(
        RuntimeError, match=f"^geglu{suffix}: approximate is 'erf', expected 'none' or 'tanh'"
    ):
        getattr(torch.ops.liger, f"geglu{suffix}")(*tensors, approximate="erf")
    with pytest.raises(ValueError, match=r"^geglu_packed: approximate is 'Tanh', expected 'none' or 'tanh'"):
        liger.geglu_packed(tensors[0], "Tanh")


def test_exact_and_approximate_differ(device):
    gate, up = make(device)
    difference = (liger.geglu(gate, up) - liger.geglu(gate, up, "tanh")).abs().max()
    assert 1e-5 < difference < 1e-2
