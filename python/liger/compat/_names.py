"""Which modules ``liger_kernel`` has, and where each of their names comes from.

A line of a table is a module below ``liger_kernel``, the module of liger.compat that defines its names, and the names.
A name ``theirs=ours`` differs there. Names that liger_kernel 0.8.5 has and these tables have not are listed in
docs/compat.md with the reason.
"""

from __future__ import annotations

from ._architectures import FUNCTION_NAMES

_PATCHING = " ".join(FUNCTION_NAMES)

_DEFINED = f"""
functional           _functional  cross_entropy fused_add_rms_norm fused_linear_cross_entropy fused_linear_jsd
functional           _functional  geglu jsd kl_div layer_norm rms_norm rope softmax swiglu
utils                _utils       PEFT_AVAILABLE is_peft_available infer_comm_backend infer_device infer_device_arch
utils                _utils       is_npu_available transformers_version_dispatch get_total_gpu_memory
ops.utils            _utils       is_hip device_context ensure_contiguous calculate_settings compare_version
ops.utils            _utils       get_amp_custom_fwd_bwd amp_custom_fwd amp_custom_bwd torch_to_triton_dtype
ops.utils            _utils       get_npu_core_count set_large_grf_mode
ops.backends.registry _utils      IMPL_REGISTRY LIGER_KERNEL_IMPL_ENV

ops.cross_entropy    _cross_entropy  LigerCrossEntropyFunction
ops.fused_linear_cross_entropy  _cross_entropy  LigerFusedLinearCrossEntropyFunction fused_linear_cross_entropy_forward
ops.fused_linear_cross_entropy  _cross_entropy  fused_linear_cross_entropy_backward
ops.fused_linear_scaled_cross_entropy  _cross_entropy  LigerFusedLinearScaledCrossEntropyFunction
ops.fused_linear_scaled_cross_entropy  _cross_entropy  LigerFusedLinearScaledCrossEntropyTPFunction
ops.configure        _configure   FusedLinearCrossEntropyConfig MoEConfig configure
ops.vocab_parallel_cross_entropy  _cross_entropy  LigerVocabParallelCEFunction
ops.grpo_loss        _cross_entropy  fused_selective_log_softmax
ops.fused_ce_tvd     _divergence  LigerFusedCETVDFunction
ops.fused_linear_jsd _divergence  LigerFusedLinearJSDFunction
ops.fused_linear_kl_div  _divergence  LigerFusedLinearKLDivFunction
ops.jsd              _divergence  LigerJSDFunction
ops.kl_div           _divergence  LigerKLDivLossFunction
ops.tvd              _divergence  LigerTVDLossFunction
ops.fused_add_rms_norm  _rows     LigerFusedAddRMSNormFunction
ops.geglu            _rows        LigerGELUMulFunction
ops.group_norm       _rows        LigerGroupNormFunction
ops.layer_norm       _rows        LigerLayerNormFunction
ops.relu_squared     _rows        LigerReLUSquaredFunction
ops.rms_norm         _rows        LigerRMSNormFunction rms_norm_forward rms_norm_backward
ops.softmax          _rows        LigerSoftmaxFunction
ops.swiglu           _rows        LigerSiLUMulFunction LigerFusedGateUpSiLUMulFunction
ops.tiled_mlp        _rows        LigerTiledMLPFunction apply_tiled_mlp
ops.fused_moe        _experts     LigerFusedMoEFunction
ops.rope             _rope        LigerRopeFunction rope_forward rope_backward
ops.qwen2vl_mrope    _rope        LigerQwen2VLMRopeFunction
ops.llama4_rope      _rope        LigerLlama4RopeFunction

chunked_loss.dpo_loss     _preference  LigerFusedLinearDPOLoss LigerFusedLinearDPOFunction
chunked_loss.orpo_loss    _preference  LigerFusedLinearORPOLoss LigerFusedLinearORPOFunction
chunked_loss.cpo_loss     _preference  LigerFusedLinearCPOLoss LigerFusedLinearCPOFunction
chunked_loss.simpo_loss   _preference  LigerFusedLinearSimPOLoss LigerFusedLinearSimPOFunction
chunked_loss.kto_loss     _preference  LigerFusedLinearKTOLoss LigerFusedLinearKTOFunction
chunked_loss.grpo_loss    _policy      LigerFusedLinearGRPOLoss LigerFusedLinearGRPOFunction
chunked_loss.jsd_loss     _distillation  LigerFusedLinearJSDLoss LigerFusedLinearJSDFunction
chunked_loss.cosine_similarity_loss  _distillation  LigerFusedLinearCosineSimilarityLoss
chunked_loss.cosine_similarity_loss  _distillation  LigerFusedLinearCosineSimilarityFunction
chunked_loss.fused_linear_distillation  _distillation_base  LigerFusedLinearDistillationBase
chunked_loss.functional   _preference  liger_fused_linear_dpo liger_fused_linear_orpo liger_fused_linear_cpo
chunked_loss.functional   _preference  liger_fused_linear_simpo liger_fused_linear_kto
chunked_loss.functional   _policy      liger_fused_linear_grpo
chunked_loss.functional   _distillation  liger_fused_linear_jsd liger_fused_linear_cosine

transformers.functional   _cross_entropy  CrossEntropyOutput liger_cross_entropy liger_fused_linear_cross_entropy
transformers.functional   _cross_entropy  liger_fused_linear_scaled_cross_entropy_tp
transformers.functional   _divergence  liger_fused_linear_jsd liger_fused_linear_kl_div liger_jsd liger_kl_div liger_tvd
transformers.functional   _rows        liger_geglu liger_group_norm liger_layer_norm liger_relu_squared liger_rms_norm
transformers.functional   _rows        liger_fused_add_rms_norm liger_swiglu liger_softmax
transformers.functional   _rope        liger_rope liger_qwen2vl_mrope
transformers.cross_entropy  _cross_entropy  LigerCrossEntropyLoss
transformers.fused_linear_cross_entropy  _cross_entropy  LigerFusedLinearCrossEntropyLoss
transformers.vocab_parallel_cross_entropy  _cross_entropy  LigerVocabParallelCrossEntropy
transformers.fused_ce_tvd  _divergence  LigerFusedCETVDLoss
transformers.fused_linear_jsd  _divergence  LigerFusedLinearJSD
transformers.fused_linear_kl_div  _divergence  LigerFusedLinearKLDivLoss
transformers.jsd          _divergence  LigerJSD
transformers.kl_div       _divergence  LigerKLDIVLoss
transformers.tvd          _divergence  LigerTVDLoss
transformers.rms_norm     _norms  LigerRMSNorm LigerRMSNormForGemma LigerRMSNormForGemma2 LigerRMSNormForGemma3
transformers.rms_norm     _norms  LigerRMSNormForGemma4 LigerRMSNormForOlmo2 LigerRMSNormForGlm4
transformers.rms_norm     _norms  LigerRMSNormForQwen3Next LigerRMSNormForMuseGlimmer
transformers.rms_norm     _norms  LigerRMSNormForMuseGlimmerTextCentered
transformers.fused_add_rms_norm  _norms  LigerFusedAddRMSNorm
transformers.layer_norm   _norms  LigerLayerNorm
transformers.group_norm   _norms  LigerGroupNorm
transformers.softmax      _norms  LigerSoftmax
transformers.relu_squared _norms  LigerReLUSquared
transformers.swiglu       _mlps   LigerSwiGLUMLP LigerSwiGLUMLPForMuseGlimmer LigerQwen3MoeSwiGLUMLP
transformers.swiglu       _mlps   LigerPhi3SwiGLUMLP LigerHunyuanV1SwiGLUMLP LigerFalconH1SwiGLUMLP
transformers.swiglu       _mlps   LigerBlockSparseTop2MLP
transformers.swiglu       _experts  LigerExperts
transformers.geglu        _mlps   LigerGEGLUMLP LigerGEGLUMLPForGemma4
transformers.tiled_mlp    _mlps   LigerTiledGEGLUMLP LigerTiledSwiGLUMLP
transformers.rope         _rope   liger_rotary_pos_emb liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision
transformers.qwen2vl_mrope  _rope liger_multimodal_rotary_pos_emb
transformers.llama4_rope  _rope   liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb
transformers.model.loss_utils  _causal_loss  LigerForCausalLMLoss fixed_fused_linear_cross_entropy
transformers.model.loss_utils  _causal_loss  unpack_cross_entropy_result
transformers.model.loss_utils  _cross_entropy  CrossEntropyOutput
transformers.model.output_classes  _causal_loss  LigerCausalLMOutputWithPast LigerMoeCausalLMOutputWithPast
transformers.monkey_patch  _patching  MODEL_TYPE_TO_APPLY_LIGER_FN _apply_liger_kernel _apply_liger_kernel_to_instance
transformers.monkey_patch  _patching  _bind_method_to_module _patch_rms_norm_module _patch_layer_norm_module
transformers.monkey_patch  _patching  _patch_swiglu_module _patch_geglu_module
transformers.monkey_patch  _patching  {_PATCHING}
transformers.trainer_integration  _patching  _apply_liger_kernel
transformers.auto_model   _auto   AutoLigerKernelForCausalLM
transformers.fsdp         _fsdp   _FSDPForwardRedirection
transformers.trainer.orpo_trainer  _fsdp  _FSDPForwardRedirection
transformers.trainer.orpo_trainer  _orpo_trainer  LigerORPOTrainer
transformers              _utils  is_transformers_available
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
    "_auto": ("transformers",),
    "_causal_loss": ("transformers",),
    "_orpo_trainer": ("transformers", "trl"),
    "_patching": ("transformers",),
    "torch_to_triton_dtype": ("triton",),
}
# Names with an underscore that ``from ... import *`` binds all the same.
_STARRED = {"liger_kernel.transformers": ("_apply_liger_kernel", "_apply_liger_kernel_to_instance")}


def needed_packages(source: str, name: str) -> tuple[str, ...]:
    """The packages without which a name of a module of liger.compat cannot be imported."""
    return _NEEDED.get(name) or _NEEDED.get(source, ())


def is_starred(module: str, name: str) -> bool:
    """Whether ``from module import *`` binds a name of a module of ``liger_kernel``."""
    return not name.startswith("_") or name in _STARRED.get(module, ())


def _tables() -> dict[str, dict[str, str]]:
    modules: dict[str, dict[str, str]] = {}
    for line in _DEFINED.strip().splitlines():
        if line:
            module, source, *defined = line.split()
            modules.setdefault(module, {}).update(dict.fromkeys(defined, source))
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
