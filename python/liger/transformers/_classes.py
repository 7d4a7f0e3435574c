"""Patched subclasses: a module is patched by giving it a class of its own, and restored by giving back the old one.

The instance is left alone: parameters, buffers, hooks and state_dict stay as they are, ``copy.deepcopy`` and pickle
keep the patch, and other instances of the class know nothing of it. FSDP2 does the same to the modules it shards.

A recipe says how a class is patched: a frozen dataclass with ``kind`` and ``members(original)``, which returns what the
subclass overrides.
"""

import copyreg
import functools
from types import MethodType

from transformers.modeling_utils import PreTrainedModel


@functools.cache
def patched_class(original, recipe):
    """The subclass of ``original`` that the recipe describes; always the same one for the same pair.

    It has the name of the original, by which transformers, PEFT and FSDP policies recognise classes, and shows itself
    only when the model is printed; a model of transformers not even then, because the Trainer asks it for its printed
    name to find out whether its labels are to be shifted.
    """

    def reduce(self, protocol):
        # A class made here cannot be found by name, so an instance is pickled and copied by class and recipe.
        rebuild, arguments, *state = original.__reduce_ex__(self, protocol)
        if rebuild is copyreg.__newobj__ and arguments == (cls,):
            rebuild, arguments = _new_instance, (original, recipe)
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
    if not issubclass(original, PreTrainedModel):
        members["_get_name"] = lambda self: f"Liger{original._get_name(self)}"
    cls = type(original)(original.__name__, (original,), members)
    return cls


def _new_instance(original, recipe):
    cls = patched_class(original, recipe)
    return cls.__new__(cls)


def recipe_of(module):
    """The recipe that the module was patched by, or None; classes that FSDP2 derived from a patched one count."""
    return getattr(type(module), "_liger_recipe", None)


def give_class(module, cls):
    """Changes the class of a module; a forward that accelerate has put behind its hooks follows."""
    before = type(module).forward
    module.__class__ = cls
    if getattr(module.__dict__.get("_old_forward"), "__func__", None) is before:
        module._old_forward = MethodType(cls.forward, module)


def hiding_forward(module):
    """The forward set on the instance that hides that of the class; None if there is none, or accelerate's hooks, which
    call that of the class."""
    forward = module.__dict__.get("forward")
    if forward is None or _is_of_class(module, "_old_forward"):
        return None
    return forward


def forward_in_its_place(module):
    """The same after patching, when what wraps the forward of the patched class, as the autocast of
    ``accelerator.prepare`` does, hides nothing."""
    forward = hiding_forward(module)
    if forward is None or _is_of_class(module, "_original_forward"):
        return None
    return module.__dict__.get("_original_forward", forward)


def _is_of_class(module, name):
    return getattr(module.__dict__.get(name), "__func__", None) is type(module).forward


def restore_class(module):
    """Takes the patch off a module. Raises RuntimeError if another class has been derived from the patched one."""
    if "_liger_original" in type(module).__dict__:
        give_class(module, type(module)._liger_original)
    elif recipe_of(module) is not None:
        raise RuntimeError(
            f"liger: {type(module).__name__} was derived from a patched class (by fully_shard, for example), "
            "so it cannot be restored any more: patch and unpatch before sharding"
        )
