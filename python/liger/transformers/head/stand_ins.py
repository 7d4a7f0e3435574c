# SPDX-License-Identifier: BSD-3-Clause
"""Stand-ins of a trial for the modules around the loss: they return fixed results, or record."""

import inspect
from dataclasses import dataclass

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import MoeModelOutputWithPast

from ..recipe import trials
from .deferred_logits import DeferredLogits
from .loss_call import LossCall

HIDDEN = 16


class Undecided(RuntimeError):
    """A stand-in was used in a way that decides nothing about the model."""


@dataclass
class _BackboneOutput(MoeModelOutputWithPast):
    """The output of a stand-in for the backbone; every other attribute is None."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Stub:
    """Stand-in for a module other than the head: its plain attributes, but artificial results.

    It returns hidden states unchanged, and for every other input new hidden states.
    """

    def __init__(self, module, hidden, classes):
        self._module, self._hidden, self._classes = module, hidden, classes

    def __call__(self, *args, **kwargs):
        floats = [
            x
            for x in (*args, *kwargs.values())
            if isinstance(x, DeferredLogits) or (isinstance(x, torch.Tensor) and x.is_floating_point())
        ]
        if any(not x.dim() or x.shape[-1] in (1, self._classes) for x in floats):
            if inspect.ismethod(self._module) or next(_tensors(self._module), None) is not None:
                raise Undecided("a submodule with parameters was called with logits")
            return trials.original(self._module).forward(self._module, *args, **kwargs)
        if args and isinstance(args[0], torch.Tensor) and args[0].shape[-1:] == (HIDDEN,):
            return args[0]
        return _BackboneOutput(last_hidden_state=self._hidden)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._module, name)
        if isinstance(value, torch.Tensor):
            raise Undecided(f"the tensor {name} of a submodule was read")
        if isinstance(value, nn.Module) or inspect.ismethod(value):
            return Stub(value, self._hidden, self._classes)
        return value


def _tensors(module):
    yield from module.parameters()
    yield from module.buffers()


class Head:
    """Stand-in for the lm_head. It records what it reads and computes."""

    _forward_hooks = ()

    def __init__(self, module, weight, bias):
        self._module, self.weight, self.bias, self.calls = module, weight, bias, []
        self.in_features, self.out_features = HIDDEN, len(weight)

    def __getattr__(self, name):
        value = getattr(self.__dict__["_module"], name)
        if isinstance(value, (torch.Tensor, nn.Module)):
            raise Undecided(f"{name} of the head was read")
        return value

    def __call__(self, x):
        loss = LossCall.at_head(self, x, self.weight, self.bias)
        output = nn.functional.linear(x, self.weight, self.bias) if loss is None else loss
        self.calls.append((x, output))
        return LossCall.result_of_call(output)


_CROSS_ENTROPY = inspect.signature(nn.functional.cross_entropy)


class CrossEntropies(TorchFunctionMode):
    """Records the calls of torch's cross entropy with logits of some number of classes."""

    def __init__(self, record, classes):
        super().__init__()
        self.record, self.classes = record, classes

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is nn.functional.cross_entropy and not self.paused:
            bound = _CROSS_ENTROPY.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            logits, target = given.pop("input"), given.pop("target")
            if logits.shape[-1] == self.classes:
                self.record(logits, target, given)
        return function(*args, **kwargs)

    paused = False


# The options of torch's cross entropy that the loss of a head has.
DEFAULTS = {name: p.default for name, p in _CROSS_ENTROPY.parameters.items() if p.default is not p.empty}
