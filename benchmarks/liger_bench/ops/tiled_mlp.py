# SPDX-License-Identifier: BSD-3-Clause
"""A SwiGLU MLP, forward and backward, against the same without shards in eager torch.

Modules are measured as a model uses them: ``backward()`` leaves the gradients in ``.grad``, as liger-kernel's
tiled MLP puts them nowhere else.
"""

from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import liger
import liger.nn

from ..candidates import liger_kernel, ours, peer, selected
from ..harness import Provider, Row, Work, normal
from ..reports.goals import EAGER, Goal

GOALS = (
    Goal("tiled_mlp 131072x4096x12288", f"x {EAGER}", 1.20, 3200),
    *(
        Goal(f"tiled_mlp {tokens}x4096x12288", f"x {EAGER}", bound, no_more_than=EAGER)
        for tokens, bound in ((32768, 1.20), (8192, 1.20), (2048, 1.25))
    ),
)

PROJECTIONS = ("gate", "up", "down")
TOKENS = (2048, 8192, 32768, 131072)
REFERENCE_ROWS = 2048
SHARDS = 4


class _Eager(torch.nn.Module):
    """The LlamaMLP of Hugging Face."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = torch.nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = torch.nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = torch.nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _untiled(config):
    return liger.nn.SwiGLUMLP.from_config(config, inplace=True)


def _liger_kernel(config, num_shards):
    return peer("liger_kernel.transformers.tiled_mlp", "LigerTiledSwiGLUMLP")(config, num_shards=num_shards)


def _work(make_module):
    """``make`` of a provider: a training step of the module that ``make_module(config)`` returns."""

    def make(inputs):
        intermediate, hidden = inputs["gate"].shape
        config = SimpleNamespace(hidden_size=hidden, intermediate_size=intermediate, hidden_act="silu")
        with torch.device("meta"):
            module = make_module(config)
        weights = {name: torch.nn.Parameter(inputs[name]) for name in PROJECTIONS}
        for name, weight in weights.items():
            getattr(module, f"{name}_proj").weight = weight
        leaves = {"x": inputs["x"].detach().requires_grad_(), **weights}

        def run():
            y = module(leaves["x"])
            y.backward(inputs["dy"])
            return {"y": y.detach(), **{f"d{name}": leaf.grad for name, leaf in leaves.items()}}

        def release():
            for leaf in leaves.values():
                leaf.grad = None

        return Work(run, release, release)

    return make


def _candidates(options):
    tiled = [
        *ours(options, liger.nn.TiledSwiGLUMLP.from_config),
        *ours(options, partial(liger.nn.TiledSwiGLUMLP.from_config, num_shards=SHARDS), f" {SHARDS} shards"),
        liger_kernel(partial(_liger_kernel, num_shards=SHARDS)),
    ]
    return selected(options, tiled), ours(options, _untiled, " untiled")


def _reference(inputs):
    """The float32 result, in blocks of rows."""
    weights = {name: inputs[name].float().requires_grad_() for name in PROJECTIONS}
    results = {"y": [], "dx": []}
    for x, dy in zip(*(inputs[name].split(REFERENCE_ROWS) for name in ("x", "dy")), strict=True):
        x = x.float().requires_grad_()
        y = F.linear(F.silu(F.linear(x, weights["gate"])) * F.linear(x, weights["up"]), weights["down"])
        y.backward(dy.float())
        results["y"].append(y.detach())
        results["dx"].append(x.grad)
    gradients = {f"d{name}": weight.grad for name, weight in weights.items()}
    return {**{name: torch.cat(parts) for name, parts in results.items()}, **gradients}


def _row(options, tokens, hidden, intermediate):
    def inputs():
        return {
            "x": normal(options, tokens, hidden),
            "dy": normal(options, tokens, hidden),
            "gate": normal(options, intermediate, hidden, std=hidden**-0.5),
            "up": normal(options, intermediate, hidden, std=hidden**-0.5),
            "down": normal(options, hidden, intermediate, std=intermediate**-0.5),
        }

    tiled, untiled = _candidates(options)
    compete = [Provider(c.name, _work(c.function), c.group, c.context, c.needs) for c in tiled]
    alone = [Provider(c.name, _work(c.function), "op alone", c.context) for c in untiled]
    return Row(
        "tiled_mlp",
        f"tiled_mlp {tokens}x{hidden}x{intermediate}",
        inputs,
        [*compete, *alone, Provider(EAGER, _work(_Eager), "ceiling")],
        _reference,
        rounds=7,
        burst=1,
        heat_ms=100,
        work="tiled_mlp forward and backward",
        shape={"tokens": tokens, "hidden size": hidden, "intermediate size": intermediate},
    )


def rows(options):
    hidden, intermediate = options.pick((4096, 12288), (4096, 12288), (16, 24))
    sizes = options.swept(TOKENS) if options.sweep else options.pick(TOKENS, TOKENS[1::2], (14,))
    for tokens in sizes:
        yield _row(options, tokens, hidden, intermediate)
