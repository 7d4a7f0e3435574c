"""The ``apply_liger_kernel_to_*`` functions. A new architecture needs one row of TABLE and one line at the end.

The table does not describe modules: trials recognise them.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ._options import Options, check_names
from ._patching import apply, patch, unpatch

# Endings of the model types of the parts of a multimodal model.
_PARTS = ("", "_text", "_vision", "_audio", "_text_model", "_vision_model")


@dataclass(frozen=True)
class Architecture:
    """A model type of transformers, and the name of the base class of its models without ``PreTrainedModel``."""

    model_type: str
    base: str

    @property
    def module(self) -> str:
        package = self.model_type.removesuffix("_text")
        return f"transformers.models.{package}.modeling_{package}"

    def base_class(self) -> Any:
        try:
            return getattr(importlib.import_module(self.module), f"{self.base}PreTrainedModel")
        except ModuleNotFoundError as error:
            raise ImportError(
                f"liger: the installed transformers has no model type '{self.model_type}' ({self.module})"
            ) from error

    def covers(self, model_type: str | None) -> bool:
        return any(model_type == self.model_type + part for part in _PARTS)


TABLE = {
    model_type: Architecture(model_type, base)
    for model_type, base in {
        "deepseek_v2": "DeepseekV2",
        "deepseek_v3": "DeepseekV3",
        "deepseek_v4": "DeepseekV4",
        "exaone4": "Exaone4",
        "falcon_h1": "FalconH1",
        "gemma": "Gemma",
        "gemma2": "Gemma2",
        "gemma3": "Gemma3",
        "gemma3_text": "Gemma3",
        "gemma4": "Gemma4",
        "gemma4_text": "Gemma4",
        "glm4": "Glm4",
        "glm4v": "Glm4v",
        "glm4v_moe": "Glm4vMoe",
        "gpt_oss": "GptOss",
        "granite": "Granite",
        "hunyuan_v1_dense": "HunYuanDenseV1",
        "hunyuan_v1_moe": "HunYuanMoEV1",
        "internvl": "InternVL",
        "llama": "Llama",
        "llama4": "Llama4",
        "llava": "Llava",
        "ministral": "Ministral",
        "mistral": "Mistral",
        "mixtral": "Mixtral",
        "mllama": "Mllama",
        "muse_glimmer": "MuseGlimmer",
        "nemotron": "Nemotron",
        "olmo2": "Olmo2",
        "olmo3": "Olmo3",
        "paligemma": "PaliGemma",
        "phi3": "Phi3",
        "pixtral": "Pixtral",
        "qwen2": "Qwen2",
        "qwen2_5_vl": "Qwen2_5_VL",
        "qwen2_vl": "Qwen2VL",
        "qwen3": "Qwen3",
        "qwen3_5": "Qwen3_5",
        "qwen3_5_moe": "Qwen3_5Moe",
        "qwen3_moe": "Qwen3Moe",
        "qwen3_next": "Qwen3Next",
        "qwen3_vl": "Qwen3VL",
        "qwen3_vl_moe": "Qwen3VLMoe",
        "smollm3": "SmolLM3",
        "smolvlm": "SmolVLM",
    }.items()
}


def architecture_of(model_type: str) -> Architecture:
    """The row of a model type; raises ValueError if the table has none."""
    if model_type not in TABLE:
        raise ValueError(
            f"liger knows no model type '{model_type}', only {', '.join(TABLE)}. liger.patch(model) takes any model: "
            "it patches the modules that it can verify and says what it left"
        )
    return TABLE[model_type]


def _apply_to(model_type, model, options):
    row = architecture_of(model_type)
    if model is None:
        patch_future_models(row, Options(**options))
    else:
        given = getattr(getattr(model, "config", None), "model_type", None)
        if not row.covers(given):
            raise ValueError(f"apply_liger_kernel_to_{model_type} was given a model of type '{given}'")
        patch(model, **options)


def patch_future_models(row: Architecture, options: Options) -> None:
    """Patches every new model of a type in ``post_init``, which all constructors of transformers call at their end."""
    base = row.base_class()
    revert(row.model_type)
    if options.any:
        _hook(base)[row.model_type] = options


def _hook(base):
    """Model type -> options of the ``post_init`` of a base class, which is replaced if necessary."""
    if hasattr(base.__dict__.get("post_init"), "liger_options"):
        return base.__dict__["post_init"].liger_options
    original = base.post_init

    @functools.wraps(original)
    def post_init(self):
        original(self)
        for model_type, options in hook.liger_options.items():
            if TABLE[model_type].covers(getattr(self.config, "model_type", None)):
                unpatch(self)
                apply(self, options)

    hook: Any = post_init
    hook.liger_options = {}
    hook.liger_shadows = base.__dict__.get("post_init")
    base.post_init = hook
    return hook.liger_options


def revert(model_type: str | None = None) -> None:
    """Undoes ``apply_liger_kernel_to_*()`` without a model: models that are constructed afterwards are not patched.

    Existing models remain patched; :func:`liger.unpatch` restores them.

    Args:
        model_type: the name after ``apply_liger_kernel_to_``, such as ``"llama"``; None for all of them.

    Raises:
        ValueError: an unknown model type.
    """
    for row in TABLE.values() if model_type is None else [architecture_of(model_type)]:
        # A module that was never imported has no hook.
        base = getattr(sys.modules.get(row.module), f"{row.base}PreTrainedModel", None)
        if base is None:
            continue
        post_init: Any = base.__dict__.get("post_init")
        options = getattr(post_init, "liger_options", {})
        if options.pop(row.model_type, None) is None or options:
            continue
        if post_init.liger_shadows is None:
            del base.post_init
        else:
            base.post_init = post_init.liger_shadows


def _make_function(model_type: str) -> Callable[..., None]:
    def apply_liger_kernel(
        rope: bool = True,
        rms_norm: bool = True,
        swiglu: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        mlp: bool | None = None,
        model: nn.Module | None = None,
        inplace: bool = True,
        tiled_mlp: bool = False,
        tiled_mlp_num_shards: int | None = None,
        geglu: bool = True,
        layer_norm: bool = True,
        relu_squared: bool = True,
        gelu: bool = True,
        fused_add_rms_norm: bool = True,
        rms_norm_gated: bool = True,
        accumulate_grad_weight: bool = False,
        qk_norm_rope: bool = True,
        recompute: bool = False,
        **unknown: Any,
    ) -> None:
        check_names(apply_liger_kernel.__name__, unknown)
        options = {
            "rope": rope,
            "rms_norm": rms_norm,
            "rms_norm_gated": rms_norm_gated,
            "layer_norm": layer_norm,
            "fused_add_rms_norm": fused_add_rms_norm,
            "qk_norm_rope": qk_norm_rope,
            "swiglu": swiglu,
            "geglu": geglu,
            "relu_squared": relu_squared,
            "gelu": gelu,
            "cross_entropy": cross_entropy,
            "fused_linear_cross_entropy": fused_linear_cross_entropy,
            "mlp": mlp,
            "inplace": inplace,
            "tiled_mlp": tiled_mlp,
            "tiled_mlp_num_shards": tiled_mlp_num_shards,
            "recompute": recompute,
            "accumulate_grad_weight": accumulate_grad_weight,
        }
        _apply_to(model_type, model, options)

    apply_liger_kernel.__name__ = apply_liger_kernel.__qualname__ = f"apply_liger_kernel_to_{model_type}"
    apply_liger_kernel.__doc__ = f"""Patches one {model_type} model, or all that are constructed afterwards.

    Args:
        rope, rms_norm, swiglu, cross_entropy, fused_linear_cross_entropy, mlp, inplace, tiled_mlp: as in
            :func:`liger.patch`.
        tiled_mlp_num_shards, geglu, layer_norm, relu_squared, gelu, fused_add_rms_norm: as in :func:`liger.patch`.
        rms_norm_gated, qk_norm_rope, recompute, accumulate_grad_weight: as in :func:`liger.patch`.
        model: the model to patch; None: every {model_type} model that is constructed afterwards, until
            ``liger.transformers.revert("{model_type}")`` or a call with every option False.

    Raises:
        TypeError: an unknown option, or a value that is not of its type.
        ImportError: without a model, if the installed transformers does not have this model type.
        ValueError: a model of another type, or an error of :func:`liger.patch`.
    """
    return apply_liger_kernel


apply_liger_kernel_to_deepseek_v2 = _make_function("deepseek_v2")
apply_liger_kernel_to_deepseek_v3 = _make_function("deepseek_v3")
apply_liger_kernel_to_deepseek_v4 = _make_function("deepseek_v4")
apply_liger_kernel_to_exaone4 = _make_function("exaone4")
apply_liger_kernel_to_falcon_h1 = _make_function("falcon_h1")
apply_liger_kernel_to_gemma = _make_function("gemma")
apply_liger_kernel_to_gemma2 = _make_function("gemma2")
apply_liger_kernel_to_gemma3 = _make_function("gemma3")
apply_liger_kernel_to_gemma3_text = _make_function("gemma3_text")
apply_liger_kernel_to_gemma4 = _make_function("gemma4")
apply_liger_kernel_to_gemma4_text = _make_function("gemma4_text")
apply_liger_kernel_to_glm4 = _make_function("glm4")
apply_liger_kernel_to_glm4v = _make_function("glm4v")
apply_liger_kernel_to_glm4v_moe = _make_function("glm4v_moe")
apply_liger_kernel_to_gpt_oss = _make_function("gpt_oss")
apply_liger_kernel_to_granite = _make_function("granite")
apply_liger_kernel_to_hunyuan_v1_dense = _make_function("hunyuan_v1_dense")
apply_liger_kernel_to_hunyuan_v1_moe = _make_function("hunyuan_v1_moe")
apply_liger_kernel_to_internvl = _make_function("internvl")
apply_liger_kernel_to_llama = _make_function("llama")
apply_liger_kernel_to_llama4 = _make_function("llama4")
apply_liger_kernel_to_llava = _make_function("llava")
apply_liger_kernel_to_ministral = _make_function("ministral")
apply_liger_kernel_to_mistral = _make_function("mistral")
apply_liger_kernel_to_mixtral = _make_function("mixtral")
apply_liger_kernel_to_mllama = _make_function("mllama")
apply_liger_kernel_to_muse_glimmer = _make_function("muse_glimmer")
apply_liger_kernel_to_nemotron = _make_function("nemotron")
apply_liger_kernel_to_olmo2 = _make_function("olmo2")
apply_liger_kernel_to_olmo3 = _make_function("olmo3")
apply_liger_kernel_to_paligemma = _make_function("paligemma")
apply_liger_kernel_to_phi3 = _make_function("phi3")
apply_liger_kernel_to_pixtral = _make_function("pixtral")
apply_liger_kernel_to_qwen2 = _make_function("qwen2")
apply_liger_kernel_to_qwen2_5_vl = _make_function("qwen2_5_vl")
apply_liger_kernel_to_qwen2_vl = _make_function("qwen2_vl")
apply_liger_kernel_to_qwen3 = _make_function("qwen3")
apply_liger_kernel_to_qwen3_5 = _make_function("qwen3_5")
apply_liger_kernel_to_qwen3_5_moe = _make_function("qwen3_5_moe")
apply_liger_kernel_to_qwen3_moe = _make_function("qwen3_moe")
apply_liger_kernel_to_qwen3_next = _make_function("qwen3_next")
apply_liger_kernel_to_qwen3_vl = _make_function("qwen3_vl")
apply_liger_kernel_to_qwen3_vl_moe = _make_function("qwen3_vl_moe")
apply_liger_kernel_to_smollm3 = _make_function("smollm3")
apply_liger_kernel_to_smolvlm = _make_function("smolvlm")
