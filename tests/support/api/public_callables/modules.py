# SPDX-License-Identifier: BSD-3-Clause
"""Modules of liger.nn."""

import inspect
import threading

import torch

from liger import nn

from .case import CASES, HIDDEN, IGNORED, VOCAB, X, add, normal, random_target, tensors
from .ops import experts, rotary
from .rows import biased_head, ignored_rows, logits_inputs


class _ModuleOfThread(threading.local):
    """A module per thread: functional_call puts the parameters into the module while it runs."""

    def __init__(self, build):
        self.module = build(device="meta")


def _module(build, inputs, parameters):
    """(call, make) of a module: ``inputs`` makes its arguments, ``parameters`` are theirs by name."""
    local = _ModuleOfThread(build)
    shapes = {name: p.shape for name, p in local.module.named_parameters()}
    assert set(shapes) == set(parameters.split()), shapes

    def call(**given):
        own = {name: given[name.replace(".", "_")] for name in shapes}
        rest = {k: v for k, v in given.items() if k not in {name.replace(".", "_") for name in shapes}}
        return torch.func.functional_call(local.module, own, tuple(rest.values()))

    def make(device, dtype):
        own = {
            name.replace(".", "_"): normal(device, dtype, *shape, scale=0.5) for name, shape in shapes.items()
        }
        return inputs(device, dtype) | own

    return call, make


def _nn(name, build, inputs, parameters, differentiable, **more):
    call, make = _module(build, inputs, parameters)
    names = " ".join([differentiable, *(p.replace(".", "_") for p in parameters.split())])
    add(f"nn.{name}", call, make, names, **more)


# Arguments of constructors, of the modules whose forward takes tensors of the shape of x alone.
_SIZES = {"normalized_shape": HIDDEN, "hidden_size": HIDDEN, "intermediate_size": 24}


def _of_rows(name):
    """The case of a module that has no other: its sizes are in ``_SIZES``, all its inputs have one
    shape."""
    cls = getattr(nn, name)
    taken = inspect.signature(cls).parameters
    sizes = {size: value for size, value in _SIZES.items() if size in taken}
    inputs = list(inspect.signature(cls.forward).parameters)[1:]
    # A module without parameters has neither.
    kinds = {"device", "dtype"} & taken.keys()

    def build(**kinds_given):
        return cls(**sizes, **{kind: kinds_given[kind] for kind in kinds & kinds_given.keys()})

    parameters = " ".join(name for name, _ in build(device="meta").named_parameters())
    _nn(name, build, tensors(**dict.fromkeys(inputs, X)), parameters, " ".join(inputs))


_x = tensors(x=X)
_PROJECTIONS = "gate_proj.weight up_proj.weight down_proj.weight"
_nn("GroupNorm", lambda **kw: nn.GroupNorm(4, HIDDEN, **kw), tensors(x=(3, HIDDEN, 5)), "weight bias", "x")
_nn("TiledSwiGLUMLP", lambda **kw: nn.TiledSwiGLUMLP(HIDDEN, 24, num_shards=2, **kw), _x, _PROJECTIONS, "x")
_nn("TiledGEGLUMLP", lambda **kw: nn.TiledGEGLUMLP(HIDDEN, 24, num_shards=2, **kw), _x, _PROJECTIONS, "x")
_nn(
    "GroupedExperts",
    lambda **kw: nn.GroupedExperts(4, HIDDEN, 24, True, **kw),
    lambda device, dtype: {
        name: experts(device, dtype)[name] for name in ("x", "top_k_index", "top_k_weights")
    },
    "gate_up_proj down_proj gate_up_proj_bias down_proj_bias",
    "x top_k_weights",
)
_nn(
    "LMHeadLoss",
    lambda **kw: nn.LMHeadLoss(HIDDEN, VOCAB, **kw),
    lambda device, dtype: {"input": normal(device, dtype, 7, HIDDEN), "target": random_target(device, 7)},
    "weight",
    "input",
    ignored=lambda given: {"input": given["target"] == IGNORED},
    loss=True,
)
add("nn.ApplyRotaryEmb", lambda q, k, cos, sin: nn.ApplyRotaryEmb()(q, k, cos, sin), rotary, "q k")
add(
    "nn.CrossEntropyLoss", lambda **given: nn.CrossEntropyLoss()(**given), logits_inputs, "logits",
    ignored=ignored_rows("logits", "token_weight"), loss=True,
)  # fmt: skip
add(
    "nn.FusedLinearCrossEntropyLoss", lambda **given: nn.FusedLinearCrossEntropyLoss()(**given), biased_head,
    "input weight bias", ignored=ignored_rows("input"), loss=True,
)  # fmt: skip

for _name in nn.__all__:
    if f"nn.{_name}" not in CASES:
        _of_rows(_name)
