# SPDX-License-Identifier: BSD-3-Clause
"""Patched subclasses: patching sets the ``__class__`` of a module to one, unpatching restores the original.

Attributes of the instance do not change: parameters, buffers, hooks and state_dict. ``copy.deepcopy`` and
pickle preserve the patch, other instances of the original class are not affected. FSDP2 does the same.

A recipe describes a patched class: a frozen dataclass with ``kind`` and ``members(original)``, which returns
the members that the subclass overrides. It may have ``bases``: classes in which ``super()`` looks for a
method before the bases of the original.
"""

import copyreg
import functools
from types import MethodType

from torch import nn
from torch.nn.modules import module as hooks_of_all
from transformers.modeling_utils import PreTrainedModel

from ..._core.modules.hooks import ZERO, first_hook, hooks_of
from ..._core.modules.linear_layers import is_forward_of_class, moves_nothing, overrides_forward


def require_module(function, model):
    """Raises TypeError if ``model``, an argument of a public function, is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function} expects a torch.nn.Module, not {type(model).__name__}")


@functools.cache
def _metaclass(base):
    """The metaclass of patched classes of an original with the metaclass ``base``."""

    def __instancecheck__(cls, instance):
        # Layers of one class may have different recipes, or none. Wrapping policies (FSDP, activation
        # checkpointing) take the class of one layer, by its name, and test the others with isinstance.
        target = cls.__dict__.get("_liger_original", cls)
        return base.__instancecheck__(target, instance)

    return type("Patched", (base,), {"__instancecheck__": __instancecheck__})


@functools.cache
def patched_class(original, recipe, wrapper=None):
    """The subclass of ``original`` that the recipe describes; cached, so equal arguments give the same class.

    ``wrapper``: a function of a module that decorates the forward.

    It has the name of the original, by which transformers, PEFT and FSDP policies recognise classes. The
    printed name of a module gets the prefix Liger. A model of transformers does not, because the Trainer
    decides from its printed name whether to shift labels. ``isinstance`` treats it as the original: every
    instance of that is one of its own.
    """

    def reduce(self, protocol):
        # pickle cannot find this class by name, so it stores the original class and the recipe.
        rebuild, arguments, *state = original.__reduce_ex__(self, protocol)
        if rebuild is copyreg.__newobj__ and arguments == (cls,):
            wrappers = () if wrapper is None else (wrapper,)
            rebuild, arguments = _new_instance, (original, recipe, *wrappers)
        return (rebuild, arguments, *state)

    members = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": reduce,
        "_liger_original": original,
        "_liger_recipe": recipe,
        **recipe.members(original),
    }
    if wrapper is not None:
        members["forward"] = wrapper(members.get("forward", original.forward))
    forward = members.get("forward")
    if forward not in (None, original.forward):
        # torch.compile counts recompilations per code object, which classes of a recipe would share.
        forward.__code__ = forward.__code__.replace(co_name=f"forward_of_{original.__name__}")
    if not issubclass(original, PreTrainedModel):
        members["_get_name"] = lambda self: f"Liger{original._get_name(self)}"
    bases = (original, *getattr(recipe, "bases", ()))
    cls = _metaclass(type(original))(original.__name__, bases, members)
    return cls


def _new_instance(original, recipe, *wrappers):
    # As many arguments as before: the cache tells a missing wrapper from None.
    cls = patched_class(original, recipe, *wrappers)
    return cls.__new__(cls)


def recipe_of(module):
    """The recipe of a patched module, also of a class that FSDP2 derived from it; or None."""
    return getattr(type(module), "_liger_recipe", None)


def give_class(module, cls):
    """Sets the class of a module, and updates the forward that accelerate stored as ``_old_forward``."""
    stored = is_forward_of_class(module, "_old_forward")
    if not overrides_forward(module):
        module.__dict__.pop("forward", None)
    module.__class__ = cls
    if stored:
        module._old_forward = MethodType(cls.forward, module)


def instance_forward(module):
    """The forward attribute of the instance, which overrides the class's; None if there is none.

    None also for the hooks of accelerate, which call the forward of the class.
    """
    if is_forward_of_class(module, "_old_forward") or not overrides_forward(module):
        return None
    return module.__dict__["forward"]


def overriding_forward(module):
    """The instance forward of a patched module that replaces the patched class's; None if there is none.

    None also for a wrapper of the patched forward, such as the autocast of ``accelerator.prepare``.
    """
    forward = instance_forward(module)
    if forward is None or is_forward_of_class(module, "_original_forward"):
        return None
    return module.__dict__.get("_original_forward", forward)


def is_hooked(activation):
    """True if an activation is a module with hooks, which an op that contains the activation would not call.

    Those of ZeRO-3 do not count, since an activation has no weight to be gathered.
    """
    return isinstance(activation, nn.Module) and first_hook(hooks_of(activation), ZERO) is not None


# Their hooks gather weights, move and cast tensors, count; others may use the output.
_KNOWN_HOOKS = ("torch.", "transformers.", "accelerate.", "deepspeed.", "liger.")


def changing_hook(module):
    """The name of a forward hook that may change the output of a module, or None."""
    return _name_of_unknown(module._forward_hooks, hooks_of_all._global_forward_hooks)


def gradient_hook(module):
    """The name of a backward hook that gets the gradient of the output; None if there is none."""
    return _name_of_unknown(
        module._backward_hooks,
        module._backward_pre_hooks,
        hooks_of_all._global_backward_hooks,
        hooks_of_all._global_backward_pre_hooks,
    )


def _name_of_unknown(*tables):
    hook = first_hook(tables, _KNOWN_HOOKS)
    return None if hook is None else getattr(hook, "__qualname__", type(hook).__qualname__)


def is_called_plainly(module, x, in_call=False):
    """True if a call of the module with x does no more than its forward; hooks may gather or record.

    The hooks of ZeRO-3 do nothing where it keeps the weights gathered, and within the call (``in_call``); the
    hooks of accelerate do nothing where the weights are on the device of x.
    """
    return (
        (
            not any(hooks_of(module))
            or (first_hook(hooks_of(module), ZERO) is None and (in_call or _stays_gathered(module)))
        )
        and (not overrides_forward(module) or moves_nothing(module, x))
        and not hooks_of_all._has_any_global_hook()
    )


def _stays_gathered(module):
    """True if ZeRO-3 keeps the weights of a module gathered between its calls, as it does small ones
    (``ds_persist``, by stage3_param_persistence_threshold)."""
    given = [(name, p) for name, p in module._parameters.items() if p is not None]
    if not all(getattr(p, "ds_persist", False) for _, p in given):
        return False
    # The first step reads them before they are gathered. Reading an item, unlike items(), gathers it then.
    return all(module._parameters[name].shape == p.ds_shape for name, p in given)


def restore_class(module):
    """Restores the original class; RuntimeError if another was derived from the patched one."""
    if "_liger_original" in type(module).__dict__:
        give_class(module, type(module)._liger_original)
    elif recipe_of(module) is not None:
        raise RuntimeError(
            f"liger: {type(module).__name__} was derived from a patched class (by fully_shard, for example), "
            "so it cannot be restored any more: patch and unpatch before sharding"
        )
