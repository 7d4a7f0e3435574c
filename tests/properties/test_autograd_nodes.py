# SPDX-License-Identifier: BSD-3-Clause
"""Autograd nodes in C++ do what the formulas in Python do: results, errors, hooks, whatever is asked of a
backward.

The files of this folder and tests/ops run with the nodes that the installation has. Here both kinds are
compared. tests/ops/test_entries.py has the public functions.
"""

import gc
import itertools
import weakref

import pytest
import torch
from samples import SAMPLES

import liger
from liger._core.op import nodes
from liger._core.op.declared import declarations
from liger._core.runtime import load

if load.C is None:
    pytest.skip(f"liger._C is {load.C_REASON}", allow_module_level=True)

OPS = [*sorted({declaration.ops[0] for declaration in declarations().values()}), "rope", "qk_norm_rope"]


class Kind:
    """One kind of node for one op: how to record it."""

    def __init__(self, name, op):
        self.name, self.op = name, op
        formula = nodes._FORMULAS[op]
        parameters = [(a.name,) for a in getattr(torch.ops.liger, op).default._schema.arguments]
        self.entry = formula.entry(parameters, formula.results, len(parameters), False)

    def __call__(self, *args):
        outputs = NotImplemented
        if self.name == "C++":
            outputs = self.entry(*args)
        if outputs is NotImplemented:
            outputs = getattr(torch.ops.liger, self.op).default(*args)
        return outputs if isinstance(outputs, tuple) else (outputs,)


@pytest.fixture(params=OPS)
def both(request):
    return Kind("C++", request.param), Kind("Python", request.param)


def samples(op, device):
    """Samples with all arguments, the defaults, too."""
    schema = getattr(torch.ops.liger, op).default._schema
    return [
        (*sample, *(a.default_value for a in schema.arguments[len(sample) :]))
        for sample in SAMPLES[op](device)
    ]


def tensor_positions(args):
    return [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]


def subsets(items):
    return [s for n in range(1, len(items) + 1) for s in itertools.combinations(items, n)]


def leaves(args, requires_grad):
    return [
        a.detach().clone().requires_grad_(i in requires_grad) if isinstance(a, torch.Tensor) else a
        for i, a in enumerate(args)
    ]


def outcome(function, *args):
    """What a call returns, or the type and the first line of what it raises."""
    try:
        return function(*args)
    except Exception as error:
        return type(error), str(error).partition("\n")[0]


def assert_equal(a, b):
    """Bit for bit; None and errors are equal to themselves alone."""
    assert type(a) is type(b)
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b), (a, b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, check_stride=True)
        assert a.requires_grad == b.requires_grad
    else:
        assert a == b


def upstream_of(outputs):
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    return [torch.randn(o.shape, generator=generator, device=o.device, dtype=o.dtype) for o in outputs]


def differentiated(kind, args, requires_grad, with_outputs=None, wanted=None, **options):
    """Outputs, and the gradients of some of them with respect to all inputs that require grad, or to those
    wanted."""
    given = leaves(args, requires_grad)
    outputs = kind(*given)
    roots = [i for i, o in enumerate(outputs) if o.requires_grad]
    if with_outputs is not None:
        roots = [i for i in roots if i in with_outputs]
    if not roots:
        return outputs, None
    grads = torch.autograd.grad(
        [outputs[i] for i in roots],
        [given[i] for i in wanted or requires_grad],
        [g for i, g in enumerate(upstream_of(outputs)) if i in roots],
        allow_unused=True,
        **options,
    )
    return [o.detach() for o in outputs], [o.requires_grad for o in outputs], list(grads)


def test_the_ops():
    assert nodes._FORMULAS.keys() == {*OPS, "cross_entropy"}


def test_the_node_serves_all_inputs(both, device):
    args, inputs = differentiable_sample(both[0].op, device)
    outputs = both[0].entry(*leaves(args, inputs))
    assert outputs is not NotImplemented


def test_public_functions_record_them(device):
    x, weight = torch.randn(3, 16, device=device, requires_grad=True), torch.ones(16, device=device)
    node = liger.rms_norm(x, weight).grad_fn
    assert type(node).__name__ == "CppFunction" and node.name() == "rms_normBackward"


def test_every_choice_of_inputs_and_outputs(both, device):
    for args in samples(both[0].op, device):
        for requires_grad in subsets(tensor_positions(args)):
            for with_outputs in ((0,), (1,), (0, 1)):
                a, b = (outcome(differentiated, kind, args, requires_grad, with_outputs) for kind in both)
                assert_equal(a, b)


def differentiable_sample(op, device):
    """(arguments, positions of those with a gradient)"""
    args = samples(op, device)[0]
    tensors = tensor_positions(args)
    return args, tensors[:-2] if op in ("rope", "qk_norm_rope") else tensors


def test_some_of_the_gradients(both, device):
    args, inputs = differentiable_sample(both[0].op, device)
    for wanted in subsets(inputs):
        assert_equal(*(differentiated(kind, args, inputs, wanted=wanted) for kind in both))


def test_names(both, device):
    args, inputs = differentiable_sample(both[0].op, device)
    # Before torch 2.13 the outputs alone keep a node in Python alive.
    a, b = (kind(*leaves(args, inputs)) for kind in both)
    assert a[0].grad_fn.name() == b[0].grad_fn.name()
    assert len(a[0].grad_fn.next_functions) == len(b[0].grad_fn.next_functions)


def test_missing_gradients(both, device):
    """A backward that runs without a gradient of any output."""
    args, inputs = differentiable_sample(both[0].op, device)

    def grads(kind):
        given = leaves(args, inputs)
        undefined = torch._C._functions.UndefinedGrad()(kind(*given)[0])
        return torch.autograd.grad(undefined.sum(), [given[i] for i in inputs], allow_unused=True)

    assert_equal(*map(grads, both))


@pytest.mark.parametrize("options", [{}, {"create_graph": True}, {"is_grads_batched": True}], ids=str)
def test_other_backwards(both, device, options):
    args, inputs = differentiable_sample(both[0].op, device)

    def grads(kind):
        given = leaves(args, inputs)
        outputs = [o for o in kind(*given) if o.requires_grad]
        upstream = upstream_of(outputs)
        if options.get("is_grads_batched"):
            upstream = [torch.stack([g, 2 * g]) for g in upstream]
        found = torch.autograd.grad(outputs, [given[i] for i in inputs], upstream, **options)
        return list(found), [outcome(torch.autograd.grad, g.sum(), given[inputs[0]]) for g in found]

    assert_equal(*map(grads, both))


def test_second_backward(both, device):
    args, inputs = differentiable_sample(both[0].op, device)

    def twice(kind, **options):
        outputs = [o for o in kind(*leaves(args, inputs)) if o.requires_grad]
        torch.autograd.backward(outputs, upstream_of(outputs), **options)
        return outcome(torch.autograd.backward, outputs, upstream_of(outputs))

    assert_equal(*(twice(kind) for kind in both))
    assert twice(both[0])[0] is RuntimeError
    assert twice(both[0], retain_graph=True) is None


def test_written_inputs(both, device):
    args, inputs = differentiable_sample(both[0].op, device)

    def written(kind, position):
        given = leaves(args, inputs)
        given[position] = given[position] * 1
        output = kind(*given)[0]
        given[position].detach().add_(1)
        return outcome(torch.autograd.backward, output.sum())

    for position in inputs:
        assert_equal(*(written(kind, position) for kind in both))


def test_saved_tensors_hooks(both, device):
    args, inputs = differentiable_sample(both[0].op, device)

    def hooked(kind):
        packed, unpacked = [], []

        def pack(tensor):
            packed.append(tensor.detach().clone())
            return len(packed) - 1

        def unpack(index):
            unpacked.append(index)
            return packed[index]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            outputs, _, grads = differentiated(kind, args, inputs)
        return outputs, grads, packed, unpacked

    assert_equal(*map(hooked, both))


def test_hooks_of_the_node(both, device):
    args, inputs = differentiable_sample(both[0].op, device)

    def hooked(kind):
        seen = []
        given = leaves(args, inputs)
        outputs = kind(*given)
        node = outputs[0].grad_fn
        node.register_prehook(lambda grads: seen.append([g is not None for g in grads]))
        node.register_hook(lambda grads, upstream: seen.append([g is not None for g in grads]))
        outputs[0].register_hook(lambda grad: 2 * grad)
        outputs[0].retain_grad()
        outputs[0].sum().backward()
        return seen, [given[i].grad for i in inputs], outputs[0].grad

    assert_equal(*map(hooked, both))


def test_refused_arguments(both, device):
    args, inputs = differentiable_sample(both[0].op, device)
    for position in tensor_positions(args):
        for change in (lambda t: t.cfloat(), lambda t: t[..., :3], lambda t: t[None, None]):
            given = leaves(args, inputs)
            given[position] = change(given[position])
            assert_equal(*(outcome(kind, *given) for kind in both))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_names_the_forward(both, device):
    args, inputs = differentiable_sample(both[0].op, device)
    with torch.autograd.detect_anomaly(check_nan=False):
        output = both[0](*leaves(args, inputs))[0]
        output.grad_fn.register_hook(lambda grads, upstream: 1 / 0)
        with (
            pytest.warns(UserWarning, match="test_anomaly_mode_names_the_forward"),
            pytest.raises(ZeroDivisionError),
        ):
            output.sum().backward()


def test_saved_outputs_form_no_cycle(both, device):
    args, inputs = differentiable_sample(both[0].op, device)
    gc.disable()
    try:
        outputs = both[0](*leaves(args, inputs))
        alive = [weakref.ref(o) for o in outputs]
        del outputs
        assert not any(reference() is not None for reference in alive)
    finally:
        gc.enable()


def test_memory_is_freed_by_the_backward(both, device):
    args, inputs = differentiable_sample(both[0].op, device)
    given = leaves(args, inputs)
    intermediate = [g * 1 if isinstance(g, torch.Tensor) else g for g in given]
    output = both[0](*intermediate)[0]
    alive = [weakref.ref(t) for t in intermediate if isinstance(t, torch.Tensor)]
    del intermediate
    output.sum().backward()
    assert output.grad_fn is not None and not any(reference() is not None for reference in alive)
