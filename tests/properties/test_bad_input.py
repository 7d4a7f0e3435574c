# SPDX-License-Identifier: BSD-3-Clause
"""Whatever is wrong with one argument of a public callable, the error names the callable and the argument.

The arguments come from the signatures and from tests/support/api/public_callables, so that a callable is
covered by being registered there. docs/reference/errors.md says which exception is raised when.
"""

import inspect
import math
import re
from typing import get_args, get_type_hints

import in_shards
import pytest
import torch
from public_callables import CASES, arguments
from public_options import (
    COUNTS,
    DIVISORS,
    FIRST,
    OPAQUE,
    SIGNED,
    SIZES,
    constructor_but,
    parameters_but,
    public,
)

import liger
from liger._core.runtime import environment

PUBLIC = {public: name for public, name in FIRST.items() if not public.startswith("nn.")}
LOSSES = [public for public in PUBLIC if public.startswith("losses.")]
MODULES = [public for public in FIRST if public.startswith("nn.")]

# Tensors without a default that may be None.
OPTIONAL = {"up_weight", "q_weight", "k_weight"}
# Losses whose number of items may be 0.
POLICIES = {"losses.FusedLinearGRPOLoss", "losses.FusedLinearPPOLoss"}


def parameters_of(function):
    return parameters_but(OPAQUE, function)


def constructor_of(cls):
    return constructor_but(OPAQUE, cls)


def shown(value):
    """Python refuses to print an integer of thousands of digits."""
    is_huge = isinstance(value, int) and abs(value) > 2**128
    return f"an integer of {value.bit_length()} bits" if is_huge else repr(value)


def refused(call, op, argument, value):
    """Asserts that the call raises, naming both. RuntimeError is for tensors."""
    kinds = (TypeError, ValueError, *((RuntimeError,) if isinstance(value, torch.Tensor) else ()))
    try:
        result = call()
    except kinds as error:
        message = str(error).splitlines()[0]
        if f"multiple values for keyword argument '{argument}'" in message:
            return  # The class decides it itself.
        assert op in message, f"{argument}={shown(value)}: {type(error).__name__}: {message}"
        named = re.search(rf"(?<![a-z]){argument}(?![a-z])", message)
        assert named, f"{argument}={shown(value)}: {type(error).__name__}: {message}"
        return
    negative = isinstance(value, (int, float)) and value < 0
    hint = " (SIGNED in public_options.py names the options that may be negative)" if negative else ""
    raise AssertionError(f"{op} takes {argument}={shown(value)}{hint} and returns {result!r}")


def wrong_tensors(tensor):
    """What no public callable takes in the place of a tensor."""
    yield "text"
    yield 3.5 if tensor.dim() else [1.0]
    yield tensor.to(torch.float32 if tensor.is_complex() else torch.complex64)
    yield tensor.new_zeros(() if tensor.dim() else 2)


def other_layouts(tensor):
    """The tensor in every layout, and quantised, as far as torch has them for its dtype and dimensions."""
    floats, dims = tensor.dtype == torch.float32, tensor.dim()
    tensor = torch.ones_like(tensor)  # Compressed layouts want the same number of elements in every batch.
    yield "layout sparse_coo", tensor.to_sparse()
    if dims >= 2:
        yield "layout sparse_csr", tensor.to_sparse_csr()
        yield "layout sparse_bsc", tensor.to_sparse_bsc((1, 1))
    if dims:
        yield "nested", torch.nested.nested_tensor([tensor, tensor])
        yield "nested", torch.nested.nested_tensor([tensor, tensor], layout=torch.jagged)
    if floats and dims:
        yield "layout _mkldnn", tensor.to_mkldnn()
    if floats:
        yield "quantised", torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


def wrong_options(name, default):
    """What no option takes, by its default."""
    if isinstance(default, bool):
        yield from ("yes", None, 2)
    elif isinstance(default, int):
        yield from ("3", 1.5, None, True, 2**63, 10**400, -(10**5000))
        if name not in SIGNED:
            yield -1
    elif isinstance(default, float):
        yield from ("3", None, math.nan, math.inf, -math.inf, 1j, True)
        # Finite, but not in float32, which the kernels take.
        yield from (1e39, -1e39, 2**128, 10**400)
        if name not in SIGNED:
            yield -1.0
        if default > 0.0 and name in DIVISORS:
            yield from (0.0, 1e-40, 5e-324)
    elif isinstance(default, str):
        yield from ("nonsense", 3, None)
    elif default is None:
        yield from ("nonsense", torch.zeros(2, 3, 1, 2), [1, "2"], math.nan, 1e39, 10**400)
        if name in DIVISORS:
            yield from (0.0, 1e-40, True)
        if name in COUNTS:
            yield from (0, -1, 2**63, True)
    elif isinstance(default, tuple):
        yield from (3, ("nonsense",))
    else:
        raise AssertionError(f"{name} has the default {default!r}, of which this table knows nothing")


def function_of(name):
    """(the function or forward whose signature counts, how the case is called, the name in errors)"""
    found, case = public(name), CASES[PUBLIC[name]]
    if isinstance(found, type):
        return found.forward, case.call, found.__name__
    # The cases of some functions wrap them: here their arguments are given as they are.
    return found, found, name


def given_to(name):
    given = arguments(PUBLIC[name], requires_grad=False)
    if name == "tiled":
        weight = given.pop("weight")
        given["function"] = lambda part: part @ weight.t()
    return given


@pytest.mark.parametrize("name", PUBLIC)
def test_tensors(name):
    signature, call, op = function_of(name)
    given = given_to(name)
    for argument, parameter in parameters_of(signature).items():
        if not isinstance(given.get(argument), torch.Tensor):
            continue
        bad = list(wrong_tensors(given[argument]))
        if parameter.default is parameter.empty and argument not in OPTIONAL:
            bad.append(None)
        for value in bad:
            if name == "tiled" and isinstance(value, torch.Tensor) and value.is_complex():
                continue  # The function may take it.
            refused(lambda a=argument, v=value: call(**{**given, a: v}), op, argument, value)


def refuses_layouts(call, ops, given, argument):
    """Asserts that the call refuses every other layout of the tensor that it is given for an argument."""
    for words, value in other_layouts(given[argument]):
        pattern = rf"({'|'.join(ops)}): {argument} is a .*{words}.*, expected a dense tensor"
        with pytest.raises(RuntimeError, match=pattern):
            call(**{**given, argument: value})


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta", "ignore:The PyTorch API of nested")
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("name", FIRST)
def test_layouts(name):
    if name in PUBLIC:
        signature, call, op = function_of(name)
        given, ops = given_to(name), (op,)
    else:
        cls, case = public(name), CASES[FIRST[name]]
        signature, call = cls.forward, case.call
        given, ops = (
            arguments(FIRST[name], requires_grad=False),
            (cls.__name__, CALLED.get(cls.__name__, cls.__name__)),
        )
    tensors = [a for a in parameters_of(signature) if isinstance(given.get(a), torch.Tensor)]
    assert tensors
    for argument in tensors:
        refuses_layouts(call, ops, given, argument)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta", "ignore:The PyTorch API of nested")
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor:UserWarning")
def test_layouts_elsewhere():
    x, weight, target = torch.randn(4, 8), torch.randn(6, 8), torch.zeros(4, dtype=torch.int64)
    for function, given in (
        (in_shards.cross_entropy, {"logits": x, "target": target}),
        (in_shards.fused_linear_ce, {"input": x, "weight": weight, "target": target}),
        (in_shards.fused_linear_logprobs, {"input": x, "weight": weight, "target": target}),
    ):
        for argument in given:
            refuses_layouts(function, (function.__name__,), given, argument)
    given = {"weight": torch.ones(6)}
    refuses_layouts(liger.nn.CrossEntropyLoss, ("CrossEntropyLoss",), given, "weight")
    for words, value in other_layouts(x):
        with pytest.raises(RuntimeError, match=f"tiled: argument 2 is .*{words}"):
            liger.tiled(lambda part, other: part, x, value)


@pytest.mark.parametrize("name", PUBLIC)
def test_options(name):
    signature, call, op = function_of(name)
    given = given_to(name)
    for argument, parameter in parameters_of(signature).items():
        if isinstance(given.get(argument), torch.Tensor):
            continue
        default = given[argument] if parameter.default is parameter.empty else parameter.default
        if isinstance(default, list):
            default = tuple(default)
        for value in wrong_options(argument, default):
            if value is True and checks_of(call)["late"]:
                continue  # The op takes it as 1.
            if (
                argument == "denominator"
                and name in POLICIES
                and isinstance(value, float)
                and value in (0.0, 1e-40)
            ):
                continue
            refused(lambda a=argument, v=value: call(**{**given, a: v}), op, argument, value)


@pytest.mark.parametrize("name", [*LOSSES, *MODULES])
def test_options_of_constructors(name):
    cls = public(name)
    options = constructor_of(cls)
    needed = {n: v for n, v in SIZES.items() if n in inspect.signature(cls).parameters}
    for argument, parameter in options.items():
        default = needed.get(argument, 8) if parameter.default is parameter.empty else parameter.default
        if parameter.default is parameter.empty and argument not in needed:
            continue
        given = needed | loss_type_that_reads(cls, argument)
        for value in wrong_options(argument, default):
            if argument == "normalized_shape" and value is None:
                continue
            refused(lambda a=argument, v=value, g=given: cls(**{**g, a: v}), cls.__name__, argument, value)


def checks_of(function):
    """How arguments() checks them."""
    return getattr(function, "liger_checks", {"late": False, "used_by": {}})


def used_by(cls):
    """{option: the loss types that read it} of a loss."""
    return {
        option: types
        for base in reversed(cls.__mro__)
        for option, types in checks_of(vars(base).get("__init__"))["used_by"].items()
    }


def loss_type_that_reads(cls, argument):
    types = used_by(cls).get(argument)
    return {} if types is None else {"loss_type": types[0]}


READ_BY_SOME = [
    (public_name, argument) for public_name in LOSSES for argument in used_by(public(public_name))
]


@pytest.mark.parametrize(("name", "argument"), READ_BY_SOME)
def test_options_of_other_loss_types(name, argument):
    """Their ranges do not matter; their types do."""
    cls = public(name)
    if argument not in parameters_of(cls.__init__):
        return  # The class decides it itself.
    others = set(get_args(loss_types_of(cls))) - set(used_by(cls)[argument])
    assert others, f"every loss type reads {argument}"
    for loss_type in others:
        cls(**{argument: -7, "loss_type": loss_type})
        refused(lambda t=loss_type: cls(**{argument: "3", "loss_type": t}), cls.__name__, argument, "3")


def loss_types_of(cls):
    return get_type_hints(cls.__init__)["loss_type"]


def takes_ignore_index(name):
    found = public(name)
    return "ignore_index" in (constructor_of if isinstance(found, type) else parameters_of)(found)


@pytest.mark.parametrize("name", list(filter(takes_ignore_index, PUBLIC)))
def test_an_ignore_index_beyond_the_dtype_of_the_target(device, name):
    """Compared in int32, 2^32 + 3 would be class 3."""
    found, given = public(name), arguments(PUBLIC[name], device, requires_grad=False)

    def call(given, ignore_index):
        if isinstance(found, type):
            return found(ignore_index=ignore_index)(**given)
        return found(**{**given, "ignore_index": ignore_index})

    is_index = {key: isinstance(t, torch.Tensor) and t.dtype == torch.int64 for key, t in given.items()}
    narrow = {key: t.int() if is_index[key] else t for key, t in given.items()}
    for beyond in (2**32 + 3, -(2**40), 2**31, -(2**31) - 1):
        words = f"{found.__name__}: ignore_index is {beyond}, expected a value of int32, the dtype of "
        with pytest.raises(ValueError, match=re.escape(words)):
            call(narrow, beyond)
    with pytest.raises(
        ValueError, match=f"ignore_index is {2**63}, expected an integer, in the range of int64"
    ):
        call(given, 2**63)
    call({key: t.clamp_min(0) if is_index[key] else t for key, t in given.items()}, 2**32 + 3)


# What a module calls, in whose name it may raise.
CALLED = {
    "RMSNorm": "rms_norm", "RMSNormGated": "rms_norm_gated", "LayerNorm": "layer_norm",
    "GroupNorm": "group_norm", "Softmax": "softmax", "ReLUSquared": "relu_squared",
    "ApplyRotaryEmb": "rope", "CrossEntropyLoss": "cross_entropy",
    "FusedLinearCrossEntropyLoss": "fused_linear_ce", "TiledSwiGLUMLP": "tiled_mlp", "TiledGEGLUMLP": "tiled_mlp",
    "GroupedExperts": "grouped_experts",
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_inputs_of_modules(name):
    cls = public(name)
    case, given = CASES[FIRST[name]], arguments(FIRST[name], requires_grad=False)
    for argument, parameter in parameters_of(cls.forward).items():
        if parameter.default is not parameter.empty or argument not in given:
            continue
        for value in ("text", 3.5, None):
            try:
                case.call(**{**given, argument: value})
            except TypeError as error:
                op = next(
                    (op for op in (cls.__name__, CALLED.get(cls.__name__)) if f"{op}: " in str(error)), None
                )
                assert op and f"{argument} is " in str(error), f"{argument}={value!r}: {error}"
            else:
                raise AssertionError(f"{name} takes {argument}={value!r}")


def test_what_is_read_from_the_environment(monkeypatch):
    for name, read in (
        ("TRITON_INTERPRET", environment.triton_interpreted),
        ("LIGER_CHECK_TARGETS", environment.targets_checked),
    ):
        for text, value in (("0", False), ("1", True), ("", False)):
            monkeypatch.setenv(name, text)
            assert read() is value
        for text in ("2", "banana", "true", " 1"):
            monkeypatch.setenv(name, text)
            with pytest.raises(ValueError, match=f"{name}: expected 0 or 1, got '{text}'"):
                read()
        monkeypatch.delenv(name)
        assert read() is False


PLANNED = [
    name
    for name, case in CASES.items()
    if case.public.startswith(("fused_linear", "losses.", "tiled_mlp", "nn.LMHead", "nn.Fused", "nn.Tiled"))
]


@pytest.mark.parametrize("name", PLANNED)
def test_a_budget_that_cannot_be_read(name, device, monkeypatch):
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "lots")
    given = arguments(name, device)
    if "memory_budget" in given or "chunks" in name:
        CASES[name].call(**given)  # a budget of one's own comes before the variable
        return
    with pytest.raises(ValueError, match=r"^LIGER_MEMORY_BUDGET: expected a positive number of bytes"):
        CASES[name].call(**given)
