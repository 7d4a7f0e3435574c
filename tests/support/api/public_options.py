# SPDX-License-Identifier: BSD-3-Clause
"""Every option of every public callable, at a value that is not its default, as a :class:`Problem`.

The options come from the signatures and from tests/support/api/public_callables. A flag takes its other
value, a choice each of its others, a number 0.25; ``VALUES`` has all other options, so that a new one fails
until it has an entry.
"""

import collections.abc
import inspect
import typing
from dataclasses import dataclass

import torch
from public_callables import CASES, arguments
from public_callables.case import HIDDEN, IGNORED, VOCAB

import liger
from liger.losses import FusedLinearLoss

# The first case of each public callable.
FIRST = {case.public: name for name, case in reversed(CASES.items())}
# Of these any object may be right, and torch judges them.
OPAQUE = {"device", "function", "arguments", "keywords", "parameters"}
# Not options of one process: tests/ops/vocab/test_vocab_parallel.py.
SHARDS = {"group", "vocab_start", "vocab_size"}
# Not options: what a callable computes, and where its parameters are.
ARGUMENTS = {*OPAQUE, *SHARDS, "dtype", "dim"}
# Options with an effect beyond the results.
EFFECTS = {"accumulate_grad_weight", "inplace"}
# What constructors need, by the names of their arguments.
SIZES = {
    "normalized_shape": HIDDEN, "hidden_size": HIDDEN, "intermediate_size": 24, "num_experts": 4, "vocab_size": VOCAB,
    "num_groups": 4, "num_channels": HIDDEN,
}  # fmt: skip


def public(name):
    found = liger
    for part in name.split("."):
        found = getattr(found, part)
    return found


def parameters_but(left_out, function):
    return {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("self", *left_out)
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def parameters_of(function):
    return parameters_but(ARGUMENTS, function)


def constructor_but(left_out, cls):
    """The options of a class, and of those that it hands the rest to."""
    found = {}
    for base in cls.__mro__:
        if base.__module__.startswith("liger.") and "__init__" in vars(base):
            found = parameters_but(left_out, base.__init__) | found
    return found


def constructor_of(cls):
    found = constructor_but(ARGUMENTS, cls)
    if cls is liger.nn.LMHeadLoss:
        found = constructor_of(liger.nn.FusedLinearCrossEntropyLoss) | found
        del found["weight"]  # ce_weight.
    return found


# --- values -------------------------------------------------------------------------------------------------


def _like(name, scale=1.0):
    """A float tensor in the shape of another argument."""
    return lambda given: scale * torch.rand(given[name].shape)


def _mask(given):
    target = next(given[name] for name in _TARGETS if name in given)
    return (torch.arange(target.numel()) % 3 != 1).view(target.shape)


def _normal(*shape):
    return lambda given: torch.randn(shape)


def _hidden_of(given):
    return next(given[name] for name in ("input", "hidden") if name in given)


def _lora(given):
    return {"lora_a": torch.randn(3, HIDDEN), "lora_b": torch.randn(VOCAB, 3), "lora_scale": 0.7}


def _reference(given):
    names = ("ref_input", "ref_weight", "ref_bias")
    shapes = (_hidden_of(given).shape, (VOCAB, HIDDEN), (VOCAB,))
    return {name: torch.randn(shape) for name, shape in zip(names, shapes, strict=True)}


def _no_reference(given):
    return {name: None for name in ("ref_input", "ref_weight", "ref_bias") if name in given}


def _other_reference(given):
    return _no_reference(given) or _reference(given)


def _ignored_three(given):
    return {name: torch.where(given[name] == IGNORED, 3, given[name]) for name in _TARGETS if name in given}


def _packed(given):
    """The sequences of a batch one after the other."""
    rows, length = _hidden_of(given).shape[:2]
    found = {"cu_seqlens": torch.arange(rows + 1) * length, "max_length": length}
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.shape[:2] == (rows, length):
            found[name] = value.detach().flatten(0, 1).requires_grad_(value.requires_grad)
    return found


def _heads_second(given):
    return {name: given[name].detach().transpose(1, 2).contiguous() for name in ("q", "k")}


def _transposed(given):
    return {
        name: given[name].detach().transpose(1, 2).contiguous()
        for name in ("gate_up_proj", "down_proj")
        if name in given
    }


_TARGETS = ("target", "targets")
_LISTED = "in WITH"  # The value is among what the option takes along.
_DIVISORS = [3.5, torch.tensor(2.5)]
# Values by the name of the option; a function makes one from the other arguments.
VALUES = {
    "accum_dtype": [torch.float32],
    "logits_dtype": [torch.float32],
    "ignore_index": [3],
    "memory_budget": [2 * VOCAB * 4],
    "num_shards": [3],
    "group_size": [4],
    "max_completion_length": [7],
    "max_length": [],  # With cu_seqlens.
    "lora_scale": [],  # With lora_a.
    "lora_b": [],
    "ref_weight": [],  # With ref_input.
    "ref_bias": [],
    "softcap": [5.0],
    "limit": [1.0],
    "delta": [1.5],
    "recompute": [True, False],
    "denominator": _DIVISORS,
    "nll_denominator": _DIVISORS,
    "kl": [0.3, torch.tensor(0.2)],
    "ce_weight": [lambda given: 0.5 + torch.rand(VOCAB)],
    "weight": [lambda given: 0.5 + torch.rand(VOCAB)],
    "token_weight": [_like("target")],
    "vllm_is_ratio": [_like("target")],
    "mask": [_mask],
    "nll_mask": [_mask],
    "nll_target": [lambda given: given["target"].clamp_min(0)],
    "ref_logps": [lambda given: -1.0 - torch.rand(given["target"].shape)],
    "bias": [_normal(VOCAB)],
    "teacher_bias": [_normal(VOCAB)],
    "teacher_logits": [lambda given: torch.randn(*given["input"].shape[:-1], VOCAB)],
    "gate_bias": [_normal(24)],
    "up_bias": [_normal(24)],
    "down_bias": [_normal(HIDDEN)],
    "gate_up_proj_bias": [_normal(4, 48)],
    "down_proj_bias": [_normal(4, HIDDEN)],
    "lora_a": [_LISTED],
    "ref_input": [_LISTED],
    "cu_seqlens": [_LISTED],
}
# Numbers that may be negative, or infinite.
SIGNED = {"offset", "ignore_index", "gamma", "entropy_coef", "kl", "lora_scale", "dim"}
# Numbers that divide, which have no place for subnormal ones: their reciprocals overflow.
DIVISORS = {
    *("softcap", "temperature", "delta", "discopop_tau", "sapo_temperature_pos", "sapo_temperature_neg"),
    *("limit", "denominator"),
}
COUNTS = {"memory_budget", "num_shards", "max_completion_length", "group_size"}
# Arguments that an option takes along.
WITH = {
    "ignore_index": _ignored_three,
    "interleaved_sections": lambda given: {"mrope_section": [3, 3, 2]},
    "lora_a": _lora,
    "ref_input": _reference,
    "ref_logps": _no_reference,
    "teacher_logits": lambda given: dict.fromkeys(("teacher_input", "teacher_weight", "teacher_bias")),
    "cu_seqlens": _packed,
    "is_transposed": _transposed,
    "unsqueeze_dim": _heads_second,
    "use_ref_model": _other_reference,
}


def _values(name, parameter, hint):
    default = parameter.default
    if name == "metrics":
        names = typing.get_args(typing.get_args(hint)[0])
        return [*((name,) for name in names), names]
    if isinstance(default, bool):
        return [not default]
    if name in VALUES:
        return VALUES[name]
    if typing.get_origin(hint) is collections.abc.Sequence:
        # All names together.
        return [typing.get_args(typing.get_args(hint)[0])]
    choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    if choices:
        return [choice for choice in choices if choice != default]
    if isinstance(default, float) or typing.get_args(hint)[:1] == (float,):
        return [0.25]
    raise AssertionError(f"no value for the option {name}: add one to VALUES in {__file__}")


def _options_of(function, given):
    hints = typing.get_type_hints(function)
    for name, parameter in parameters_of(function).items():
        if parameter.default is parameter.empty or isinstance(given.get(name), torch.Tensor):
            continue
        for value in _values(name, parameter, hints.get(name)):
            yield name, value


# --- problems -----------------------------------------------------------------------------------------------


class _Called(torch.nn.Module):
    """A function or a loss of tensors by name; those that a layer would own are parameters."""

    def __init__(self, function, given):
        super().__init__()
        self.function = function
        self.options = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
        owned = [name for name, t in given.items() if name not in self.options and _is_parameter(name, t)]
        self.owned = owned
        self.own = torch.nn.ParameterDict({name: torch.nn.Parameter(given[name].detach()) for name in owned})
        self.names = [name for name in given if name not in self.options and name not in owned]

    def forward(self, *inputs):
        # Neither dict(zip()) nor **self.own, which torch.compile of torch 2.11 does not trace.
        given = {name: value for name, value in zip(self.names, inputs, strict=True)}
        own = {name: self.own[name] for name in self.owned}
        return self.function(**given, **own, **self.options)


class _OfModule(torch.nn.Module):
    """A module whose arguments come in the order of names."""

    def __init__(self, module, given):
        super().__init__()
        self.module = module
        self.options = {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)}
        self.names = [name for name in given if name not in self.options]

    def forward(self, *inputs):
        return self.module(**dict(zip(self.names, inputs, strict=True)), **self.options)


def _is_parameter(name, tensor):
    parts = name.split("_")
    layer = parts[-1] in ("weight", "bias", "proj") or name in ("lora_a", "lora_b")
    return layer and tensor.requires_grad and name != "token_weight"


@dataclass
class Problem:
    """A call of a public callable.

    Attributes:
        module: a module with the parameters.
        inputs: its tensors, of which those with a gradient require grad.
    """

    module: torch.nn.Module
    inputs: tuple


@dataclass(frozen=True)
class Setting:
    """An option at one value; ``option`` None: all defaults."""

    public: str
    option: str | None = None
    value: object = None
    of_constructor: bool = False

    def __str__(self):
        if self.option is None:
            return self.public
        value = self.value
        text = value if isinstance(value, (bool, int, float, str, torch.dtype)) else type(value).__name__
        if self.option == "metrics":
            text = "+".join(value)
        return f"{self.public} {self.option}={text}"


def settings():
    """All defaults, then one option at a time, of every public callable."""
    for name, case in FIRST.items():
        yield Setting(name)
        given, found = arguments(case), public(name)
        if isinstance(found, type):
            hints = {}
            for base in reversed(found.__mro__):
                if base.__module__.startswith("liger."):
                    hints |= typing.get_type_hints(base.__init__)
            if found is liger.nn.LMHeadLoss:
                hints = typing.get_type_hints(liger.nn.FusedLinearCrossEntropyLoss.__init__) | hints
            for option, parameter in constructor_of(found).items():
                if parameter.default is not parameter.empty and option not in SIZES:
                    for value in _values(option, parameter, hints.get(option)):
                        if not _is_decided(found, option, value):
                            yield Setting(name, option, value, True)
        for option, value in _options_of(found.forward if isinstance(found, type) else found, given):
            yield Setting(name, option, value)


def _is_decided(cls, option, value):
    """True if a class refuses an option of its base, since it sets it itself."""
    try:
        _constructed(cls, {option: value})
    except TypeError as error:
        return f"multiple values for keyword argument '{option}'" in str(error)
    return False


def _constructed(cls, options):
    taken = inspect.signature(cls).parameters
    required = {name for name, parameter in taken.items() if parameter.default is parameter.empty}
    needed = {name: size for name, size in SIZES.items() if name in required}
    if "num_shards" in taken:
        needed["num_shards"] = 2
    module = cls(**{**needed, **options})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.4)
    return module


def problem(setting):
    torch.manual_seed(0)
    given, found = arguments(FIRST[setting.public]), public(setting.public)
    if isinstance(found, type):
        own = inspect.signature(found.forward).parameters
        given = {name: value for name, value in given.items() if name in own}
    options = {}
    if setting.option is not None:
        if setting.option in WITH:
            given |= WITH[setting.option](given)
        value = setting.value(given) if callable(setting.value) else setting.value
        if value is not _LISTED:
            (options if setting.of_constructor else given)[setting.option] = value
        if setting.option in ("ref_input", "ref_logps") and "use_ref_model" in constructor_of(found):
            options["use_ref_model"] = True
    for name, value in given.items():
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        if floats and (name in CASES[FIRST[setting.public]].differentiable or name in _GETS_GRADIENT):
            value.requires_grad_()
    given = {name: value for name, value in given.items() if value is not None}
    if not isinstance(found, type):
        call = found if setting.public != "tiled" else _tiled
        module = _Called(call, given)
    elif issubclass(found, FusedLinearLoss) or not any(
        True for _ in _constructed(found, options).parameters()
    ):
        module = _Called(_constructed(found, options), given)
    else:
        module = _OfModule(_constructed(found, options), given)
    inputs = tuple(given[name] for name in module.names)
    return Problem(module, inputs)


# Tensors that an option adds, and that get a gradient.
_GETS_GRADIENT = {
    "bias", "lora_a", "lora_b", "gate_bias", "up_bias", "down_bias", "gate_up_proj_bias", "down_proj_bias",
}  # fmt: skip


def _tiled(x, weight, **options):
    return liger.tiled(
        lambda part: torch.nn.functional.silu(part @ weight.t()), x, parameters=(weight,), **options
    )
