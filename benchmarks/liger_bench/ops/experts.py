# SPDX-License-Identifier: BSD-3-Clause
"""The gated experts of a mixture: forward, backward, both, vs. transformers and liger-kernel.

The ceiling is dense: as many rows through one expert, by cuBLAS GEMMs alone. Shapes are from Mixtral
8x7B, Qwen3 30B-A3B and gpt-oss 20B.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch

import liger

from ..candidates import Candidate, liger_kernel, ours, peer, providers, selected
from ..devices.tuning import compile_in_parallel
from ..harness import FASTEST, Contest, Options, Provider, Row, Work, float32_reference, normal, works
from ..reports.goals import Goal

GOALS = (
    *(
        Goal(
            f"experts forward and backward {shape} 8192 tokens",
            "x dense GEMMs",
            bound,
            no_more_than="transformers eager",
        )
        for shape, bound in (("mixtral", 1.1), ("qwen3-moe", 1.4), ("gpt-oss", 1.35))
    ),
)

CEILING = "dense GEMMs"
GPT_OSS = {
    "activation": "gpt_oss", "is_transposed": True, "is_interleaved": True, "alpha": 1.702, "limit": 7.0,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer, and the class of transformers that has this form."""

    name: str
    experts: int
    choices: int
    hidden: int
    intermediate: int
    cls: str = "MixtralExperts"

    @property
    def is_gpt_oss(self):
        return self.cls.startswith("GptOss")

    @property
    def parameters(self):
        return ("gate_up_proj", "down_proj", *(BIASES if self.is_gpt_oss else ()))


BIASES = ("gate_up_proj_bias", "down_proj_bias")
SHAPES = (
    Shape("mixtral", 8, 2, 4096, 14336),
    Shape("qwen3-moe", 128, 8, 2048, 768),
    Shape("gpt-oss", 32, 4, 2880, 2880, "GptOssExperts"),
)
TINY = (Shape("mixtral", 4, 2, 16, 24), Shape("gpt-oss", 4, 2, 16, 16, "GptOssExperts"))


def _ours(shape, recompute, t):
    parameters = [t[name] for name in shape.parameters]
    options = GPT_OSS if shape.is_gpt_oss else {}
    return liger.grouped_experts(
        t["x"], t["index"], t["weights"], *parameters, **options, recompute=recompute
    )


def _transformers(shape, implementation):
    """The module of transformers, with the tensors of the row as parameters."""
    built = {}

    def run(t):
        if not built:
            family = "gpt_oss" if shape.is_gpt_oss else "mixtral"
            module = f"transformers.models.{family}"
            config = peer(module, "GptOssConfig" if shape.is_gpt_oss else "MixtralConfig")(
                hidden_size=shape.hidden,
                intermediate_size=shape.intermediate,
                num_local_experts=shape.experts,
            )
            config._experts_implementation = implementation
            with torch.device("meta"):
                built["module"] = peer(f"{module}.modeling_{family}", shape.cls)(config)
        parameters = {name: t[name] for name in shape.parameters}
        return torch.func.functional_call(built["module"], parameters, (t["x"], t["index"], t["weights"]))

    return run


def _liger_kernel(t):
    function = peer("liger_kernel.ops.fused_moe", "LigerFusedMoEFunction")
    if t["x"].is_cuda:
        compile_in_parallel(__name__, "tune")
    return _apply(function, t)


def _apply(function, t):
    return function.apply(t["x"], t["gate_up_proj"], t["down_proj"], t["index"].int(), t["weights"])


def _candidates(options, shape):
    needs = ("transformers",)
    eager, grouped = (_transformers(shape, name) for name in ("eager", "grouped_mm"))
    candidates = [
        *ours(options, partial(_ours, shape, False)),
        *ours(options, partial(_ours, shape, True), " recompute", works=("backward", "forward and backward")),
        *([] if shape.is_gpt_oss else [liger_kernel(_liger_kernel)]),
        Candidate("transformers eager", eager, needs=needs),
        Candidate("transformers grouped_mm", grouped, needs=needs),
    ]
    return selected(options, candidates), eager


def dense_work(shape, slots, x, name="forward and backward"):
    """The GEMMs of one expert over all slots: two in the forward, four in the backward. Random numbers, as
    the experts have: GEMMs of constants draw less power and are up to 10 % faster."""
    rows, inner, wide, first, second = (
        torch.randn(size, device=x.device, dtype=x.dtype)
        for size in (
            (slots, shape.hidden), (slots, shape.intermediate), (slots, 2 * shape.intermediate),
            (2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate),
        )
    )  # fmt: skip
    forward = [(rows, first.t()), (inner, second.t())]
    backward = [(rows, second), (rows.t(), inner), (wide, first), (wide.t(), rows)]
    pairs = {"forward": forward, "backward": backward, "forward and backward": forward + backward}[name]
    return lambda: [torch.mm(*pair) for pair in pairs]


def _dense(shape, name):
    def make(inputs):
        multiply = dense_work(shape, inputs["index"].numel(), inputs["x"], name)

        def run():
            multiply()
            return {}

        return Work(run)

    return Provider(CEILING, make, "ceiling")


def _inputs(options, shape, tokens):
    def make():
        experts, hidden, inner = shape.experts, shape.hidden, shape.intermediate
        scores, index = torch.rand(tokens, experts, device=options.device).topk(shape.choices, -1)
        gate_up, down = (2 * inner, hidden), (hidden, inner)
        if shape.is_gpt_oss:
            gate_up, down = gate_up[::-1], down[::-1]
        made = {
            "x": normal(options, tokens, hidden),
            "index": index,
            "weights": scores.softmax(-1),
            "gate_up_proj": normal(options, experts, *gate_up, std=hidden**-0.5),
            "down_proj": normal(options, experts, *down, std=inner**-0.5),
            "grad_y": normal(options, tokens, hidden),
        }
        if shape.is_gpt_oss:
            made |= {
                BIASES[0]: normal(options, experts, 2 * inner),
                BIASES[1]: normal(options, experts, hidden),
            }
        return made

    return make


def tune():
    """Compiles what liger-kernel compares, with few experts and tokens: their numbers do not choose."""
    function, options = peer("liger_kernel.ops.fused_moe", "LigerFusedMoEFunction"), Options()
    for shape in SHAPES:
        if not shape.is_gpt_oss:
            # Triton compiles multiples of 16 on their own.
            few = replace(shape, experts=16 if shape.experts % 16 == 0 else shape.choices)
            t = _inputs(options, few, 256)()
            leaves = [t[name].requires_grad_() for name in ("x", "weights", *shape.parameters)]
            torch.autograd.grad(_apply(function, t), leaves, t["grad_y"])


def _rows(options, shape, tokens):
    candidates, eager = _candidates(options, shape)
    for name, work in works(("y",), ("grad_y",), ("x", "weights", *shape.parameters)).items():
        taking_part = [c for c in candidates if not c.works or name in c.works]
        yield Row(
            "experts",
            f"experts {name} {shape.name} {tokens} tokens",
            _inputs(options, shape, tokens),
            [*providers(taking_part, *work), _dense(shape, name)],
            float32_reference(eager, *work),
            rounds=7,
            burst=1,
            heat_ms=100,
            contests=(FASTEST if shape.is_gpt_oss else Contest(),),
            work=f"experts {name}",
            shape={
                "tokens": tokens, "experts": shape.experts, "choices": shape.choices, "hidden size": shape.hidden,
                "intermediate size": shape.intermediate,
            },
        )  # fmt: skip


def rows(options):
    shapes = options.pick(SHAPES, SHAPES, TINY)
    if options.sweep:
        for tokens in options.swept((1024, 4096, 8192, 16384)):
            yield from _rows(options, shapes[1], tokens)
        return
    for shape in shapes:
        yield from _rows(options, shape, options.pick(8192, 8192, 14))
