# SPDX-License-Identifier: BSD-3-Clause
"""What must hold for every op of torch.ops.liger. A new op fails here until it is complete:
docs/development/contributing.md lists its files."""

import importlib
import importlib.util
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
from public_ops import CASES as PUBLIC_OPS
from samples import SAMPLES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import liger
from liger._core.op.registration import FAMILIES, PORTABLE
from liger._core.runtime import load

OPS = sorted(
    name.removeprefix("liger::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("liger::")
)
# Host functions: they look at metadata and give no tensors back.
HELPERS = [
    op
    for op in OPS
    if op.startswith(("build_", "check_", "declarations", "plan_", "lay_out_chunks", "default_"))
]
COMPOSITES = [
    op
    for op in OPS
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"liger::{op}", "CompositeImplicitAutograd")
]
WRITING = [op for op in OPS if op.endswith("_")]
DIFFERENTIABLE = [
    op for op in OPS if op not in (*HELPERS, *COMPOSITES, *WRITING) and not op.endswith("_backward")
]
KERNELS = [op for op in OPS if op not in (*HELPERS, *COMPOSITES)]

# They work on a rank's part of the vocabulary, which what calls them has taken from a DTensor.
OF_VOCABULARY_PARTS = [op for op in OPS if op.startswith("cross_entropy_stats")]


def overload(op):
    return getattr(torch.ops.liger, op).default


def tensors_in(values):
    return [t for t in values if isinstance(t, torch.Tensor)]


def written(op):
    """Positions of the arguments that the schema says are written."""
    arguments = overload(op)._schema.arguments
    return [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]


def run(op, arguments):
    """The outputs as a tuple."""
    outputs = overload(op)(*arguments)
    return outputs if isinstance(outputs, tuple) else () if outputs is None else (outputs,)


def differentiable_inputs(arguments, op=None):
    """Arguments whose floating tensors of two and more dimensions require grad: weights of classes have one.
    Not the gradients of a teacher, which is frozen."""
    if op is not None:
        schema = overload(op)._schema.arguments
        return tuple(
            a if s.name.startswith("teacher") else differentiable_inputs(a)
            for s, a in zip(schema, arguments, strict=False)
        )
    return tree_map_only(
        torch.Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point() and t.dim() > 1), arguments
    )


def test_every_op_has_samples():
    missing, unknown = set(OPS) - set(SAMPLES), set(SAMPLES) - set(OPS)
    assert not missing, (
        f"ops without an entry in SAMPLES of tests/support/samples/samples.py: {sorted(missing)}"
    )
    assert not unknown, (
        f"entries in SAMPLES of tests/support/samples/samples.py that are no op: {sorted(unknown)}"
    )


def test_the_schemas_of_the_source_are_the_ones_loaded():
    csrc = Path(__file__).parents[2] / "csrc"
    if not csrc.is_dir():
        pytest.skip("not a checkout")
    text = (csrc / "declarations.cpp").read_text() + (csrc / "library.cpp").read_text()
    found = re.findall(r'"(\w+\([^"]*-> [^"]*)"', text.replace('\\"', "'"))
    schemas = {schema.partition("(")[0]: schema for schema in found}
    assert sorted(schemas) == OPS
    for op, schema in schemas.items():
        assert str(torch._C.parse_schema(f"liger::{schema}")) == str(overload(op)._schema)


@pytest.mark.parametrize("op", KERNELS)
def test_every_op_belongs_to_one_family_or_needs_none(op):
    families = [name for name, family in FAMILIES.items() if op in family.torch_kernels]
    assert len(families) == (op not in PORTABLE), (
        f"{op} is in the families {families}: python/liger/ops must name it in one register_family(), "
        "or in register_portable() alone"
    )


def test_families_hold_nothing_else():
    assert (
        sorted([op for family in FAMILIES.values() for op in family.torch_kernels] + list(PORTABLE))
        == KERNELS
    )


def samples_of(ops):
    """Parameters of a test: every op with its first sample, and with the others, since opcheck compiles
    each."""
    first = [pytest.param(op, slice(0, 1), id=op) for op in ops]
    several = [op for op in ops if op in SAMPLES and len(SAMPLES[op](torch.device("cpu"))) > 1]
    return first + [
        pytest.param(op, slice(1, None), id=f"{op}-others", marks=pytest.mark.slow) for op in several
    ]


@pytest.mark.parametrize(("op", "chosen"), samples_of(KERNELS))
def test_opcheck(device, op, chosen):
    for arguments in SAMPLES[op](device)[chosen]:
        torch.library.opcheck(overload(op), arguments)


# They return what is for their backward: activations that it writes over, which traced code leaves alone, or
# gradients, which have no derivative. Tracing is tested on the composites, which do not return them.
RETURNING_THEIR_BACKWARD = (
    "cross_entropy_forward",
    "divergence_forward",
    "fused_linear_ce_forward",
    "fused_linear_ce_lora_forward",
    "fused_linear_divergence_forward",
    "grouped_experts_forward",
    "tiled_mlp_forward",
)


# Arguments that get no gradient: cos and sin.
FIRST_TABLE = {"rope": 2, "qk_norm_rope": 4}


@pytest.mark.parametrize(("op", "chosen"), samples_of(DIFFERENTIABLE))
def test_opcheck_with_gradients(device, op, chosen):
    for arguments in SAMPLES[op](device)[chosen]:
        arguments = list(differentiable_inputs(arguments, op))
        if op in FIRST_TABLE:
            tables = slice(FIRST_TABLE[op], FIRST_TABLE[op] + 2)
            arguments[tables] = [t.detach() for t in arguments[tables]]
        how = {}
        if op in RETURNING_THEIR_BACKWARD:
            how["test_utils"] = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(overload(op), tuple(arguments), **how)


@pytest.mark.parametrize(("op", "chosen"), samples_of(COMPOSITES))
def test_opcheck_of_composites(device, op, chosen):
    for arguments in SAMPLES[op](device)[chosen]:
        for inputs in (arguments, differentiable_inputs(arguments, op)):
            torch.library.opcheck(overload(op), inputs)


def only_integers_or_text(value):
    return isinstance(value, (int, str)) or (len(value) > 0 and all(map(only_integers_or_text, value)))


@pytest.mark.parametrize("op", HELPERS)
def test_helpers_run(device, op):
    for arguments in SAMPLES[op](device):
        outputs = run(op, arguments)
        assert outputs == () if op.startswith("check_") else only_integers_or_text(outputs)


@pytest.mark.parametrize("op", [op for op in OPS if op not in HELPERS])
def test_fake_outputs_are_the_real_ones(device, op):
    """Shapes, dtypes, devices and strides: generated code relies on the strides that a fake promises."""
    for arguments in SAMPLES[op](device):
        with FakeTensorMode() as mode:
            fakes = run(op, tree_map_only(torch.Tensor, mode.from_tensor, arguments))
        outputs = run(op, arguments)
        assert len(fakes) == len(outputs) == len(overload(op)._schema.returns)
        for i, (fake, real) in enumerate(zip(fakes, outputs, strict=True)):
            described = [(t.shape, t.stride(), t.dtype, t.device) for t in (fake, real)]
            assert described[0] == described[1], f"output {i}"


def bits(tensor):
    """Of all elements: what an op saves for its backward may have rows that it never writes, NaN among
    them."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("op", [op for op in OPS if op not in HELPERS])
def test_inputs_are_untouched_and_not_returned(device, op):
    for arguments in SAMPLES[op](device):
        before = [(t, t.clone(), t._version) for t in tensors_in(arguments)]
        outputs = run(op, arguments)
        changed = [arguments[i] for i in written(op)]
        for tensor, copy, version in before:
            if any(tensor is t for t in changed):
                assert tensor._version > version
            else:
                assert torch.equal(bits(tensor), bits(copy)) and tensor._version == version
        places = [t.untyped_storage().data_ptr() for t in (*tensors_in(arguments), *outputs) if t.numel()]
        inputs = {t.untyped_storage().data_ptr() for t in tensors_in(arguments) if t.numel()}
        for output in outputs:
            if output.numel():
                assert output.untyped_storage().data_ptr() not in inputs
                assert places.count(output.untyped_storage().data_ptr()) == 1


def test_only_the_ops_with_a_trailing_underscore_write():
    assert [op for op in OPS if written(op)] == WRITING


@pytest.mark.parametrize("op", WRITING)
def test_writing_ops_refuse_autograd(device, op):
    """Autograd would go on with the old value of what was written, and give wrong gradients."""
    for arguments in SAMPLES[op](device):
        arguments = tree_map_only(torch.Tensor, lambda t: t * 1, differentiable_inputs(arguments, op))
        if not all(arguments[i].requires_grad for i in written(op)):
            continue
        with pytest.raises(
            RuntimeError, match=f"liger::{op} writes over its arguments and is not differentiable"
        ):
            run(op, arguments)
        assert all(arguments[i]._version == 0 for i in written(op))
        with torch.no_grad():
            run(op, arguments)


@pytest.mark.parametrize("op", WRITING)
def test_writing_ops_agree_with_the_functional_ones(device, op):
    """The results of the functional op are what was written or, if the op has results too, those and then
    that."""
    if op.endswith("glu_backward_product_"):
        pytest.skip("test_gated.py compares it: its functional form has its results in another order")
    if op == "divergence_ce_forward_":
        pytest.skip("test_divergence_ce.py compares it with float64: it has no functional form")
    if op.endswith("_add_grad_weight_"):
        pytest.skip("test_accumulate_grad_weight.py compares it with float64: it has no functional form")
    functional = op.removesuffix("_")
    for arguments in SAMPLES[op](device):
        asks = op in ("cross_entropy_forward_", "divergence_forward_")
        asked = (*arguments, True) if asks else arguments
        if op.startswith("geglu"):
            asked = (*arguments[:-1], False, arguments[-1])  # no product
        expected = run(functional, asked)
        results = run(op, arguments)
        if results:
            expected = (*expected[: len(results)], *expected[-len(written(op)) :])
        for value, other in zip((*results, *(arguments[i] for i in written(op))), expected, strict=False):
            torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_differentiable_ops_have_an_autograd_kernel(op):
    """Without one the result still claims to require grad, and the gradient is silently none."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"liger::{op}", "Autograd"), (
        f"{op} has no autograd formula: call differentiable() in python/liger/ops"
    )


@pytest.mark.parametrize("op", WRITING)
def test_writing_ops_have_their_guards(op):
    for key in ("Autograd", "ADInplaceOrView"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"liger::{op}", key), (
            f"{op} writes its arguments: call forbid_autograd() in python/liger/ops"
        )


@pytest.mark.parametrize("op", WRITING)
def test_writes_are_counted_for_kernels_that_do_not_count(op):
    """A compiled kernel writes through a pointer and knows nothing of version counters."""
    arguments = SAMPLES[op](torch.device("cpu"))[0]
    before = [t._version for t in tensors_in(arguments)]
    nothing = tuple(torch.empty(0) for _ in overload(op)._schema.returns)
    silent = torch.library.Library("liger", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = nothing[0] if len(nothing) == 1 else nothing or None
            silent.impl(op, lambda *arguments: result, "CPU", allow_override=True)
        run(op, arguments)
    finally:
        silent._destroy()
    added = [t._version - version for t, version in zip(tensors_in(arguments), before, strict=True)]
    assert added == [int(i in written(op)) for i, t in enumerate(arguments) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("op", KERNELS)
def test_every_device_has_a_kernel(op):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"liger::{op}", "CPU")
    if load.CUDA_LOADED:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"liger::{op}", "CUDA"), (
            f"{op} has no CUDA kernel: STABLE_TORCH_LIBRARY_IMPL in csrc/<family>/<op>.cu registers it"
        )


# --- signatures ---------------------------------------------------------------------------------------------


def assert_takes_the_schema(function, op):
    """Same names in the same order, and the defaults that the dispatcher leaves out of a call.

    A last ``*rest`` stands for arguments without defaults.
    """
    arguments = overload(op)._schema.arguments
    parameters = list(inspect.signature(function).parameters.values())
    if parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL:
        parameters.pop()
        assert not any(a.has_default_value() for a in arguments[len(parameters) :])
        arguments = arguments[: len(parameters)]
    assert [p.name for p in parameters] == [a.name for a in arguments]
    assert [p.default for p in parameters] == [
        a.default_value if a.has_default_value() else inspect.Parameter.empty for a in arguments
    ]


def kernels():
    return [pytest.param(family, op, id=op) for family in FAMILIES.values() for op in family.torch_kernels]


@pytest.mark.parametrize(("family", "op"), kernels())
def test_torch_kernels_take_the_schema(family, op):
    assert_takes_the_schema(family.torch_kernels[op], op)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(("family", "op"), kernels())
def test_triton_launchers_take_the_schema(family, op):
    assert_takes_the_schema(getattr(importlib.import_module(family.triton_module), op), op)


@pytest.mark.parametrize("op", PORTABLE)
def test_portable_kernels_take_the_schema(op):
    assert_takes_the_schema(PORTABLE[op], op)


@pytest.mark.parametrize("op", [op for op in OPS if hasattr(liger, op)])
def test_public_functions_have_the_defaults_of_the_schema(op):
    parameters = inspect.signature(getattr(liger, op)).parameters
    for argument in overload(op)._schema.arguments:
        assert argument.name in parameters
        if argument.has_default_value():
            assert parameters[argument.name].default == argument.default_value


def test_every_op_has_a_public_function():
    """Steps of another op (its forward, its backward, the rescaling of a gradient) have none."""
    steps = [
        op
        for op in OPS
        if op.endswith(("_forward", "_backward", "_stats", "_")) or op in ("rescale", *HELPERS)
    ]
    missing = set(OPS) - set(steps) - set(liger.__all__)
    assert not missing, f"not imported and in __all__ of python/liger/__init__.py: {sorted(missing)}"


# Ops of two tensors of logits: tests/properties/test_tracers.py compiles and exports them.
DIVERGENCES = {"kl_div", "jsd", "tvd", "fused_linear_kl_div", "fused_linear_jsd"}


def test_every_public_op_is_compiled_and_exported():
    missing = set(OPS) & set(liger.__all__) - set(PUBLIC_OPS) - DIVERGENCES
    assert not missing, f"ops without an entry in CASES of tests/support/api/public_ops.py: {sorted(missing)}"


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize("op", [op for op in KERNELS if op not in OF_VOCABULARY_PARTS])
def test_every_op_takes_dtensors(op):
    """What its rule does is tested on several ranks, in tests/distributed."""
    from torch.distributed.tensor import DTensor

    entry = torch._library.simple_registry.singleton.find(f"liger::{op}")
    assert entry.torch_dispatch_rules.find(DTensor), (
        f"{op} has no DTensor rule: add an entry to RULES in python/liger/distributed/rules/ops.py or, for a loss, "
        "to LOSS_RULES in rules/losses.py there"
    )
