"""Patching of Hugging Face models: one call replaces modules by liger, another restores them (docs/patching.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._architectures import (
    apply_liger_kernel_to_llama,
    apply_liger_kernel_to_mistral,
    apply_liger_kernel_to_qwen2,
    apply_liger_kernel_to_qwen3,
    revert,
)
from ._experts import register as _register_experts
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

_register_experts()


if TYPE_CHECKING:
    from ._auto import AutoLigerKernelForCausalLM


def __getattr__(name: str) -> Any:
    # Lazy: the auto classes of transformers import much more than patching needs.
    if name == "AutoLigerKernelForCausalLM":
        from ._auto import AutoLigerKernelForCausalLM

        return AutoLigerKernelForCausalLM
    raise AttributeError(f"module 'liger.transformers' has no attribute '{name}'")
