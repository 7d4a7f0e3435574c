"""Hugging Face models on the ops of liger: one call patches a model, another restores it. docs/patching.md explains."""

from ._architectures import (
    apply_liger_kernel_to_llama,
    apply_liger_kernel_to_mistral,
    apply_liger_kernel_to_qwen2,
    apply_liger_kernel_to_qwen3,
    revert,
)
from ._patching import PatchReport, patch, patch_report, unpatch

__all__ = [
    "AutoLigerKernelForCausalLM",
    "PatchReport",
    "apply_liger_kernel_to_llama",
    "apply_liger_kernel_to_mistral",
    "apply_liger_kernel_to_qwen2",
    "apply_liger_kernel_to_qwen3",
    "patch",
    "patch_report",
    "revert",
    "unpatch",
]


def __getattr__(name):
    # The auto classes of transformers import much more than patching needs.
    if name == "AutoLigerKernelForCausalLM":
        from ._auto import AutoLigerKernelForCausalLM

        return AutoLigerKernelForCausalLM
    raise AttributeError(f"module 'liger.transformers' has no attribute '{name}'")
