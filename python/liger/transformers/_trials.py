"""What a trial needs: stand-ins for modules, numbers of every size, and the comparison of two results."""

import copy

import torch
from torch import nn

# The first dimension of all numbers of a trial. Eps shows with the small ones, a clamp with the large ones.
SCALES = (1.0, 1e-3, 30.0, 1e4)

# What code of a model may raise when it runs on a stand-in.
ERRORS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Projection:
    """What a linear layer looks like to the code of an MLP."""

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
    """An object of the module's class with its settings, but with none of its tensors and submodules.

    Made without calling any constructor: those are intercepted while ZeRO-3 partitions parameters, and by FSDP2.
    """
    made = object.__new__(original(module))
    made.__dict__.update(module.__dict__)
    made.__dict__.update(_parameters={}, _buffers={}, _modules={}, training=False)
    made.__dict__.update(attributes)
    return made


def in_training(made):
    """The same stand-in in training, as are the modules that were given to it, such as an activation."""
    copied = object.__new__(type(made))
    copied.__dict__.update(made.__dict__, training=True)
    for name, value in made.__dict__.items():
        if isinstance(value, nn.Module):
            copied.__dict__[name] = copy.deepcopy(value).train()
    return copied


class Random:
    """The same numbers in every trial, and none taken from the global generator."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def of_all_scales(self, *shape):
        """``(len(SCALES), *shape)``."""
        scales = torch.tensor(SCALES, dtype=torch.float32, device="cpu")
        return self(len(SCALES), *shape) * scales.view(-1, *(1 for _ in shape))


def error(actual, expected):
    """The largest error of any scale in units of four roundings of the dtype; infinite where shape or dtype differ, or
    where the result is not finite."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    difference, size = (
        (t.float().flatten(1).abs().amax(1)) for t in (actual.float() - expected.float(), expected)
    )
    units = difference / (size * torch.finfo(expected.dtype).eps * 4).clamp_min(1e-30)
    return units.nan_to_num(nan=float("inf"), posinf=float("inf")).max().item()
