# SPDX-License-Identifier: BSD-3-Clause
"""Patching of models that are constructed later."""

import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import Unpack

from .options import Options, PatchOptions, check_names, with_options
from .patch import apply, unpatch

# Endings of the model types of the parts of a multimodal model.
_PARTS = ("", "_text", "_vision", "_audio", "_text_model", "_vision_model")


@dataclass
class _Hook:
    """The options by model type of a class with a replaced ``post_init``, and its own one or None."""

    own: Any
    options: dict[str, Options] = field(default_factory=dict)


_HOOKS: dict[type, _Hook] = {}


@with_options
def patch_future(model_type: str, **options: Unpack[PatchOptions]) -> None:
    """Patches every model of a type that is constructed from now on, at the end of its constructor.

    For programs that cannot call :func:`liger.patch` between the construction of a model and its use, such as
    a trainer that takes the name of a model. A second call for the same type replaces the options of the
    first one.

    Args:
        model_type: ``config.model_type`` of the models, such as ``"llama"``. The type of a multimodal model
            includes its parts: ``"gemma3"`` also patches models of type ``"gemma3_text"``.
        options: as in :func:`liger.patch`.

    Raises:
        TypeError: an unknown option, or a value that is not of its type.
        ValueError: a model type that the installed transformers does not have, or an option as in
            :func:`liger.patch`.

    Example::

        >>> liger.transformers.patch_future("llama", swiglu=False)
        >>> model = transformers.AutoModelForCausalLM.from_config(config)
    """
    check_names("liger.transformers.patch_future", options)
    hook(model_type, Options(**options))


def unpatch_future(model_type: str | None = None) -> None:
    """Ends :func:`patch_future`: models that are constructed from now on are not patched.

    Existing models remain patched; :func:`liger.unpatch` restores them.

    Args:
        model_type: the type that was passed to :func:`patch_future`; None for all of them.

    Example::

        >>> liger.transformers.patch_future("llama")
        >>> liger.transformers.unpatch_future("llama")
    """
    for base, found in list(_HOOKS.items()):
        for name in list(found.options) if model_type is None else [model_type]:
            found.options.pop(name, None)
        if not found.options:
            del _HOOKS[base]
            if found.own is None:
                del base.post_init  # type: ignore[attr-defined]
            else:
                base.post_init = found.own  # type: ignore[attr-defined]


def hook(model_type: str, options: Options) -> None:
    """:func:`patch_future` with checked options; without any part to patch, :func:`unpatch_future`."""
    bases = list(_base_classes(model_type))
    unpatch_future(model_type)
    for base in bases if options.any else ():
        if base not in _HOOKS:
            _HOOKS[base] = _Hook(base.__dict__.get("post_init"))
            base.post_init = _patching_post_init(base, base.post_init)
        _HOOKS[base].options[model_type] = options


def _base_classes(model_type: str) -> Iterator[Any]:
    """The base classes of the models of a type, which its module defines."""
    # Here, since they import much more than patching needs.
    from transformers.modeling_utils import PreTrainedModel
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    name = model_type_to_module_name(model_type)
    try:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"liger.transformers.patch_future: the installed transformers has no model type '{model_type}'"
        ) from error
    for cls in vars(module).values():
        if isinstance(cls, type) and cls.__module__ == module.__name__ and PreTrainedModel in cls.__bases__:
            yield cls


def _patching_post_init(base: type, original: Any) -> Any:
    @functools.wraps(original)
    def post_init(self):
        # All constructors of transformers call it at their end.
        original(self)
        given = getattr(self.config, "model_type", None)
        for model_type, options in _HOOKS[base].options.items():
            if given in {model_type + part for part in _PARTS}:
                unpatch(self)
                apply(self, options)

    return post_init
