# SPDX-License-Identifier: BSD-3-Clause
"""The files on which the cells of each experiment depend: beginnings of paths in this repository.

``stale.py`` adds what the C++ and Triton files include and import. Dispatch, argument checks and reports are
left out: they take time on the host, and the figures but for host times of small tensors are of the device.
"""

from pathlib import Path

import liger_bench

ROOT = Path(__file__).parents[3]
SUITE = ("benchmarks/liger_bench/measure.py",)
CELLS = (
    "benchmarks/liger_bench/models/",
    "benchmarks/experiments/training.py",
    "benchmarks/experiments/text.py",
)
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
    "tiled_mlp": (
        *_GATED, "python/liger/ops/tiled_mlp/", "csrc/activation/", "triton_kernels/gated.py",
        "python/liger/nn/tiled_mlp.py",
    ),
}  # fmt: skip
OPS |= {op: _named(op) for op in liger_bench.OPS if op not in OPS}

# A training step of a patched model.
_LAYERS = tuple(
    f"python/liger/transformers/{name}"
    for name in ("attention/", "head/", "mlp/activations", "mlp/gated_", "mlp/recipe", "norms/", "recipe/")
)
_LLAMA = (*_LAYERS, *(path for op in ("rms_norm", "rope", "swiglu", "fused_linear_ce") for path in OPS[op]))
_QWEN3 = (*_LLAMA, *OPS["qk_norm_rope"])
_PLANNED = ("python/liger/transformers/checkpointing/",)
_RELEASED = ("python/liger/transformers/checkpointing/gradient_release.py",)
_GRAPH = ("python/liger/transformers/step_graphs.py",)
_LORA = ("python/liger/transformers/lora/", "python/liger/transformers/mlp/lora_mlp.py")
_EXPERTS = (*OPS["experts"], "python/liger/transformers/mlp/experts.py")
_TILED = OPS["tiled_mlp"]
# Ops with rows of host time, which one cell of E17 measures.
HOST_TIME = "host time"
HOST_OPS = ("rms_norm", "layer_norm", "swiglu", "geglu", "softmax", "rope", "cross_entropy")
VOCABULARY = (
    *OPS["heads"],
    "csrc/lm_head/sm90/shards/",
    "triton_kernels/cross_entropy_stats.py",
    "python/liger/distributed/vocab/",
)
SHARDED_MLP = (*OPS["tiled_mlp"], "python/liger/distributed/rules/")
_PREFERENCE = ("benchmarks/experiments/preference_training.py",)
_TRL = (*_PREFERENCE, *OPS["preference"], "python/liger/trl/")

# Experiment -> what all of its cells depend on; what the cells of liger depend on in addition; and what in
# addition if this word is in the name of the cell: other methods on the files of benchmarks among it alone.
EXPERIMENTS = {
    "E2": (CELLS, _LLAMA, {}),
    "E3": (CELLS, _LLAMA, {}),
    "E4": (CELLS, _LLAMA, {}),
    "E5": (CELLS, _LLAMA, {"tiled": _TILED, "all but": _TILED}),
    "E6": ((*CELLS, "benchmarks/experiments/memory_timeline.py"), _LLAMA, {}),
    "E7": (
        ("benchmarks/experiments/text.py", "benchmarks/experiments/convergence.py"),
        _LLAMA,
        {"Qwen3": _QWEN3, "Gemma": OPS["geglu"]},
    ),
    "E8": (SHARDED_CELLS, _LLAMA, {}),
    "E9": (CELLS, _LLAMA, {"LoRA": _LORA}),
    "E10": (SHARDED_CELLS, _LLAMA, {"tiled": _TILED, "plan": _PLANNED}),
    "E11": (("benchmarks/liger_bench/devices/sharded_mlp.py",), SHARDED_MLP, {}),
    "E12": (
        (*SUITE, *SHARDED_CELLS),
        (),
        {"loss": OPS["preference"], "TRL": (*_TRL, *_LLAMA), "FSDP2": _LLAMA},
    ),
    "E13": (
        tuple(
            f"benchmarks/experiments/{name}.py"
            for name in ("convergence", "curve_settings", "setting_curves")
        ),
        _LLAMA,
        {
            "Qwen3": _QWEN3,
            "planned": _PLANNED,
            "tiled": _TILED,
            "CUDA graph": _GRAPH,
            "step in backward": _RELEASED,
        },
    ),
    "E14": (
        CELLS,
        _LLAMA,
        {
            "Qwen3": _QWEN3,
            "Gemma": (*_QWEN3, *OPS["geglu"]),
            **dict.fromkeys(("A3B", "Mixtral", "gpt-oss"), _EXPERTS),
            "LoRA": _LORA,
            "DPO": _TRL,
        },
    ),
    "E15": (
        (*SHARDED_CELLS, "benchmarks/liger_bench/devices/ulysses.py"),
        (),
        {
            "head": (*VOCABULARY, "benchmarks/liger_bench/devices/vocabulary.py"),
            "FSDP2": _LLAMA,
            "one sequence": (*_LLAMA, *_TILED),
            "planned": _PLANNED,
        },
    ),
    "E16": (CELLS, _LLAMA, {"plan": _PLANNED, "tiled": _TILED}),
    "E18": (CELLS, _LLAMA, {"CUDA graph": _GRAPH, "LoRA": _LORA}),
}
# Methods are ways to shard our MLPs.
_ALL_OURS = ("E11",)


def paths(name, method, size):
    """The beginnings of the paths on which a cell depends."""
    if name in ("E1", "E17"):
        ops = HOST_OPS if method == HOST_TIME else (method,)
        files = (path for op in ops for path in (*OPS[op], f"benchmarks/liger_bench/ops/{op}.py"))
        return (*files, *SUITE)
    of_all, of_liger, by_word = EXPERIMENTS[name]
    ours = method.startswith("liger") and not method.startswith("liger-kernel")
    key = f"{method} @ {size}"
    named = [path for word, more in by_word.items() if word in key for path in more]
    if not ours and name not in _ALL_OURS and not (name == "E5" and method != "unpatched"):
        return (*of_all, *(path for path in named if path.startswith("benchmarks/")))
    return (*of_all, *of_liger, *named)
