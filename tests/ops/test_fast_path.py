# SPDX-License-Identifier: BSD-3-Clause
"""Eager calls of the public ops go around the Python that the dispatcher would run, and only calls that may
do so.

Whatever looks at an op (subclasses, modes, transforms, compilers, tracers) must find it, and find the same
results.
"""

import sys
import threading

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from public_ops import CASES, as_tuple, assert_same, inputs_of, results
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import liger
from liger._core.op.forward_gradients import rescale_


@pytest.fixture(params=CASES)
def name(request):
    return request.param


COMPOSITES = ("cross_entropy", "fused_linear_ce", "fused_linear_logprobs", "grouped_experts", "tiled_mlp")


def op_of(name):
    """The differentiable op behind a public function."""
    return getattr(torch.ops.liger, f"{name}_forward" if name in COMPOSITES else name).default


def registered_autograd_calls(function):
    """How often the dispatcher runs the registered formula of an op during a call."""
    calls = []

    def see(frame, event, _argument):
        if event == "call" and frame.f_code.co_name == "autograd_kernel":
            calls.append(frame)

    sys.setprofile(see)
    threading.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len(calls)


class SeesDispatch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append((function, torch.is_grad_enabled()))
        return function(*args, **(kwargs or {}))


# --- taken --------------------------------------------------------------------------------------------------


def test_taken_in_eager_code(device, name):
    inputs = inputs_of(name, device)
    plain = [t.detach() for t in inputs]
    assert registered_autograd_calls(lambda: CASES[name].function(*plain)) == 0
    with torch.no_grad():
        assert registered_autograd_calls(lambda: CASES[name].function(*inputs)) == 0
    with torch.autocast(device.type, torch.bfloat16):
        assert registered_autograd_calls(lambda: CASES[name].function(*inputs)) == 0
    assert registered_autograd_calls(lambda: results(CASES[name].function, inputs)) == 0
    inputs[0] = torch.nn.Parameter(plain[0])
    assert registered_autograd_calls(lambda: CASES[name].function(*inputs)) == 0


def test_the_measure_of_this_file_sees_the_op(device, name):
    inputs = inputs_of(name, device)
    with SeesDispatch():
        assert registered_autograd_calls(lambda: CASES[name].function(*inputs)) == 1


def test_same_bits_as_the_op(device, name):
    function, inputs = CASES[name].function, inputs_of(name, device)
    fast = results(function, inputs)
    with SeesDispatch():
        slow = results(function, inputs)
    for a, b in zip(fast, slow, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() and a.requires_grad == b.requires_grad


def test_autocast_casts_nothing_that_the_op_does_not(device, name):
    function, inputs = CASES[name].function, inputs_of(name, device)
    with torch.autocast(device.type, torch.bfloat16):
        fast = results(function, inputs)
        with SeesDispatch():
            slow = results(function, inputs)
    assert [t.dtype for t in fast] == [t.dtype for t in slow]
    assert all(map(torch.equal, fast, slow))


def test_without_gradients_nothing_is_recorded(device, name):
    function, inputs = CASES[name].function, inputs_of(name, device)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not any(t.requires_grad for t in as_tuple(function(*inputs)))
    assert not any(t.requires_grad for t in as_tuple(function(*(t.detach() for t in inputs))))


def test_saved_tensors_go_through_hooks(device, name):
    packed = []

    def pack(tensor):
        packed.append(tensor.detach().clone())
        return packed[-1]

    function, inputs = CASES[name].function, inputs_of(name, device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hooked = results(function, inputs)
    assert packed
    assert_same(hooked, results(function, inputs))


# --- not taken ----------------------------------------------------------------------------------------------


def test_dispatch_modes_see_the_op(device, name):
    inputs = inputs_of(name, device)
    for tensors in (inputs, [t.detach() for t in inputs]):
        with SeesDispatch() as mode:
            CASES[name].function(*tensors)
        assert mode.seen.count(op_of(name)) == 1


def test_function_modes_see_the_op(device, name):
    """In grad mode, as it is called: what a mode puts in its place may be differentiable in its own way."""
    with SeesFunctions() as mode:
        CASES[name].function(*inputs_of(name, device))
    assert [grad for function, grad in mode.seen if function == op_of(name)] == [True]


def test_subclasses_with_torch_dispatch(device, name):
    function = CASES[name].function
    a, b = inputs_of(name, device), inputs_of(name, device)
    both = [
        TwoTensor(x.detach(), y.detach()).requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for x, y in zip(a, b, strict=True)
    ]
    b = [y if y.is_floating_point() else x for x, y in zip(a, b, strict=True)]
    outputs = results(function, both)
    assert all(type(t) is TwoTensor for t in outputs)
    assert_same([t.a for t in outputs], results(function, a))
    assert_same([t.b for t in outputs], results(function, b))


def test_subclasses_with_torch_function(device, name):
    seen = []

    class Sees(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append((function, torch.is_grad_enabled()))
            return super().__torch_function__(function, types, args, kwargs)

    first, *others = inputs_of(name, device)
    outputs = CASES[name].function(first.as_subclass(Sees), *others)
    assert [grad for function, grad in seen if function == op_of(name)] == [True]
    assert all(type(t) is Sees for t in as_tuple(outputs))


def test_transforms_see_the_op(device, name):
    """test_transforms.py says what comes out."""
    case = CASES[name]
    in_dims = tuple(None if dim is None else 0 for dim in case.token_dims)
    stacked = [
        t if dim is None else torch.stack([t, t])
        for t, dim in zip(inputs_of(name, device), in_dims, strict=True)
    ]
    assert registered_autograd_calls(lambda: torch.vmap(case.function, in_dims=in_dims)(*stacked)) > 0


def test_a_tensor_that_outlives_its_transform(device, name):
    kept = []

    def keep(x):
        kept.append(x)
        return x.sum()

    function, inputs = CASES[name].function, inputs_of(name, device)
    expected = as_tuple(function(*inputs))
    torch.func.grad(keep)(inputs[0])
    assert torch._C._functorch.is_functorch_wrapped_tensor(kept[0])
    assert_same(as_tuple(function(kept[0], *inputs[1:])), expected)


def test_compiled_code_contains_the_op(device, name):
    graphs = []

    def see(graph, _inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    function, inputs = CASES[name].function, inputs_of(name, device)
    compiled = torch.compile(function, fullgraph=True, backend=see)
    assert_same(results(compiled, inputs), results(function, inputs))
    (graph,) = graphs
    assert [n.target for n in graph.graph.nodes].count(op_of(name)) == 1


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_traced_graphs_contain_the_op(device, name, pre_dispatch):
    inputs = inputs_of(name, device)
    graph = make_fx(lambda *inputs: CASES[name].function(*inputs), pre_dispatch=pre_dispatch)(*inputs)
    assert [n.target for n in graph.graph.nodes].count(op_of(name)) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_torchscript_traces_contain_the_op(device, name):
    inputs = inputs_of(name, device)
    traced = torch.jit.trace(CASES[name].function, tuple(t.detach() for t in inputs))
    kinds = [node.kind() for node in traced.graph.nodes()]
    assert op_of(name)._schema.name in kinds
    assert_same(as_tuple(traced(*inputs)), as_tuple(CASES[name].function(*inputs)))


def test_forward_mode_differentiation_is_an_error(device, name):
    inputs = inputs_of(name, device)
    with forward_ad.dual_level():
        inputs[0] = forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0]))
        with pytest.raises(NotImplementedError, match="jvp"):
            CASES[name].function(*inputs)


def test_nothing_is_recorded_inside_of_another_op(device, name):
    """There autograd is off in the dispatcher though grad mode is on: a graph would belong to nobody."""
    inputs = inputs_of(name, device)
    with torch._C._AutoDispatchBelowAutograd():
        outputs = CASES[name].function(*inputs)
    assert not any(t.requires_grad for t in as_tuple(outputs))


# --- ops that write -----------------------------------------------------------------------------------------


def test_a_write_is_counted_and_refused_by_autograd(device):
    x, factor = torch.randn(4, 3, device=device), torch.tensor(2.0, device=device)
    expected = x * 2
    with torch.no_grad():
        assert rescale_(x, factor) is None
    assert torch.equal(x, expected) and x._version > 0
    version = x._version
    rescale_(x, factor)
    assert torch.equal(x, expected * 2) and x._version > version
    version = x._version
    with SeesDispatch() as mode, torch.no_grad():
        rescale_(x, factor)
    assert torch.ops.liger.rescale_.default in mode.seen and x._version > version
    x.requires_grad_()
    with pytest.raises(
        RuntimeError, match="liger::rescale_ writes over its arguments and is not differentiable"
    ):
        rescale_(x * 1, factor)


def test_a_saved_tensor_that_was_written_is_noticed(device):
    gate, up = inputs_of("swiglu", device)
    start = gate * 1
    output = liger.swiglu(start, up)
    with torch.no_grad():
        rescale_(start, torch.tensor(2.0, device=device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
