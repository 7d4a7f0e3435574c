"""The ``apply_liger_kernel_to_*`` functions. A new architecture needs one row of TABLE and one line at the end.

The table does not describe modules: _behaviour.py recognises them by trial.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from ._patching import Options, apply, patch, unpatch


@dataclass(frozen=True)
class Architecture:
    """A model type of transformers: its module, and the name of the base class of its models."""

    model_type: str
    module: str
    base: str

    def base_class(self) -> Any:
        return getattr(importlib.import_module(self.module), self.base)


ModelType = Literal["llama", "mistral", "qwen2", "qwen3"]

TABLE = {
    row.model_type: row
    for row in (
        Architecture("llama", "transformers.models.llama.modeling_llama", "LlamaPreTrainedModel"),
        Architecture("mistral", "transformers.models.mistral.modeling_mistral", "MistralPreTrainedModel"),
        Architecture("qwen2", "transformers.models.qwen2.modeling_qwen2", "Qwen2PreTrainedModel"),
        Architecture("qwen3", "transformers.models.qwen3.modeling_qwen3", "Qwen3PreTrainedModel"),
    )
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
        _patch_future_models(row, Options(**options))
    else:
        given = getattr(getattr(model, "config", None), "model_type", None)
        if given != model_type:
            raise ValueError(f"apply_liger_kernel_to_{model_type} was given a model of type '{given}'")
        patch(model, **options)


def _patch_future_models(row, options):
    """Patches every new model in ``post_init``, which all constructors of transformers call at their end."""
    base = row.base_class()
    revert(row.model_type)
    if not options.any:
        return
    original = base.post_init

    def post_init(self):
        original(self)
        unpatch(self)
        apply(self, options)

    post_init.liger_shadows = base.__dict__.get("post_init")
    base.post_init = post_init


def revert(model_type: ModelType | None = None) -> None:
    """Undoes ``apply_liger_kernel_to_*()`` without a model: models that are constructed afterwards are not patched.

    Existing models remain patched; :func:`liger.unpatch` restores them.

    Args:
        model_type: ``"llama"``, ``"mistral"``, ``"qwen2"`` or ``"qwen3"``; None for all of them.

    Raises:
        ValueError: an unknown model type.
    """
    for row in TABLE.values() if model_type is None else [architecture_of(model_type)]:
        base = row.base_class()
        post_init = base.__dict__.get("post_init")
        if not hasattr(post_init, "liger_shadows"):
            continue
        if post_init.liger_shadows is None:
            del base.post_init
        else:
            base.post_init = post_init.liger_shadows


def _make_function(model_type: ModelType) -> Callable[..., None]:
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
    ) -> None:
        options = {
            "rope": rope,
            "rms_norm": rms_norm,
            "swiglu": swiglu,
            "geglu": geglu,
            "cross_entropy": cross_entropy,
            "fused_linear_cross_entropy": fused_linear_cross_entropy,
            "mlp": mlp,
            "inplace": inplace,
            "tiled_mlp": tiled_mlp,
            "tiled_mlp_num_shards": tiled_mlp_num_shards,
        }
        _apply_to(model_type, model, options)

    apply_liger_kernel.__name__ = apply_liger_kernel.__qualname__ = f"apply_liger_kernel_to_{model_type}"
    apply_liger_kernel.__doc__ = f"""Patches one {model_type} model, or all that are constructed afterwards.

    Args:
        rope, rms_norm, swiglu, cross_entropy, fused_linear_cross_entropy, mlp, inplace, tiled_mlp,
        tiled_mlp_num_shards, geglu: as in :func:`liger.patch`.
        model: the model to patch; None: every {model_type} model that is constructed afterwards, until
            ``liger.transformers.revert("{model_type}")`` or a call with every option False.

    Raises:
        ValueError: a model of another type, or an error of :func:`liger.patch`.
    """
    return apply_liger_kernel


apply_liger_kernel_to_llama = _make_function("llama")
apply_liger_kernel_to_mistral = _make_function("mistral")
apply_liger_kernel_to_qwen2 = _make_function("qwen2")
apply_liger_kernel_to_qwen3 = _make_function("qwen3")
