"""Patching of Hugging Face models: one call replaces modules by liger, another restores them (docs/patching.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy import lazy
from ._architectures import (
    apply_liger_kernel_to_deepseek_v2,
    apply_liger_kernel_to_deepseek_v3,
    apply_liger_kernel_to_deepseek_v4,
    apply_liger_kernel_to_exaone4,
    apply_liger_kernel_to_falcon_h1,
    apply_liger_kernel_to_gemma,
    apply_liger_kernel_to_gemma2,
    apply_liger_kernel_to_gemma3,
    apply_liger_kernel_to_gemma3_text,
    apply_liger_kernel_to_gemma4,
    apply_liger_kernel_to_gemma4_text,
    apply_liger_kernel_to_glm4,
    apply_liger_kernel_to_glm4v,
    apply_liger_kernel_to_glm4v_moe,
    apply_liger_kernel_to_gpt_oss,
    apply_liger_kernel_to_granite,
    apply_liger_kernel_to_hunyuan_v1_dense,
    apply_liger_kernel_to_hunyuan_v1_moe,
    apply_liger_kernel_to_internvl,
    apply_liger_kernel_to_llama,
    apply_liger_kernel_to_llama4,
    apply_liger_kernel_to_llava,
    apply_liger_kernel_to_ministral,
    apply_liger_kernel_to_mistral,
    apply_liger_kernel_to_mixtral,
    apply_liger_kernel_to_mllama,
    apply_liger_kernel_to_muse_glimmer,
    apply_liger_kernel_to_nemotron,
    apply_liger_kernel_to_olmo2,
    apply_liger_kernel_to_olmo3,
    apply_liger_kernel_to_paligemma,
    apply_liger_kernel_to_phi3,
    apply_liger_kernel_to_pixtral,
    apply_liger_kernel_to_qwen2,
    apply_liger_kernel_to_qwen2_5_vl,
    apply_liger_kernel_to_qwen2_vl,
    apply_liger_kernel_to_qwen3,
    apply_liger_kernel_to_qwen3_5,
    apply_liger_kernel_to_qwen3_5_moe,
    apply_liger_kernel_to_qwen3_moe,
    apply_liger_kernel_to_qwen3_next,
    apply_liger_kernel_to_qwen3_vl,
    apply_liger_kernel_to_qwen3_vl_moe,
    apply_liger_kernel_to_smollm3,
    apply_liger_kernel_to_smolvlm,
    revert,
)
from ._checkpoint import checkpoint
from ._experts import register as _register_experts
from ._patching import patch, unpatch
from ._report import PatchReport, patch_report

__all__ = [
    "AutoLigerKernelForCausalLM",
    "PatchReport",
    "apply_liger_kernel_to_deepseek_v2",
    "apply_liger_kernel_to_deepseek_v3",
    "apply_liger_kernel_to_deepseek_v4",
    "apply_liger_kernel_to_exaone4",
    "apply_liger_kernel_to_falcon_h1",
    "apply_liger_kernel_to_gemma",
    "apply_liger_kernel_to_gemma2",
    "apply_liger_kernel_to_gemma3",
    "apply_liger_kernel_to_gemma3_text",
    "apply_liger_kernel_to_gemma4",
    "apply_liger_kernel_to_gemma4_text",
    "apply_liger_kernel_to_glm4",
    "apply_liger_kernel_to_glm4v",
    "apply_liger_kernel_to_glm4v_moe",
    "apply_liger_kernel_to_gpt_oss",
    "apply_liger_kernel_to_granite",
    "apply_liger_kernel_to_hunyuan_v1_dense",
    "apply_liger_kernel_to_hunyuan_v1_moe",
    "apply_liger_kernel_to_internvl",
    "apply_liger_kernel_to_llama",
    "apply_liger_kernel_to_llama4",
    "apply_liger_kernel_to_llava",
    "apply_liger_kernel_to_ministral",
    "apply_liger_kernel_to_mistral",
    "apply_liger_kernel_to_mixtral",
    "apply_liger_kernel_to_mllama",
    "apply_liger_kernel_to_muse_glimmer",
    "apply_liger_kernel_to_nemotron",
    "apply_liger_kernel_to_olmo2",
    "apply_liger_kernel_to_olmo3",
    "apply_liger_kernel_to_paligemma",
    "apply_liger_kernel_to_phi3",
    "apply_liger_kernel_to_pixtral",
    "apply_liger_kernel_to_qwen2",
    "apply_liger_kernel_to_qwen2_5_vl",
    "apply_liger_kernel_to_qwen2_vl",
    "apply_liger_kernel_to_qwen3",
    "apply_liger_kernel_to_qwen3_5",
    "apply_liger_kernel_to_qwen3_5_moe",
    "apply_liger_kernel_to_qwen3_moe",
    "apply_liger_kernel_to_qwen3_next",
    "apply_liger_kernel_to_qwen3_vl",
    "apply_liger_kernel_to_qwen3_vl_moe",
    "apply_liger_kernel_to_smollm3",
    "apply_liger_kernel_to_smolvlm",
    "checkpoint",
    "patch",
    "patch_report",
    "revert",
    "unpatch",
]

_register_experts()

if TYPE_CHECKING:
    from ._auto import AutoLigerKernelForCausalLM
else:
    # The auto classes of transformers import much more than patching needs.
    __getattr__, __dir__ = lazy(__name__, __all__, {"AutoLigerKernelForCausalLM": "liger.transformers._auto"})
