# SPDX-License-Identifier: BSD-3-Clause
"""The ``apply_liger_kernel_to_*`` of liger_kernel 0.8.5: model types, and parameters in their order."""

_LOSSES = "cross_entropy fused_linear_cross_entropy"
_LLAMA = f"rope {_LOSSES} rms_norm swiglu model"
_GEMMA = f"rope {_LOSSES} rms_norm geglu model"
_LAYER_NORM = f"rope {_LOSSES} layer_norm rms_norm"

# Parameters -> names of functions. The losses default to the fused one, all parts to True, model to None.
_BY_PARAMETERS = {
    _LLAMA: (
        "llama smollm3 ministral mistral mixtral qwen2 qwen3 qwen3_moe gpt_oss qwen2_5_vl qwen3_vl qwen3_vl_moe phi3 "
        "olmo2 olmo3 glm4 glm4v glm4v_moe falcon_h1 qwen3_next qwen3_5 qwen3_5_moe hunyuan_v1_dense hunyuan_v1_moe "
        "deepseek_v2 deepseek_v3 deepseek_v4 exaone4 granite"
    ),
    _GEMMA: "gemma gemma2 gemma3_text gemma4_text",
    f"{_LAYER_NORM} geglu model": "gemma3 gemma4 paligemma",
    f"{_LAYER_NORM} swiglu model": "mllama muse_glimmer",
    f"rope {_LOSSES} rms_norm swiglu model layer_norm": "llama4",
    f"rope {_LOSSES} rms_norm layer_norm swiglu model": "qwen2_vl",
    f"{_LOSSES} rms_norm layer_norm model": "internvl smolvlm",
    f"relu_squared {_LOSSES} model": "nemotron",
    f"{_LOSSES} model": "llava",
    "rope rms_norm swiglu model": "pixtral",
}

PARAMETERS = {name: order.split() for order, names in _BY_PARAMETERS.items() for name in names.split()}

# Functions that ignore unknown keywords.
OPEN = {"internvl", "smolvlm", "nemotron", "llava"}
# granite computes the loss from the logits by default, so that its training output has logits.
LOSS_FROM_LOGITS = {"granite"}

# Further model types of a function.
_ALSO = {
    "llama4": "llama4_text",
    "mllama": "mllama_text_model",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
# Model type -> name of its function.
MODEL_TYPES = {name: name for name in PARAMETERS} | {other: name for name, other in _ALSO.items()}

FUNCTION_NAMES = [f"apply_liger_kernel_to_{name}" for name in PARAMETERS]
