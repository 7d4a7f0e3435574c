# SPDX-License-Identifier: BSD-3-Clause
"""The decoder layers of a model, and the switch of each layer between recomputation and kept activations.

The layers of transformers are switched by their own attributes: ``gradient_checkpointing`` is True for every
layer, and ``_gradient_checkpointing_func`` either recomputes the layer or calls it. Thus a layer that keeps
its activations gets the same arguments as one that is recomputed (transformers removes key-value caches from
them). Layers of other models get a forward with these two attributes.
"""

import functools
import re

from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ..recipe.classes import recipe_of
from .kept_attention import KeptAttention, refusal_of
from .memory_plan import State, first_states
from .offload import Offloaded

# Some versions of transformers (4.57) checkpoint the call of a layer with its hooks, so they read the
# attributes before a hook of the layer can set them.
READS_BEFORE_HOOKS = "__call__" in vars(GradientCheckpointingLayer)

FLAG, FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
_MISSING = "missing"
# The child of torch's wrappers of torch.distributed.algorithms._checkpoint.
_WRAPPED = "_checkpoint_wrapped_module"
# Attribute of a layer with the function by which the user recomputes it.
_RECOMPUTE = "_liger_recompute"

recompute = functools.partial(checkpoint, use_reentrant=False)


def keep(function, *args, **kwargs):
    """Calls the layer without a checkpoint, so autograd saves its activations."""
    return function(*args, **kwargs)


def find(model):
    """The decoder layers: the row of layers with the most parameters; an empty list without any."""
    layers = _largest_row(model, lambda module: isinstance(module, GradientCheckpointingLayer))
    return layers or _largest_row(model, _looks_like_a_layer)


def _looks_like_a_layer(module):
    name = type(module).__name__
    return name.endswith(("Layer", "Block")) and any(True for _ in module.children())


def _largest_row(model, is_layer):
    # Names that differ in numbers alone are a row. Wrappers of layers (FSDP, DDP) change all names alike.
    rows: dict[str, list] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if is_layer(module) and re.search(r"(^|\.)\d+(\.|$)", name):
            inside = (*inside, name + ".")
            rows.setdefault(re.sub(r"\d+", "#", name), []).append(module)
    return max(rows.values(), key=lambda row: sum(map(_size, row)), default=[])


def _size(layer):
    # ZeRO-3 partitions parameters and stores their number of elements in ds_numel.
    return sum(getattr(p, "ds_numel", p.numel()) for p in layer.parameters())


def check_wrappers(model, layers):
    """Raises ValueError if torch's CheckpointWrapper or OffloadWrapper is around a layer or inside of one."""
    parts = {id(part) for layer in layers for part in layer.modules()}
    for module in model.modules():
        if _WRAPPED in module._modules and any(id(part) in parts for part in module.modules()):
            wrapper, inner = (type(m).__name__ for m in (module, module._modules[_WRAPPED]))
            raise ValueError(
                f"liger.transformers.checkpoint: torch's {wrapper} is around {inner} and does its work in every step, "
                "whatever a plan chooses; leave out apply_activation_checkpointing, and activation_checkpointing of "
                "the Trainer's fsdp_config"
            )


def kind(layer):
    """A key of layers with equally large activations: classes, patches, shapes and dtypes of parts."""
    parts = tuple((name, type(module).__name__, recipe_of(module)) for name, module in layer.named_modules())
    weights = tuple(
        (name, tuple(getattr(p, "ds_shape", p.shape)), p.dtype) for name, p in layer.named_parameters()
    )
    return parts, weights


class Switches:
    """Turns checkpointing on in a model, switches its layers, and restores what the model had before.

    What other code has set since stays.
    """

    def __init__(self, model, layers, store):
        self.layers, self.store, self._states = layers, store, None
        # The numbers of layers that every_n_layers leaves out: they keep everything in any plan.
        self.whole: frozenset[int] = frozenset()
        # Of each layer, whether attention that it keeps leaves the device.
        self.leaving = [False] * len(layers)
        # Of each layer, whether torch's selective checkpointing keeps it.
        self.selective = [False] * len(layers)
        # Whether the store is on because transformers' activation_checkpointing_enable has asked for it.
        self._asked = False
        own = {id(layer) for layer in layers}
        self._wrapped = [layer for layer in layers if not isinstance(layer, GradientCheckpointingLayer)]
        wrapped = {id(layer) for layer in self._wrapped}
        # By module: the attributes that other code has set, and those that this object has set since.
        self._before, self._ours = {}, {}
        self.read()
        for module in model.modules():
            if FLAG in vars(module) or hasattr(type(module), FLAG) or id(module) in own:
                flag, function = True, checkpointing_of(module)
                if id(module) not in wrapped and any(id(child) in wrapped for child in module.modules()):
                    # Older code of models checkpoints the calls of its layers itself, all or none.
                    flag = False
                self._set(module, function, flag)
        # accelerate's hooks and users set a forward of the instance.
        self._forwards = [vars(layer).get("forward") for layer in self._wrapped]
        for layer, replaced in zip(self._wrapped, self._forwards, strict=True):
            layer.forward = functools.partial(_forward, layer, replaced)

    @property
    def has_wrapped(self):
        """True if the layers are none of transformers."""
        return bool(self._wrapped)

    def turn(self, states=None):
        """Sets what each layer keeps; None: nothing, but for the layers that are ``whole``."""
        states = tuple(first_states(len(self.layers), self.whole)) if states is None else states
        # Other code that turns checkpointing on or off does so for all layers.
        if states == self._states and all(map(self._is_set, (self.layers[0], self.layers[-1]))):
            return
        self._states = states
        last = max((n for n, state in enumerate(states) if state != State.EVERYTHING), default=None)
        for number, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            function = keep
            if state != State.EVERYTHING:
                function = checkpointing_of(layer)
            if state == State.ATTENTION:
                store = self.store if self.leaving[number] else None
                function = KeptAttention(function, store, self.selective[number])
            if function is not keep and self.store.is_on:
                # The backward asks for the inputs of the last of these layers at once.
                function = Offloaded(self.store, function, stays=number == last)
            self._set(layer, function)

    def refusal(self):
        """The reason why no layer can keep its attention alone, or None."""
        return next(filter(None, (refusal_of(checkpointing_of(layer)) for layer in self.layers)), None)

    def _is_set(self, layer):
        flag, function = self._ours.get(layer, (None, None))
        return vars(layer).get(FLAG) is flag and vars(layer).get(FUNCTION) is function

    def turn_on(self):
        """Offloads from the next :meth:`turn` on; returns whether that is a change."""
        if not self.store.turn_on():
            return False
        self._states = None
        return True

    def read(self):
        """Reads what transformers' activation_checkpointing_enable has set since: ``every_n_layers``, and
        ``offload``, which turns the store on or off. Returns whether that is a change."""
        if self._is_set(self.layers[0]):
            return False
        before = self.whole, self.store.is_on
        flags = [vars(layer).get(FLAG) for layer in self.layers]
        # False for all layers turns checkpointing off: the plan goes on.
        self.whole = frozenset(n for n, flag in enumerate(flags) if flag is False and True in flags)
        if _offloads(vars(self.layers[0]).get(FUNCTION)):
            self._asked = self.turn_on() or self._asked
        elif self._asked:
            self._asked, self._states = False, None
            self.store.turn_off()
        return (self.whole, self.store.is_on) != before

    def use(self, layer, function):
        """Sets the function that calls a layer, until the next :meth:`turn`."""
        self._states = None
        checkpointing_of(layer)
        self._set(layer, function)

    def _set(self, module, function, flag=True):
        self._note(module)
        # Not setattr: its checks for parameters and modules cost more than the rest of the planner.
        vars(module)[FLAG], vars(module)[FUNCTION] = self._ours[module] = flag, function

    def _note(self, module):
        """Records the attributes of a module if other code has set them."""
        found = tuple(vars(module).get(name, _MISSING) for name in (FLAG, FUNCTION))
        if any(a is not b for a, b in zip(found, self._ours.get(module, (None, None)), strict=True)):
            self._before[module] = found

    def restore(self):
        """Sets the attributes that other code set last."""
        for layer, replaced in zip(self._wrapped, self._forwards, strict=True):
            vars(layer).pop("forward", None)
            if replaced is not None:
                layer.forward = replaced
        for module in self._ours:
            self._note(module)
        for module, before in self._before.items():
            vars(module).pop(_RECOMPUTE, None)
            for name, value in zip((FLAG, FUNCTION), before, strict=True):
                if isinstance(value, str):
                    vars(module).pop(name, None)
                else:
                    vars(module)[name] = value


def checkpointing_of(module):
    """The function that recomputes the module: the user's, from the Trainer for example, or torch's."""
    found = vars(module).get(FUNCTION)
    if isinstance(found, Offloaded):
        found = found.function
    if _offloads(found):
        found = functools.partial(checkpoint, **found.keywords)
    # Where transformers turns checkpointing off, it sets torch's function without a choice of use_reentrant.
    if found in (None, keep, checkpoint) or _hides_steps(found) or getattr(found, "is_planned", False):
        found = vars(module).get(_RECOMPUTE, recompute)
    elif found is not recompute:
        vars(module)[_RECOMPUTE] = found
    return found


def _hides_steps(function):
    """True if hooks of a layer run without gradients in this function, as in a forward that is no step."""
    return READS_BEFORE_HOOKS and getattr(function, "keywords", {}).get("use_reentrant") is True


def _offloads(function):
    """True for the function by which transformers (5.24) checkpoints and copies saved tensors to the host, on
    the stream that computes."""
    made_by = getattr(getattr(function, "func", None), "__qualname__", "")
    return made_by.endswith("_activation_checkpointing_enable.<locals>.checkpoint_func")


def _forward(layer, replaced, *args, **kwargs):
    """The forward of a layer that is not of transformers, around its own or ``replaced``."""
    forward = functools.partial(type(layer).forward, layer) if replaced is None else replaced
    original = functools.partial(forward, **kwargs)
    if layer.training and vars(layer)[FLAG]:
        return vars(layer)[FUNCTION](original, *args)
    return original(*args)
