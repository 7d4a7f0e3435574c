# SPDX-License-Identifier: BSD-3-Clause
"""The files on which each benchmark and experiment depends: beginnings of paths in this repository.

``stale.py`` adds what the C++ and Triton files include and import. Dispatch, argument checks and reports are
left out: they take time on the host, and the figures but for host times of small tensors are of the device.
"""

from pathlib import Path

import liger_bench

ROOT = Path(__file__).parents[3]
SUITE = ("benchmarks/liger_bench/measure.py",)
STEPS = ("benchmarks/liger_bench/models/trainee.py", "benchmarks/liger_bench/models/sizes.py")
CELLS = (*STEPS, "benchmarks/experiments/training.py", "benchmarks/experiments/text.py")
SHARDED_CELLS = (
    *CELLS,
    "benchmarks/experiments/sharded_training.py",
    "benchmarks/liger_bench/devices/on_ranks.py",
)

_CROSS_ENTROPY = ("csrc/cross_entropy/", "triton_kernels/cross_entropy.py", "python/liger/ops/cross_entropy/")
_HEAD = (
    "csrc/lm_head/fused_linear_ce.cu", "csrc/lm_head/sm90/chunk/", "triton_kernels/fused_linear_ce.py",
    "python/liger/_core/head/", "python/liger/_core/math/",
)  # fmt: skip
_LOGPROBS = (
    "csrc/lm_head/sm90/logprobs/",
    "csrc/lm_head/sm90/losses/",
    "python/liger/ops/fused_linear_logprobs/",
)
_GATED = ("python/liger/ops/gated.py",)
_TILED_MLP = ("python/liger/ops/tiled_mlp/",)


def _named(op):
    """The kernels of the name of an op and their Python."""
    found = (
        ROOT.glob(f"csrc/*/{op}.cu"),
        ROOT.glob(f"triton_kernels/{op}.py"),
        ROOT.glob(f"python/liger/ops/{op}.py"),
    )
    return tuple(path.relative_to(ROOT).as_posix() for paths in found for path in paths)


# Op of the suite -> its kernels and their Python, where they are not the files of its name.
OPS = {
    "cross_entropy": _CROSS_ENTROPY,
    "divergence": ("csrc/divergence/", "triton_kernels/divergence.py", "python/liger/ops/divergence/"),
    "experts": (
        *_GATED, "csrc/experts/", "csrc/activation/swiglu.cu", "triton_kernels/expert_",
        "python/liger/ops/grouped_experts/",
    ),
    "fused_linear_ce": (*_HEAD, "python/liger/ops/fused_linear_ce/"),
    "geglu": (*_GATED, "csrc/activation/geglu.cu", "triton_kernels/geglu.py"),
    "heads": (*_HEAD, *_LOGPROBS, "python/liger/ops/fused_linear_ce/", "benchmarks/liger_bench/heads/"),
    "layer_norm": (
        "csrc/norm/layer_norm.cu", "csrc/norm/group_norm.cu", "triton_kernels/layer_norm.py",
        "triton_kernels/group_norm.py", "python/liger/ops/layer_norm.py", "python/liger/ops/group_norm.py",
        "python/liger/ops/moment_norm.py",
    ),
    "logprobs": (*_HEAD, *_LOGPROBS),
    "preference": (*_HEAD, "csrc/lm_head/sm90/losses/", "python/liger/losses/"),
    "qk_norm_rope": ("csrc/rope/qk_norm_rope.cu", "triton_kernels/qk_norm_rope.py", "python/liger/ops/rope/qk_"),
    "rope": ("csrc/rope/rope.cu", "triton_kernels/rope.py", "python/liger/ops/rope/op.py"),
    "swiglu": (*_GATED, "csrc/activation/swiglu.cu", "triton_kernels/swiglu.py", "python/liger/ops/swiglu.py"),
    "tiled_mlp": (*_GATED, *_TILED_MLP, "csrc/activation/", "triton_kernels/gated.py", "python/liger/nn/tiled_mlp.py"),
}  # fmt: skip
OPS |= {op: _named(op) for op in liger_bench.OPS if op not in OPS}

# A training step of a patched model.
_LAYERS = tuple(
    f"python/liger/transformers/{room}/" for room in ("attention", "head", "mlp", "norms", "recipe")
)
_LLAMA = (*_LAYERS, *(path for op in ("rms_norm", "rope", "swiglu", "fused_linear_ce") for path in OPS[op]))
_QWEN3 = (*_LLAMA, *OPS["qk_norm_rope"])
_PLANNED = ("python/liger/transformers/checkpointing/",)
_LORA = ("python/liger/transformers/lora/", "python/liger/ops/fused_linear_ce/")
MODELS = {
    "llama": (*_LLAMA, *_PLANNED),
    "qwen3": (*_QWEN3, *_PLANNED),
}
VOCABULARY = (
    *OPS["heads"],
    "csrc/lm_head/sm90/shards/",
    "triton_kernels/cross_entropy_stats.py",
    "python/liger/distributed/vocab/",
)
SHARDED_MLP = (*OPS["tiled_mlp"], "python/liger/distributed/rules/")

_SCALING = ("benchmarks/experiments/scaling.py", "benchmarks/liger_bench/devices/ulysses.py")

# Experiment -> what its cells of liger depend on, and what all of its cells depend on.
EXPERIMENTS = {
    "E1": ((), SUITE),
    "E2": (_LLAMA, CELLS),
    "E3": (_LLAMA, CELLS),
    "E4": (_LLAMA, CELLS),
    "E5": ((*_LLAMA, *OPS["tiled_mlp"]), CELLS),
    "E6": (_LLAMA, (*CELLS, "benchmarks/experiments/memory_timeline.py")),
    "E7": ((*_QWEN3, *OPS["geglu"]), ("benchmarks/experiments/text.py",)),
    "E8": (_LLAMA, SHARDED_CELLS),
    "E9": ((*_LLAMA, *_LORA), CELLS),
    "E10": ((*_LLAMA, *OPS["tiled_mlp"]), SHARDED_CELLS),
    "E11": (SHARDED_MLP, ("benchmarks/liger_bench/devices/sharded_mlp.py",)),
    "E12": ((*_LLAMA, *OPS["preference"], "python/liger/trl/"), (*SUITE, *SHARDED_CELLS)),
    "E13": ((*_QWEN3, *_PLANNED, *OPS["tiled_mlp"]), ("benchmarks/experiments/curve_settings.py",)),
    "E14": (
        (*_QWEN3, *_LORA, *OPS["geglu"], *OPS["experts"], *OPS["preference"], "python/liger/trl/"),
        CELLS,
    ),
    "E15": ((*_LLAMA, *_PLANNED, *OPS["tiled_mlp"], *VOCABULARY), (*SHARDED_CELLS, *_SCALING)),
    "E16": ((*_LLAMA, *_PLANNED), CELLS),
}
