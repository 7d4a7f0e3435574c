"""The linear layers in an lm_head: a plain nn.Linear, a LoRA layer around one, or the copies of ``modules_to_save``."""

from torch import nn

from ..._core.modules.quantised import is_quantised
from .lora import is_lora_linear, supports


def heads_of(head):
    """The modules of a head that may compute the loss: its nn.Linear modules, or a LoRA layer around one."""
    return [head] if is_lora_linear(head) and supports(head) else linear_heads(head)


def linear_heads(head):
    """The plain nn.Linear modules of a head: itself, or the copies in PEFT's wrapper for ``modules_to_save``."""
    if isinstance(head, nn.Linear):
        return [head] if _is_plain(head) else []
    copies = getattr(head, "modules_to_save", None)
    inner = (
        [getattr(head, "original_module", None), *copies.values()]
        if isinstance(copies, nn.ModuleDict)
        else [None]
    )
    return inner if all(map(_is_plain, inner)) else []


def _is_plain(module):
    # Quantised layers of bitsandbytes have another class, those of torchao have another kind of weight.
    return (
        isinstance(module, nn.Linear)
        and getattr(type(module), "_liger_original", type(module)).forward is nn.Linear.forward
        and not is_quantised(module._parameters.get("weight"))
    )


def needs_logits(head):
    """Why the loss of a head is computed from full logits; None if the head may compute it."""
    if heads_of(head):
        return None
    kind = f"{type(head).__module__}.{type(head).__qualname__}"
    weight = getattr(head, "weight", None)
    if is_quantised(weight):
        kind += f" whose weight is a {type(weight).__module__}.{type(weight).__qualname__}"
    return f"its head is a {kind}, not a plain linear layer: the loss is computed from full logits"
