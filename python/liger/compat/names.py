# SPDX-License-Identifier: BSD-3-Clause
"""The modules of ``liger_kernel``, and the origin of each of their names.

A line of a table is a module below ``liger_kernel``, the module of liger.compat that defines its names, and
the names, which may go on in indented lines. ``Class=function`` is the name of an autograd function: a class
whose static ``apply`` is that function. Names that liger_kernel 0.8.5 has and these tables have not are
listed in docs/guides/compat.md with the reason.
"""

import copyreg
import functools
import importlib
from typing import Any

from .patching.architectures import FUNCTION_NAMES

_PATCHING = " ".join(FUNCTION_NAMES)

_DEFINED = f"""
functional  functional  cross_entropy fused_add_rms_norm fused_linear_cross_entropy fused_linear_jsd geglu jsd
  kl_div layer_norm rms_norm rope softmax swiglu
utils  utils  PEFT_AVAILABLE is_peft_available infer_comm_backend infer_device infer_device_arch
  is_npu_available transformers_version_dispatch get_total_gpu_memory
ops.utils  utils  is_hip device_context ensure_contiguous calculate_settings compare_version
  get_amp_custom_fwd_bwd amp_custom_fwd amp_custom_bwd torch_to_triton_dtype get_npu_core_count
  set_large_grf_mode
ops.backends.registry  utils  IMPL_REGISTRY LIGER_KERNEL_IMPL_ENV

ops.cross_entropy  losses.cross_entropy  LigerCrossEntropyFunction=_apply_cross_entropy
ops.fused_linear_cross_entropy  losses.cross_entropy
  LigerFusedLinearCrossEntropyFunction=_apply_fused_linear_cross_entropy fused_linear_cross_entropy_forward
  fused_linear_cross_entropy_backward
ops.fused_linear_scaled_cross_entropy  losses.cross_entropy
  LigerFusedLinearScaledCrossEntropyFunction=_apply_scaled_cross_entropy
  LigerFusedLinearScaledCrossEntropyTPFunction=liger_fused_linear_scaled_cross_entropy_tp
ops.configure  configure  FusedLinearCrossEntropyConfig MoEConfig configure
ops.vocab_parallel_cross_entropy  losses.cross_entropy  LigerVocabParallelCEFunction=_apply_vocab_parallel
ops.grpo_loss  losses.cross_entropy  fused_selective_log_softmax
ops.fused_ce_tvd  losses.divergence  LigerFusedCETVDFunction=_apply_ce_tvd
ops.fused_linear_jsd  losses.divergence  LigerFusedLinearJSDFunction=_apply_fused_linear_jsd
ops.fused_linear_kl_div  losses.divergence  LigerFusedLinearKLDivFunction=liger_fused_linear_kl_div
ops.jsd  losses.divergence  LigerJSDFunction=_apply_jsd
ops.kl_div  losses.divergence  LigerKLDivLossFunction=_apply_kl_div
ops.tvd  losses.divergence  LigerTVDLossFunction=_apply_tvd
ops.fused_add_rms_norm  layers.rows  LigerFusedAddRMSNormFunction=_apply_fused_add_rms_norm
ops.geglu  layers.rows  LigerGELUMulFunction=liger_geglu
ops.group_norm  layers.rows  LigerGroupNormFunction=liger_group_norm
ops.layer_norm  layers.rows  LigerLayerNormFunction=liger_layer_norm
ops.relu_squared  layers.rows  LigerReLUSquaredFunction=liger_relu_squared
ops.rms_norm  layers.rows  LigerRMSNormFunction=_apply_rms_norm rms_norm_forward rms_norm_backward
ops.softmax  layers.rows  LigerSoftmaxFunction=liger_softmax
ops.swiglu  layers.rows  LigerSiLUMulFunction=_apply_silu_mul
  LigerFusedGateUpSiLUMulFunction=_apply_fused_gate_up
ops.tiled_mlp  layers.rows  LigerTiledMLPFunction=apply_tiled_mlp apply_tiled_mlp
ops.fused_moe  layers.experts  LigerFusedMoEFunction=_apply_fused_moe
ops.rope  layers.rope  LigerRopeFunction=liger_rotary_pos_emb rope_forward rope_backward
ops.qwen2vl_mrope  layers.rope  LigerQwen2VLMRopeFunction=liger_multimodal_rotary_pos_emb
ops.llama4_rope  layers.rope  LigerLlama4RopeFunction=liger_llama4_text_rotary_pos_emb

chunked_loss.dpo_loss  losses.preference  LigerFusedLinearDPOLoss
  LigerFusedLinearDPOFunction=liger_fused_linear_dpo
chunked_loss.orpo_loss  losses.preference  LigerFusedLinearORPOLoss
  LigerFusedLinearORPOFunction=liger_fused_linear_orpo
chunked_loss.cpo_loss  losses.preference  LigerFusedLinearCPOLoss
  LigerFusedLinearCPOFunction=liger_fused_linear_cpo
chunked_loss.simpo_loss  losses.preference  LigerFusedLinearSimPOLoss
  LigerFusedLinearSimPOFunction=liger_fused_linear_simpo
chunked_loss.kto_loss  losses.preference  LigerFusedLinearKTOLoss
  LigerFusedLinearKTOFunction=liger_fused_linear_kto
chunked_loss.grpo_loss  losses.policy  LigerFusedLinearGRPOLoss
  LigerFusedLinearGRPOFunction=liger_fused_linear_grpo
chunked_loss.jsd_loss  losses.distillation  LigerFusedLinearJSDLoss
  LigerFusedLinearJSDFunction=liger_fused_linear_jsd
chunked_loss.cosine_similarity_loss  losses.distillation  LigerFusedLinearCosineSimilarityLoss
  LigerFusedLinearCosineSimilarityFunction=liger_fused_linear_cosine
chunked_loss.fused_linear_distillation  losses.distillation_base  LigerFusedLinearDistillationBase
chunked_loss.functional  losses.preference  liger_fused_linear_dpo liger_fused_linear_orpo
  liger_fused_linear_cpo liger_fused_linear_simpo liger_fused_linear_kto
chunked_loss.functional  losses.policy  liger_fused_linear_grpo
chunked_loss.functional  losses.distillation  liger_fused_linear_jsd liger_fused_linear_cosine

transformers.functional  losses.cross_entropy  CrossEntropyOutput liger_cross_entropy
  liger_fused_linear_cross_entropy liger_fused_linear_scaled_cross_entropy_tp
transformers.functional  losses.divergence  liger_fused_linear_jsd liger_fused_linear_kl_div liger_jsd
  liger_kl_div liger_tvd
transformers.functional  layers.rows  liger_geglu liger_group_norm liger_layer_norm liger_relu_squared
  liger_rms_norm liger_fused_add_rms_norm liger_swiglu liger_softmax
transformers.functional  layers.rope  liger_rope liger_qwen2vl_mrope
transformers.cross_entropy  losses.cross_entropy  LigerCrossEntropyLoss
transformers.fused_linear_cross_entropy  losses.cross_entropy  LigerFusedLinearCrossEntropyLoss
transformers.vocab_parallel_cross_entropy  losses.cross_entropy  LigerVocabParallelCrossEntropy
transformers.fused_ce_tvd  losses.divergence  LigerFusedCETVDLoss
transformers.fused_linear_jsd  losses.divergence  LigerFusedLinearJSD
transformers.fused_linear_kl_div  losses.divergence  LigerFusedLinearKLDivLoss
transformers.jsd  losses.divergence  LigerJSD
transformers.kl_div  losses.divergence  LigerKLDIVLoss
transformers.tvd  losses.divergence  LigerTVDLoss
transformers.rms_norm  layers.norms  LigerRMSNorm LigerRMSNormForGemma LigerRMSNormForGemma2
  LigerRMSNormForGemma3 LigerRMSNormForGemma4 LigerRMSNormForOlmo2 LigerRMSNormForGlm4
  LigerRMSNormForQwen3Next LigerRMSNormForMuseGlimmer LigerRMSNormForMuseGlimmerTextCentered
transformers.fused_add_rms_norm  layers.norms  LigerFusedAddRMSNorm
transformers.layer_norm  layers.norms  LigerLayerNorm
transformers.group_norm  layers.norms  LigerGroupNorm
transformers.softmax  layers.norms  LigerSoftmax
transformers.relu_squared  layers.norms  LigerReLUSquared
transformers.swiglu  layers.mlps  LigerSwiGLUMLP LigerSwiGLUMLPForMuseGlimmer LigerQwen3MoeSwiGLUMLP
  LigerPhi3SwiGLUMLP LigerHunyuanV1SwiGLUMLP LigerFalconH1SwiGLUMLP LigerBlockSparseTop2MLP
transformers.swiglu  layers.experts  LigerExperts
transformers.geglu  layers.mlps  LigerGEGLUMLP LigerGEGLUMLPForGemma4
transformers.tiled_mlp  layers.mlps  LigerTiledGEGLUMLP LigerTiledSwiGLUMLP
transformers.rope  layers.rope  liger_rotary_pos_emb liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision
transformers.qwen2vl_mrope  layers.rope  liger_multimodal_rotary_pos_emb
transformers.llama4_rope  layers.rope  liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb
transformers.model.loss_utils  losses.causal  LigerForCausalLMLoss fixed_fused_linear_cross_entropy
  unpack_cross_entropy_result
transformers.model.loss_utils  losses.cross_entropy  CrossEntropyOutput
transformers.model.output_classes  losses.causal  LigerCausalLMOutputWithPast LigerMoeCausalLMOutputWithPast
transformers.monkey_patch  patching.functions  MODEL_TYPE_TO_APPLY_LIGER_FN _apply_liger_kernel
  _apply_liger_kernel_to_instance _bind_method_to_module _patch_rms_norm_module _patch_layer_norm_module
  _patch_swiglu_module _patch_geglu_module {_PATCHING}
transformers.trainer_integration  patching.functions  _apply_liger_kernel
transformers.auto_model  patching.auto  AutoLigerKernelForCausalLM
transformers.fsdp  fsdp  _FSDPForwardRedirection
transformers.trainer.orpo_trainer  fsdp  _FSDPForwardRedirection
transformers.trainer.orpo_trainer  patching.orpo_trainer  LigerORPOTrainer
transformers  utils  is_transformers_available
"""

# Packages have the names of the modules below them.
_COLLECTED = {
    "ops": ("ops.", {"ops.utils", "ops.backends.registry", "ops.configure", "ops.grpo_loss"}),
    "ops.backends": ("ops.backends.", set()),
    "chunked_loss": ("chunked_loss.", {"chunked_loss.functional", "chunked_loss.fused_linear_distillation"}),
    "transformers": (
        "transformers.",
        {"transformers.functional", "transformers.model.loss_utils", "transformers.trainer.orpo_trainer"},
    ),
    "transformers.trainer": ("transformers.trainer.", set()),
    "transformers.model": (None, set()),
}

# Modules of liger.compat, and names, that need other packages than torch.
_NEEDED = {
    "patching.auto": ("transformers",),
    "losses.causal": ("transformers",),
    "patching.orpo_trainer": ("transformers", "trl"),
    "patching.functions": ("transformers",),
    "torch_to_triton_dtype": ("triton",),
}
# Names with an underscore that ``from ... import *`` binds all the same.
_STARRED = {"liger_kernel.transformers": ("_apply_liger_kernel", "_apply_liger_kernel_to_instance")}


def needed_packages(source: str, name: str) -> tuple[str, ...]:
    """The packages without which a name of a module of liger.compat cannot be imported."""
    return _NEEDED.get(name) or _NEEDED.get(source, ())


class _FunctionClass(type):
    """The type of the classes that stand in for autograd functions, which are made from the tables."""

    source: str


@functools.cache
def loaded(source: str, name: str) -> Any:
    """What the tables call ``name``, from ``source``: a module of liger.compat, or ``module:function``."""
    module, _, function = source.partition(":")
    found = getattr(importlib.import_module(f"liger.compat.{module}"), function or name)
    if not function:
        return found
    # No autograd function: the ops of liger are differentiable themselves.
    attributes = {"apply": staticmethod(found), "source": source, "__doc__": found.__doc__}
    return _FunctionClass(name, (), attributes)


def _reduced(made: _FunctionClass) -> Any:
    # A class that inherits from one of these is in a module of its own.
    return (loaded, (made.source, made.__name__)) if "source" in vars(made) else made.__qualname__


# No module has these classes before their first use.
copyreg.pickle(_FunctionClass, _reduced)


def is_starred(module: str, name: str) -> bool:
    """True if ``from module import *`` binds a name of a module of ``liger_kernel``."""
    return not name.startswith("_") or name in _STARRED.get(module, ())


def _tables() -> dict[str, dict[str, str]]:
    modules: dict[str, dict[str, str]] = {}
    for line in _DEFINED.strip().replace("\n  ", " ").splitlines():
        if line:
            module, source, *defined = line.split()
            for name, equals, function in (each.partition("=") for each in defined):
                modules.setdefault(module, {})[name] = f"{source}:{function}" if equals else source
    for package, (prefix, excluded) in _COLLECTED.items():
        names = modules.setdefault(package, {})
        for module, others in list(modules.items()):
            if prefix is not None and module.startswith(prefix) and module not in excluded:
                names.update(others)
    # The package chunked_loss has the losses, and their functions are names of its modules alone.
    for name in [n for n in modules["chunked_loss"] if n.endswith("Function")]:
        del modules["chunked_loss"][name]
    return {"liger_kernel": {}} | {f"liger_kernel.{name}": names for name, names in modules.items()}


MODULES = _tables()
