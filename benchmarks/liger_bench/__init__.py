"""The benchmark suite behind ``liger bench``; docs/performance/README.md says what it measures and how.

It is run from a checkout and is not part of the wheel: python/liger_cli/bench.py says how it is found.
"""

# Each has a module bench_<op>.py with a function rows(options).
OPS = (
    "rms_norm", "rms_norm_gated", "layer_norm", "swiglu", "geglu", "relu_squared", "softmax", "rope", "qk_norm_rope",
    "cross_entropy", "fused_linear_ce", "heads", "logprobs", "tiled_mlp", "experts", "divergence", "preference",
)  # fmt: skip
