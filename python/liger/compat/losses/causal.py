# SPDX-License-Identifier: BSD-3-Clause
"""The loss of a causal language model from its hidden states, and output classes with metrics."""

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

from ...ops.fused_linear_ce.op import fused_linear_ce
from ..parameters import takes
from .cross_entropy import CrossEntropyOutput, liger_fused_linear_cross_entropy, metrics_named


def unpack_cross_entropy_result(result: Any) -> tuple[Any, Any, Any, Any]:
    """(loss, z_loss, token_accuracy, predicted_tokens) of an output, of a tuple, or of a loss alone."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    items = tuple(result) if isinstance(result, tuple) else (result,)
    return (*items, None, None, None)[:4]


def _fused_function():
    """liger_fused_linear_cross_entropy, or the function by which a program replaced it in liger_kernel."""
    module = sys.modules.get("liger_kernel.transformers.functional")
    return getattr(module, "liger_fused_linear_cross_entropy", liger_fused_linear_cross_entropy)


@takes(
    "hidden_states, lm_head_weight, target, num_items_in_batch=None, ignore_index=-100, final_logit_softcapping=None, "
    "accum_dtype=None, return_token_accuracy=False, return_predicted_tokens=False, **kwargs"
)
def fixed_fused_linear_cross_entropy(
    hidden_states, lm_head_weight, target, num_items_in_batch, final_logit_softcapping, **kwargs
):
    """The mean loss, or with ``num_items_in_batch`` the sum over that number.

    Returns:
        The loss, or with a metric a :class:`CrossEntropyOutput`.
    """
    options = {name: kwargs.pop(name) for name in ("ignore_index", "accum_dtype")}
    options["softcap"] = final_logit_softcapping
    requested = {name: kwargs.pop(name) for name in ("return_token_accuracy", "return_predicted_tokens")}
    function = _fused_function()
    if function is liger_fused_linear_cross_entropy and not kwargs and num_items_in_batch is not None:
        # The op divides the gradients of each chunk; dividing its result would rescale them all again.
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(hidden_states.device)
        options |= {"denominator": num_items_in_batch, "metrics": metrics_named(**requested)}
        result = fused_linear_ce(hidden_states, lm_head_weight, target, **options)
        if isinstance(result, torch.Tensor):
            return result
        return CrossEntropyOutput(result.loss, None, result.token_accuracy, result.argmax)
    options |= requested | {"reduction": "mean" if num_items_in_batch is None else "sum"}
    result = function(hidden_states, lm_head_weight, target, **options, **kwargs)
    loss, _, token_accuracy, predicted_tokens = unpack_cross_entropy_result(result)
    if num_items_in_batch is not None:
        loss = loss / num_items_in_batch
    if not any(requested.values()):
        return loss
    return CrossEntropyOutput(loss, None, token_accuracy, predicted_tokens)


@takes(
    "hidden_states, lm_head_weight, labels, hidden_size, num_items_in_batch=None, ignore_index=-100, "
    "shift_labels=None, final_logit_softcapping=None, return_token_accuracy=False, return_predicted_tokens=False, "
    "**kwargs"
)
def LigerForCausalLMLoss(hidden_states, lm_head_weight, labels, hidden_size, shift_labels, **options):
    """The loss of next tokens from hidden states (..., hidden_size), without materialised logits.

    Args:
        labels: (...), shifted by one here, unless ``shift_labels`` is given.
        num_items_in_batch: the divisor of the sum, a number or a tensor with one element; None: the mean.
        kwargs: further options of ``liger_fused_linear_cross_entropy``, such as ``bias``; others are ignored.

    Returns:
        The loss, or with a metric a :class:`CrossEntropyOutput`.
    """
    functions = liger_fused_linear_cross_entropy, fixed_fused_linear_cross_entropy
    known = {name for function in functions for name in inspect.signature(function).parameters}
    options = {name: value for name, value in options.items() if name in known}
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=options["ignore_index"])[..., 1:]
    rows, target = hidden_states.reshape(-1, hidden_size), shift_labels.reshape(-1).to(hidden_states.device)
    return fixed_fused_linear_cross_entropy(rows, lm_head_weight, target, **options)


@dataclass
class LigerCausalLMOutputWithPast(CausalLMOutputWithPast):
    """transformers' output with two metrics."""

    token_accuracy: torch.FloatTensor | None = None
    predicted_tokens: torch.LongTensor | None = None


@dataclass
class LigerMoeCausalLMOutputWithPast(MoeCausalLMOutputWithPast):
    """transformers' output of a mixture-of-experts model with two metrics."""

    token_accuracy: torch.FloatTensor | None = None
    predicted_tokens: torch.LongTensor | None = None
