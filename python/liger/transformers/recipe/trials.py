# SPDX-License-Identifier: BSD-3-Clause
"""Parts of a trial: stand-ins for modules, numbers of several scales, comparison of results."""

import contextlib
import copy
import logging

import torch
from torch import nn

from .local import Local

# Scales along the first dimension of the inputs. Small ones reveal eps, large ones a clamp.
SCALES = (1.0, 1e-3, 30.0, 1e4)

# Of activations that the ops take.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Exceptions that the code of a model may raise on a stand-in.
_MISUSE = AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError
ERRORS = (ArithmeticError, RuntimeError, *_MISUSE)


IN_TRAINING = "in training it computes something else than in evaluation, by dropout for example"
OTHER_GRADIENTS = "its gradients differ from the op's"
UNKNOWN = "its forward needs more than a trial can give it, so that nothing is known of what it computes"

logger = logging.getLogger("liger.transformers")


@contextlib.contextmanager
def without_modes():
    """Switches off the modes of the caller that would change a trial: the default device (a model may be
    constructed on the meta device), inference mode, autograd and autocast. Restores the random generator
    afterwards."""
    # A default device takes every call of torch through Python, so it is set where there is another one.
    default = torch.empty(0).device.type
    with (
        contextlib.nullcontext() if default == "cpu" else torch.device("cpu"),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
    ):
        yield


def no_trial(module, error):
    """The reason for a module that raises an error in its trial."""
    # The error message is about the stand-in, not about the model, so it is logged only.
    logger.debug("liger: no trial of a %s: %s: %s", type(module).__name__, type(error).__name__, error)
    return UNKNOWN


# Hooks, which a stand-in that is called must not have: they belong to its module.
_AFTER_FORWARD = "_forward_hooks _forward_hooks_with_kwargs _forward_hooks_always_called"
_BEFORE_FORWARD = "_forward_pre_hooks _forward_pre_hooks_with_kwargs"
_HOOKS = f"{_AFTER_FORWARD} {_BEFORE_FORWARD} _backward_hooks _backward_pre_hooks"
NO_HOOKS: dict[str, dict] = {name: {} for name in _HOOKS.split()}


class Projection:
    """Stand-in for a linear layer of an MLP."""

    bias = None

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x):
        return nn.functional.linear(x, self.weight)


def original(module):
    cls = type(module)
    return getattr(cls, "_liger_original", cls)


def stand_in(module, **attributes):
    """An object of the module's original class with its attributes, but without its tensors and submodules.

    No constructor is called: ZeRO-3 (while it partitions parameters) and FSDP2 intercept constructors.
    """
    result = object.__new__(original(module))
    result.__dict__.update(module.__dict__)
    result.__dict__.update(_parameters={}, _buffers={}, _modules={}, training=False)
    for name in ("forward", "_old_forward", "_compiled_call_impl"):
        result.__dict__.pop(name, None)
    result.__dict__.update(attributes)
    return result


def in_training(module):
    """A copy of a stand-in in training mode, as are copies of its modules, such as an activation."""
    copied = object.__new__(type(module))
    copied.__dict__.update(module.__dict__, training=True)
    for name, value in module.__dict__.items():
        if isinstance(value, nn.Module):
            copied.__dict__[name] = copy.deepcopy(value).train()
    return copied


def in_both_modes(stand_in, *args):
    """(output in evaluation, output in training) of the module's own forward."""
    return type(stand_in).forward(stand_in, *args), type(stand_in).forward(in_training(stand_in), *args)


def one_tensor(expected, training):
    """The result if it is one tensor and the same in training; else the reason as text."""
    if not isinstance(expected, torch.Tensor):
        return "it does not return one tensor"
    return expected if torch.equal(expected, training) else IN_TRAINING


def result_of(module, stand_in, *args):
    """The result of a module's stand-in for these arguments, or the reason why it says nothing, as text."""
    try:
        return one_tensor(*in_both_modes(stand_in, *args))
    except ERRORS as error:
        return no_trial(module, error)


class Random:
    """Random numbers from a generator with a fixed seed; the global generator does not advance."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def of_all_scales(self, *shape):
        """``(len(SCALES), *shape)``."""
        scales = torch.tensor(SCALES, dtype=torch.float32, device="cpu")
        return self(len(SCALES), *shape) * scales.view(-1, *(1 for _ in shape))


def error(actual, expected):
    """The largest relative error of any scale, divided by 4 eps of the dtype.

    Infinite if shape or dtype differ, or if a result is not finite.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    difference, magnitude = (
        (t.float().flatten(1).abs().amax(1)) for t in (actual.float() - expected.float(), expected)
    )
    errors = difference / (magnitude * torch.finfo(expected.dtype).eps * 4).clamp_min(1e-30)
    return errors.nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()


# The autograd of a module's code may round after each of a dozen operations; a missing term is far larger.
GRADIENT_TOLERANCE = 16


def same_gradients(ours, theirs, *inputs):
    """True if two functions of the inputs give the same gradients, apart from rounding.

    The first input has the scales of :class:`Random` along its first dimension; inputs may be None.
    """
    results = []
    with torch.enable_grad():
        for function in (ours, theirs):
            leaves = [t if t is None else t.detach().clone().requires_grad_() for t in inputs]
            output = function(*leaves)
            given = [t for t in leaves if t is not None]
            if not output.requires_grad:
                return False
            upstream = Random()(*output.shape).to(output.dtype)
            results.append(torch.autograd.grad(output, given, upstream, allow_unused=True))
    for number, (our, their) in enumerate(zip(*results, strict=True)):
        if (our is None) != (their is None):
            return False
        if our is not None:
            our, their = (our, their) if number == 0 else (our[None], their[None])
            if error(our, their) > GRADIENT_TOLERANCE:
                return False
    return True


_memory = Local()


def remember():
    """Inside, :func:`remembered` runs each trial once: a model has many modules of one class."""
    return _memory.holding({})


def remembered(trial, *key, unless=()):
    """``trial()``, or its earlier result for the same key. The key has everything that the result depends on.

    ``unless``: if it is not empty after the trial, the result depends on more.
    """
    memory = _memory.value
    if memory is None:
        return trial()
    if key in memory:
        return memory[key]
    result = trial()
    if not unless:
        memory[key] = result
    return result


_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


def settings(module):
    """The attributes of a module that its forward may depend on, without its tensors, as a part of a key."""
    shown = {name: value for name, value in module.__dict__.items() if name not in _OF_EVERY_MODULE}
    tensors = {**module._parameters, **module._buffers}
    return (
        *((n, repr(v) if isinstance(v, float | int | str | tuple) else id(v)) for n, v in shown.items()),
        *((n, None if t is None else t.dim()) for n, t in tensors.items()),
    )
