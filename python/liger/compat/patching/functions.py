# SPDX-License-Identifier: BSD-3-Clause
"""``apply_liger_kernel_to_*`` and the other functions of ``liger_kernel.transformers.monkey_patch``."""

import inspect
import logging
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from torch import nn

from ...transformers.patching.future import hook
from ...transformers.patching.options import LOSSES, NAMES, PARTS, Options
from ...transformers.patching.patch import apply, unpatch
from ..layers.mlps import LigerGEGLUMLP
from ..layers.norms import LigerLayerNorm, LigerRMSNorm
from .architectures import LOSS_FROM_LOGITS, MODEL_TYPES, OPEN, PARAMETERS

logger = logging.getLogger("liger.compat")


class _Options(Options):
    """The options of a model that is to take the arguments of a model that liger_kernel has patched."""

    like_liger_kernel = True


# Options of liger.patch with a meaning, and a default, of their own.
_OWN = {name: getattr(Options, name) for name in NAMES if name not in (*PARTS, *LOSSES)}


def _default(function: str, parameter: str) -> Any:
    if parameter == "model":
        return None
    if parameter in LOSSES:
        return (parameter == "cross_entropy") == (function in LOSS_FROM_LOGITS)
    return True


def _signature(function: str) -> inspect.Signature:
    kinds = inspect.Parameter
    parameters = [
        kinds(name, kinds.POSITIONAL_OR_KEYWORD, default=_default(function, name))
        for name in PARAMETERS[function]
    ]
    # The options of liger.patch that liger_kernel does not have there; None: as the others (_options).
    parameters += [
        kinds(name, kinds.KEYWORD_ONLY, default=_OWN.get(name))
        for name in NAMES
        if name not in PARAMETERS[function]
    ]
    if function in OPEN:
        parameters.append(kinds("kwargs", kinds.VAR_KEYWORD))
    return inspect.Signature(parameters, return_annotation=None)


def _options(function: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options of :func:`liger.patch` for the options of a function of liger_kernel.

    ``rms_norm`` also stands for norms with a gate; ``swiglu`` and ``geglu`` stand for experts in
    :func:`liger.patch` itself. Parts of a model that are not given are patched if any other part is.
    """
    own = {name: given.pop(name) for name in _OWN if name in given}
    parts = {name: bool(value) for name, value in given.items()}
    if parts.get("cross_entropy") and parts.get("fused_linear_cross_entropy"):
        logger.info(
            "liger: %s: both losses were asked for; the fused one has no logits for the other, so it is used alone",
            function,
        )
        parts["cross_entropy"] = False
    others = any(parts.values())
    # One MLP is either of the two.
    gated = parts.get("swiglu", parts.get("geglu", others))
    options = dict.fromkeys(PARTS, others) | dict.fromkeys(LOSSES, False)
    options |= {"swiglu": gated, "geglu": gated, "rms_norm_gated": parts.get("rms_norm", others)}
    return options | parts | own


def _patch_instance(model: nn.Module, options: dict[str, Any]) -> None:
    parsed = _Options(**options)
    unpatch(model)
    if parsed.any and not apply(model, parsed).replaced:
        logger.warning(
            "liger: nothing in %s can be patched as asked: the model is left as it is", type(model).__name__
        )


def _make_function(name: str) -> Callable[..., None]:
    title, signature = f"apply_liger_kernel_to_{name}", _signature(name)

    def apply_liger_kernel(*args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{title}: {error}, expected {', '.join(signature.parameters)}") from None
        bound.apply_defaults()
        given = {n: v for n, v in bound.arguments.items() if n in NAMES}
        parts = {n: v for n, v in given.items() if v is not None or n in PARAMETERS[name] or n in _OWN}
        options, model = _options(title, parts), bound.arguments["model"]
        if model is None:
            hook(name, _Options(**options))
        else:
            _patch_instance(model, options)

    apply_liger_kernel.__name__ = apply_liger_kernel.__qualname__ = title
    apply_liger_kernel.__doc__ = f"""Patches one model, or with ``model=None`` every {name} model that is constructed
    afterwards, until a call with all options False.

    The options are liger_kernel's, in its order, and by keyword all others of :func:`liger.patch`; of these,
    None for a part patches it if any other part is patched. With both losses the fused one is used. A module whose
    results would change is not patched; if nothing can be patched, a log message says so.

    Raises:
        TypeError: an unknown option.
    """
    apply_liger_kernel.__signature__ = signature  # type: ignore[attr-defined]
    return apply_liger_kernel


_FUNCTIONS = {name: _make_function(name) for name in PARAMETERS}
MODEL_TYPE_TO_APPLY_LIGER_FN = {kind: _FUNCTIONS[name] for kind, name in MODEL_TYPES.items()}
globals().update({function.__name__: function for function in _FUNCTIONS.values()})


def _accepted(function: Callable[..., None], options: dict[str, Any]) -> dict[str, Any]:
    names = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in names and name != "model"}


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> None:
    """Patches every model of a type that is constructed afterwards. Unknown options are ignored; an unknown
    type is left alone, with a log message."""
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if function is None:
        logger.info("liger: liger_kernel has no model type %r: such models are not patched", model_type)
    else:
        function(**_accepted(function, kwargs))


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> None:
    """Patches one model. Unknown options are ignored.

    A model of a type that liger_kernel does not know is patched as well, where :func:`liger.patch` can.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)  # type: ignore[arg-type]
    if function is not None:
        function(model=model, **_accepted(function, kwargs))
        return
    given = {name: True for name in ("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy")}
    given |= {name: value for name, value in kwargs.items() if name in NAMES}
    _patch_instance(model, _options(type(model).__name__, given))


# --- single modules -----------------------------------------------------------------------------------------


def _bind_method_to_module(module: nn.Module, method_name: str, new_method: Callable[..., Any]) -> None:
    """Makes a function a method of one module, in front of the method of its class."""
    module.__dict__[method_name] = MethodType(new_method, module)


def _targets(module: Any) -> Iterator[Any]:
    """The module, or the modules in PEFT's wrapper for ``modules_to_save``."""
    copies = getattr(module, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        yield from (module.original_module, *copies.values())
    else:
        yield module


def _become(module: Any, liger_class: type[nn.Module], attributes: dict[str, Any] | None = None) -> None:
    for target in _targets(module):
        for name, value in (attributes or {}).items():
            setattr(target, name, value)
        _bind_method_to_module(target, "forward", liger_class.forward)
        _bind_method_to_module(target, "_get_name", lambda self: liger_class.__name__)


def _epsilon(module: Any, eps: float) -> float:
    target = next(_targets(module))
    return next(
        (value for name in ("variance_epsilon", "eps") if (value := getattr(target, name, None))), eps
    )


def _patch_rms_norm_module(
    module, offset=0.0, eps=1e-6, casting_mode="llama", in_place=True, row_mode=None
) -> None:
    """Gives a norm module the forward of LigerRMSNorm; ``eps`` is for a module without its own."""
    attributes = {"offset": offset, "casting_mode": casting_mode, "in_place": in_place, "row_mode": row_mode}
    _become(module, LigerRMSNorm, attributes | {"variance_epsilon": _epsilon(module, eps)})


def _patch_layer_norm_module(module: Any, eps: float = 1e-6) -> None:
    """Gives a layer norm the forward of LigerLayerNorm; ``eps`` is for a module without its own."""
    _become(module, LigerLayerNorm, {"variance_epsilon": _epsilon(module, eps)})


def _patch_swiglu_module(module: Any, liger_module: type[nn.Module]) -> None:
    """Gives an MLP the forward of ``liger_module``, which reads the projections by their names."""
    _become(module, liger_module)


def _patch_geglu_module(module: Any) -> None:
    _become(module, LigerGEGLUMLP)
