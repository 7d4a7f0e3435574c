# SPDX-License-Identifier: BSD-3-Clause
"""Checks of the arguments of public functions and modules (docs/reference/errors.md).

:func:`arguments` decorates a public callable with one rule per argument: its Python type and its range. The
ops check shapes, dtypes and devices; so does tensors.py, for public arguments that have another name than in
the op.
"""

import functools
import inspect
import math
import numbers
import re
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast, get_args

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import is_tensor_like

from ..dtensor.inputs import is_dtensor
from ..dtensor.mixed import MixedTensors
from .nodes import entry_of_function
from .types import CrossEntropyMetric, Reduction

_Callable = TypeVar("_Callable", bound=Callable[..., Any])


class Rule(NamedTuple):
    """A condition on an argument.

    Attributes:
        expected: the condition in words, for error messages.
        has_type: a value that fails it raises TypeError.
        in_range: called only with values that have the type, hence ``Any``.
        beyond: for a value out of range, what to add to ``expected`` if it is a number that the kernels' type
            lacks.
    """

    expected: str
    has_type: Callable[[object], bool]
    in_range: Callable[[Any], bool] | None = None
    beyond: Callable[[Any], str] | None = None


def _is_tensor(value: object) -> bool:
    # is_tensor_like: tracers pass stand-ins for tensors, such as a torch.fx.Proxy.
    return isinstance(value, torch.Tensor) or is_tensor_like(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt, numbers.Integral)) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    is_real = isinstance(value, (float, int, torch.SymFloat, torch.SymInt, numbers.Real))
    return is_real and not isinstance(value, bool)


# Kernels take float32 numbers and int64. They multiply by the reciprocal of a divisor, which overflows where
# that is subnormal. All comparisons are with integers of any size, which would not always convert to a float.
_MAX, _MIN_NORMAL = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


def _beyond_float32(value: Any) -> str:
    return ", in the range of float32" if _MAX < abs(value) < math.inf else ""


def _beyond_normal_float32(value: Any) -> str:
    return ", in the range of normal float32 numbers" if 0.0 < value < math.inf else ""


def _beyond_int64(value: Any) -> str:
    return "" if -(2**63) <= value < 2**63 else ", in the range of int64"


def _is_divisor(value: object) -> bool:
    return _is_number(value) or _is_tensor(value)


TENSOR = Rule("a tensor", _is_tensor)
FLAG = Rule("True or False", lambda v: isinstance(v, (bool, torch.SymBool)))
TEXT = Rule("a string", lambda v: isinstance(v, str))


def choice(literal: Any) -> Rule:
    """The rule of an option that is one of the strings of a ``Literal``."""
    names = get_args(literal)
    *others, last = map(repr, names)
    return Rule(f"{', '.join(others)} or {last}", TEXT.has_type, lambda v: v in names)


DTYPE = Rule("a torch.dtype", lambda v: isinstance(v, torch.dtype))
FUNCTION = Rule("a function", callable)
INTEGER = Rule("an integer", _is_integer, lambda v: -(2**63) <= v < 2**63, _beyond_int64)
COUNT = Rule("a positive integer", _is_integer, lambda v: 0 < v < 2**63, _beyond_int64)
BYTES = Rule("a positive number of bytes", _is_integer, lambda v: 0 < v < 2**63, _beyond_int64)
FINITE = Rule("a finite value", _is_number, lambda v: -_MAX <= v <= _MAX, _beyond_float32)
NOT_NEGATIVE = Rule("a finite value of at least 0", _is_number, lambda v: 0.0 <= v <= _MAX, _beyond_float32)
POSITIVE = Rule(
    "a positive, finite value", _is_number, lambda v: _MIN_NORMAL <= v <= _MAX, _beyond_normal_float32
)
FRACTION = Rule("a value between 0 and 1", _is_number, lambda v: 0.0 <= v <= 1.0)
DIVISOR = Rule(
    "a positive, finite number or a tensor with one element",
    _is_divisor,
    lambda v: _is_tensor(v) or _MIN_NORMAL <= v <= _MAX,
    _beyond_normal_float32,
)
SIZES = Rule(
    "a positive integer or a list of them",
    lambda v: _is_integer(v) or (isinstance(v, (list, tuple)) and all(map(_is_integer, v))),
    lambda v: 0 < v < 2**63 if _is_integer(v) else len(v) > 0 and min(v) > 0 and max(v) < 2**63,
    lambda v: _beyond_int64(v if _is_integer(v) else max(v, default=0)),
)
NAMES = Rule("names", lambda v: isinstance(v, (list, tuple)) and all(isinstance(name, str) for name in v))
ITEMS = Rule(
    "a finite number of at least 0 or a tensor with one element",
    _is_divisor,
    lambda v: _is_tensor(v) or 0.0 <= v <= _MAX,
    _beyond_float32,
)
NUMBER_OR_TENSOR = Rule(
    "a finite number or a tensor with one element",
    _is_divisor,
    lambda v: _is_tensor(v) or -_MAX <= v <= _MAX,
    _beyond_float32,
)
ANYTHING = Rule("anything", lambda v: True)
GROUP = Rule(
    "a process group",
    # new_group returns NON_GROUP_MEMBER to the processes outside the group, which are refused with their
    # rank.
    lambda v: (
        torch.distributed.is_available()
        and (
            isinstance(v, torch.distributed.ProcessGroup)
            or v is torch.distributed.GroupMember.NON_GROUP_MEMBER
        )
    ),
)


def names_among(*known: str) -> Rule:
    """The rule of a list of names, each one of ``known``."""
    # Not set.issuperset, which torch.compile of torch 2.10 does not trace.
    return Rule(
        f"names among {', '.join(known)}", NAMES.has_type, lambda names: all(name in known for name in names)
    )


# Groups of rules are dict[str, Any]: mypy takes the values of ``**group`` for values of any parameter of
# arguments().

# Options of every function with an lm_head.
HEAD: dict[str, Any] = {
    "ignore_index": INTEGER,
    "temperature": POSITIVE,
    "softcap": POSITIVE,
    "accum_dtype": DTYPE,
    "memory_budget": BYTES,
    "logits_dtype": DTYPE,
}
# Options of norms.
NORM: dict[str, Any] = {
    **{"eps": NOT_NEGATIVE, "offset": FINITE, "casting_mode": TEXT},
    **{"group_size": COUNT, "norm_before_gate": FLAG, "activation": TEXT},
}
# Options of modules.
MODULE: dict[str, Any] = {
    **{"device": ANYTHING, "dtype": DTYPE, "normalized_shape": SIZES},
    **dict.fromkeys(("bias", "affine", "elementwise_affine", "inplace"), FLAG),
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "num_experts"), COUNT),
    **dict.fromkeys(("num_groups", "num_channels"), COUNT),
}
# The low-rank term of an lm_head.
LORA: dict[str, Any] = {"lora_scale": FINITE}
# The classes of the vocabulary that a process has.
SHARDS: dict[str, Any] = {"group": GROUP, "vocab_start": INTEGER, "vocab_size": INTEGER}
# Options of cross entropy, with and without the lm_head.
CE_OPTIONS: dict[str, Any] = {
    **HEAD,
    **SHARDS,
    "metrics": names_among(*get_args(CrossEntropyMetric)),
    "denominator": DIVISOR,
    "label_smoothing": FRACTION,
    "lse_square_scale": NOT_NEGATIVE,
    "reduction": choice(Reduction),
}


def layout_of(tensor):
    """In words, what no op takes: a tensor that is nested or quantised, or has another layout than strided.
    None for all other tensors."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.is_quantized:
        return f"a quantised tensor of dtype {dtype_name(tensor.dtype)}"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    return None


def described(value):
    """A value as error messages print it."""
    if isinstance(value, torch.Tensor):
        if (layout := layout_of(value)) is not None:
            return layout  # The shape of a nested tensor is an error.
        return f"a tensor of shape {tuple(value.shape)} and dtype {dtype_name(value.dtype)}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int) and value.bit_length() > 128:
        # Python refuses to print an integer of more than 4300 digits.
        return f"an integer of {value.bit_length()} bits"
    return reprlib.repr(value)


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def check(op, name, value, rule, optional=False):
    """Raises TypeError for a value of another type, ValueError for one out of range, RuntimeError for a
    tensor of a layout that no op takes; None passes if ``optional``."""
    if value is None and optional:
        return
    if not rule.has_type(value):
        kind, beyond = TypeError, ""
    elif isinstance(value, torch.Tensor) and layout_of(value) is not None:
        raise RuntimeError(f"{op}: {name} is {layout_of(value)}, expected a dense tensor (torch.strided)")
    elif rule.in_range is not None and not rule.in_range(value):
        kind, beyond = ValueError, "" if rule.beyond is None else rule.beyond(value)
    else:
        return
    expected = f"{rule.expected} or None" if optional else rule.expected
    raise kind(f"{op}: {name} is {described(value)}, expected {expected}{beyond}")


# Exceptions that ops raise for arguments they cannot take.
_OF_OPS = (TypeError, AttributeError, RuntimeError, ValueError, OverflowError)
# Messages of torch about tensors that are not all DTensors on one mesh.
_OF_TORCH = re.compile("mixed torch.Tensor and DTensor|different mesh|cross-mesh|Cannot find device mesh")
# The message of torch 2.10 about an op without a rule, where it does not raise NotImplementedError.
_NO_RULE = re.compile("Sharding propagation failed for liger_losses")


def _is_about_dtensors(raised):
    about = isinstance(raised, (MixedTensors, NotImplementedError)) or _OF_TORCH.search(str(raised))
    return about or _has_no_rule(raised)


def _has_no_rule(raised):
    return isinstance(raised, NotImplementedError) or _NO_RULE.search(str(raised)) is not None


def check_one_mesh(op, given, raised):
    """Raises :class:`MixedTensors` for tensors that are not all DTensors on one mesh, by the caller's names.

    Args:
        given: arguments by name, in the order in which they are declared.
        raised: what the call has raised, one of :func:`_is_about_dtensors`.
    """
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    first, mesh = next((name, value.device_mesh) for name, value in tensors.items() if is_dtensor(value))
    for name, value in tensors.items():
        if is_dtensor(value):
            if value.device_mesh != mesh:
                raise MixedTensors(
                    f"{op}: {name} is on {value.device_mesh}, expected the mesh of {first}, {mesh}"
                ) from raised
        elif value.numel() != 1:
            raise MixedTensors(
                f"{op}: {name} is a plain tensor and {first} a DTensor, expected a DTensor on {mesh}: use "
                "torch.distributed.tensor.distribute_tensor or DTensor.from_local"
            ) from raised
    if _has_no_rule(raised):
        raise MixedTensors(f"{op}: {first} is a DTensor, expected plain tensors, of the process") from raised


def arguments(
    *,
    late: bool = False,
    enters: bool = False,
    casts: bool = False,
    optional: tuple[str, ...] = (),
    used_by: dict[str, tuple[str, ...]] | None = None,
    **rules: Rule,
) -> Callable[[_Callable], _Callable]:
    """Decorator of a public function or method: checks its arguments by ``rules``, :data:`TENSOR` being the
    default.

    Rules without an argument of their name are ignored, so functions can share groups of rules. An argument
    may be None if that is its default or if ``optional`` names it.

    Args:
        late: check only after the function has raised, to name the argument in the message. For ops whose
            host time counts; the op itself must refuse everything that the rules refuse. A RuntimeError of
            the op about an argument that has a rule, such as a number of groups that does not divide the
            channels, becomes a ValueError.
        enters: plain eager calls enter C++ where liger._C is loaded, instead of the function
            (:func:`.nodes.entry_of_function`). With ``late``.
        casts: the function casts its arguments under autocast on a GPU, so those calls do not enter.
        used_by: options that only some values of the argument ``loss_type`` read, and these; others do not
            check their ranges.

    The attribute ``liger_checks`` of the result has ``late`` and ``used_by``. Messages begin with the name of
    the function or, for a method, of the class.
    """

    def decorate(function: _Callable) -> _Callable:
        parameters = inspect.signature(function).parameters
        of_method = next(iter(parameters)) == "self"
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        known = {
            name: (name, rules.get(name, TENSOR), parameter.default is None or name in optional)
            for name, parameter in parameters.items()
            if name != "self" and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
        in_order = tuple(known[name] for name in known if parameters[name].kind in by_position)

        def check_all(args, keywords):
            op = type(args[0]).__name__ if of_method else function.__name__
            known = known_for(keywords)
            for (name, rule, may_be_none), value in zip(in_order, args[of_method:], strict=False):
                check(op, name, value, rule, may_be_none)
            for given, value in keywords.items():
                # The call itself raises TypeError for an unknown keyword.
                if given in known:
                    name, rule, may_be_none = known[given]
                    check(op, name, value, rule, may_be_none)

        def known_for(keywords):
            """``known`` without the ranges of options that the loss type does not read."""
            if not used_by:
                return known
            loss_type = keywords.get("loss_type", parameters["loss_type"].default)
            unused = [name for name, types in used_by.items() if loss_type not in types]
            return known | {
                name: (name, known[name][1]._replace(in_range=None), known[name][2]) for name in unused
            }

        def explain(args, keywords, raised):
            if not _is_about_dtensors(raised):
                return
            given = dict(zip((name for name, _, _ in in_order), args[of_method:], strict=False)) | keywords
            if of_method and isinstance(args[0], torch.nn.Module):
                given |= dict(args[0].named_parameters())
            if any(map(is_dtensor, given.values())):
                check_one_mesh(type(args[0]).__name__ if of_method else function.__name__, given, raised)

        @functools.wraps(function)
        def checked(*args, **keywords):
            check_all(args, keywords)
            try:
                return function(*args, **keywords)
            except _OF_OPS as raised:
                explain(args, keywords, raised)
                raise

        enter = entry_of_function(function, casts) if enters else None

        @functools.wraps(function)
        def explained(*args, **keywords):
            try:
                if not is_dynamo_compiling() and enter is not None:
                    results = enter(*args, **keywords)
                    if results is not NotImplemented:
                        return results
                return function(*args, **keywords)
            except _OF_OPS as raised:
                check_all(args, keywords)
                explain(args, keywords, raised)
                found = re.match(rf"{function.__name__}: (\w+) is ", str(raised))
                if found and found[1] in rules:
                    raise ValueError(str(raised).splitlines()[0]) from None
                raise

        decorated: Any = explained if late else checked
        decorated.liger_checks = {"late": late, "used_by": used_by or {}}
        return cast(_Callable, decorated)

    return decorate
