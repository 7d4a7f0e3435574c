"""The architectures with a function of their own. Supporting another one is one row of TABLE and one function line.

Nothing here says how their modules compute: _behaviour.py finds that out by trying them.
"""

import importlib
from dataclasses import dataclass

from ._patching import Options, apply, patch, unpatch


@dataclass(frozen=True)
class Architecture:
    """Where transformers keeps a model type, and which class its models derive from."""

    model_type: str
    module: str
    base: str

    def base_class(self):
        return getattr(importlib.import_module(self.module), self.base)


TABLE = {
    row.model_type: row
    for row in (
        Architecture("llama", "transformers.models.llama.modeling_llama", "LlamaPreTrainedModel"),
        Architecture("mistral", "transformers.models.mistral.modeling_mistral", "MistralPreTrainedModel"),
        Architecture("qwen2", "transformers.models.qwen2.modeling_qwen2", "Qwen2PreTrainedModel"),
        Architecture("qwen3", "transformers.models.qwen3.modeling_qwen3", "Qwen3PreTrainedModel"),
    )
}


def known(model_type):
    """The row of a model type; raises ValueError for one that is not in the table."""
    if model_type not in TABLE:
        raise ValueError(
            f"liger knows no model type '{model_type}', only {', '.join(TABLE)}. liger.patch(model) takes any model: "
            "it patches the modules that it can verify and says what it left"
        )
    return TABLE[model_type]


def _apply_to(model_type, model, options):
    row = known(model_type)
    if model is None:
        _patch_future_models(row, Options(**options))
    else:
        found = getattr(getattr(model, "config", None), "model_type", None)
        if found != model_type:
            raise ValueError(f"apply_liger_kernel_to_{model_type} was given a model of type '{found}'")
        patch(model, **options)


def _patch_future_models(row, options):
    """Every constructor of transformers ends with post_init: there the new model is patched, and it alone."""
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


def revert(model_type=None):
    """Ends the effect of ``apply_liger_kernel_to_*()`` called without a model: models made from now on are plain again.

    Models that exist already stay patched; :func:`liger.unpatch` restores those.

    Args:
        model_type: ``"llama"``, ``"mistral"``, ``"qwen2"`` or ``"qwen3"``; None for all of them.

    Raises:
        ValueError: an unknown model type.
    """
    for row in TABLE.values() if model_type is None else [known(model_type)]:
        base = row.base_class()
        post_init = base.__dict__.get("post_init")
        if not hasattr(post_init, "liger_shadows"):
            continue
        if post_init.liger_shadows is None:
            del base.post_init
        else:
            base.post_init = post_init.liger_shadows


def _make_function(model_type):
    def apply_liger_kernel(
        rope=True,
        rms_norm=True,
        swiglu=True,
        cross_entropy=False,
        fused_linear_cross_entropy=True,
        mlp=None,
        model=None,
        inplace=True,
        tiled_mlp=False,
        tiled_mlp_num_shards=None,
        geglu=True,
    ):
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
    apply_liger_kernel.__doc__ = f"""Patches {model_type} models: the one given, or all that are made from now on.

    Args:
        rope, rms_norm, swiglu, cross_entropy, fused_linear_cross_entropy, mlp, inplace, tiled_mlp,
        tiled_mlp_num_shards, geglu: as in :func:`liger.patch`.
        model: the one model to change; None for every {model_type} model whose constructor runs from now on, until
            ``liger.transformers.revert("{model_type}")`` or a call with everything False.

    Raises:
        ValueError: a model of another type, or what :func:`liger.patch` refuses.
    """
    return apply_liger_kernel


apply_liger_kernel_to_llama = _make_function("llama")
apply_liger_kernel_to_mistral = _make_function("mistral")
apply_liger_kernel_to_qwen2 = _make_function("qwen2")
apply_liger_kernel_to_qwen3 = _make_function("qwen3")
