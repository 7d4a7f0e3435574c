"""Patching of models that are constructed later, for model types without a function in liger.transformers."""

from __future__ import annotations

import importlib
from typing import Any

from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import model_type_to_module_name

from ..transformers._patching import Options, apply, unpatch


def _base_classes(model_type: str) -> list[Any]:
    """The base classes of the models of a type, which its module defines."""
    name = model_type_to_module_name(model_type)
    try:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    except ModuleNotFoundError as error:
        raise ValueError(f"the installed transformers has no models of type '{model_type}'") from error
    return [
        cls
        for cls in vars(module).values()
        if isinstance(cls, type) and cls.__module__ == module.__name__ and PreTrainedModel in cls.__bases__
    ]


def patch_future_models(model_type: str, options: Options) -> None:
    """Patches every new model of a type at the end of its constructor, in ``post_init``. No option: does so no more.

    Raises:
        ValueError: transformers has no such type.
    """
    for base in _base_classes(model_type):
        current = base.__dict__.get("post_init")
        if hasattr(current, "liger_shadows"):
            if current.liger_shadows is None:
                del base.post_init
            else:
                base.post_init = current.liger_shadows
        if options.any:
            _wrap_post_init(base, options)


def _wrap_post_init(base: Any, options: Options) -> None:
    original = base.post_init

    def post_init(self):
        original(self)
        unpatch(self)
        apply(self, options)

    post_init.liger_shadows = base.__dict__.get("post_init")  # type: ignore[attr-defined]
    base.post_init = post_init
