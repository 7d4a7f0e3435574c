"""Parts of a trial: stand-ins for modules, random numbers of several scales, the comparison of two results."""

import copy

import torch
from torch import nn

# Scales along the first dimension of the inputs. Small ones reveal eps, large ones a clamp.
SCALES = (1.0, 1e-3, 30.0, 1e4)

# Exceptions that the code of a model may raise on a stand-in.
ERRORS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


# Attributes of a stand-in that is called, rather than its forward: hooks belong to the module that it stands for.
NO_HOOKS: dict[str, dict] = {
    name: {}
    for name in (
        "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
    )
}  # fmt: skip


class Projection:
    """Stand-in for a linear layer of an MLP."""

    _forward_hooks = ()
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
