# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy of logits and of an lm_head, with the arguments of liger_kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..._core.math.dtypes import accumulate_dtype
from ..._core.op.autograd import graph_of_its_own
from ...ops.cross_entropy.op import cross_entropy
from ...ops.fused_linear_ce.op import fused_linear_ce
from ...ops.fused_linear_logprobs.op import fused_linear_logprobs
from ..parameters import OptionsModule, takes

# liger_cross_entropy may be stored as torch's cross_entropy, which it calls for what the op lacks.
_torch_cross_entropy = nn.functional.cross_entropy


@dataclass
class CrossEntropyOutput:
    """The loss and the requested metrics; the others are None."""

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None


def _mean_divisor(target, ce_weight, ignore_index):
    """The divisor of a mean; 1 if all rows are ignored: that mean is 0 in liger_kernel, and NaN in liger."""
    valid = target != ignore_index
    if ce_weight is None:
        return valid.sum().clamp_min(1)
    classes = torch.where(valid, target, 0).clamp(0, ce_weight.shape[0] - 1)
    weights = ce_weight.detach().to(accumulate_dtype(ce_weight.dtype))
    total = torch.where(valid, weights[classes], 0.0).sum()
    return torch.where(valid.any(), total, 1.0)


def metrics_named(return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False):
    """liger's names of the metrics that flags of liger_kernel ask for."""
    flags = {
        "z_loss": return_z_loss,
        "token_accuracy": return_token_accuracy,
        "argmax": return_predicted_tokens,
    }
    return tuple(name for name, flag in flags.items() if flag)


def _four(op, *tensors, target, return_z_loss, return_token_accuracy, return_predicted_tokens, **options):
    """(loss, z_loss, token_accuracy, predicted_tokens) of one of liger's ops; None unless requested."""
    per_row, ignore_index = options["reduction"] == "none", options["ignore_index"]
    if options["reduction"] == "mean":
        options["denominator"] = _mean_divisor(target, options["ce_weight"], ignore_index)
    metrics = metrics_named(
        return_z_loss,
        return_token_accuracy and not per_row,
        return_predicted_tokens or (return_token_accuracy and per_row),
    )
    result = op(*tensors, metrics=metrics, **options)
    if isinstance(result, torch.Tensor):
        return result, None, None, None
    loss, z_loss, accuracy, predicted = result[:4]
    if return_token_accuracy and per_row:
        accuracy = ((predicted == target) & (target != ignore_index)).float()
    return loss, z_loss, accuracy, predicted if return_predicted_tokens else None


def _packed(function, *tensors, **options):
    """The loss alone of a function of four, or with any metric requested a :class:`CrossEntropyOutput`."""
    result = function(*tensors, **options)
    requested = any(value for name, value in options.items() if name.startswith("return_"))
    return CrossEntropyOutput(*result) if requested else result[0]


# --- of logits ----------------------------------------------------------------------------------------------


@takes(
    "_input, target, weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction='mean', "
    "softcap=None, return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False"
)
def _apply_cross_entropy(_input, target, weight, **options):
    """(loss, z_loss, token_accuracy, predicted_tokens) of :func:`liger.cross_entropy`, not in place.

    A mean over no rows is 0, and with ``reduction="none"`` the accuracy is one number per row.
    """
    return _four(cross_entropy, _input, target, target=target, ce_weight=weight, **options)


@takes(
    "input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', "
    "label_smoothing=0.0, lse_square_scale=0.0, softcap=None, return_z_loss=False, return_token_accuracy=False, "
    "return_predicted_tokens=False"
)
def liger_cross_entropy(input, target, weight, size_average, reduce, **options):
    """:func:`liger.cross_entropy` with the signature of :func:`torch.nn.functional.cross_entropy`, and more
    options.

    torch computes what the op does not: class probabilities as targets, classes in another dimension than the
    last, and the deprecated arguments.
    """
    if size_average is None and reduce is None and input.dim() == 2 and not target.is_floating_point():
        return _packed(_apply_cross_entropy, input, target, weight, **options)
    of_torch = {name: options.pop(name) for name in ("ignore_index", "reduction", "label_smoothing")}
    # None, 0 or False, each without effect.
    if options.pop("softcap") is not None or any(options.values()):
        raise ValueError(
            f"liger_cross_entropy: input has shape {tuple(input.shape)} and target dtype {target.dtype}, expected "
            "(rows, classes) and class indices with lse_square_scale, softcap or a metric"
        )
    return _torch_cross_entropy(input, target, weight, size_average, reduce=reduce, **of_torch)


class LigerCrossEntropyLoss(
    OptionsModule,
    of=liger_cross_entropy,
    options="weight ignore_index lse_square_scale label_smoothing reduction softcap return_z_loss "
    "return_token_accuracy return_predicted_tokens",
):
    """:func:`liger_cross_entropy` as a module, constructed with the arguments in liger_kernel's order."""

    def forward(self, _input: torch.Tensor, target: torch.Tensor) -> torch.Tensor | CrossEntropyOutput:
        return self._call(_input, target)


@torch.no_grad()
def fused_selective_log_softmax(logits, input_ids, temperature=0.9, mask=None):
    """Log-probabilities (B, L), float32, of the last L tokens of ``input_ids``; without gradients.

    Args:
        logits: (B, L + 1, V); the last position has no token.
        input_ids: (B, at least L).
        temperature: divisor of the logits.
        mask: the shape of input_ids, 0 at tokens that get the result 0; or None.
    """
    length = logits.shape[1] - 1
    target = input_ids[:, input_ids.shape[1] - length :]
    if mask is not None:
        target = torch.where(mask[:, mask.shape[1] - length :] != 0, target, -100)
    # One sequence at a time: the scaled logits of the whole batch would need the memory of the logits again.
    rows = [
        cross_entropy(
            scaled[:-1] if temperature == 1 else scaled[:-1].to(accumulate_dtype(scaled.dtype)) / temperature,
            ids,
            reduction="none",
        )
        for scaled, ids in zip(logits, target, strict=True)
    ]
    return -torch.stack(rows).float() if rows else logits.new_zeros((0, length), dtype=torch.float32)


# --- of an lm_head ------------------------------------------------------------------------------------------


_OF_HEAD = (
    "weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, "
    "reduction='mean', softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False, "
    "return_token_accuracy=False, return_predicted_tokens=False"
)


@takes(f"_input, {_OF_HEAD}, ce_impl=None, ce_mode=None, chunk_mem_const=1")
def _apply_fused_linear_cross_entropy(
    _input, weight, target, bias, use_token_scaling, ce_impl, ce_mode, chunk_mem_const, **options
):
    """(loss, z_loss, token_accuracy, predicted_tokens) of :func:`liger.fused_linear_ce`.

    ``use_token_scaling`` multiplies the loss of each row by the probability of its target, without gradient.
    ``accum_dtype=None`` sums the gradient of the weight in float32. ``ce_impl``, ``ce_mode`` and
    ``chunk_mem_const`` have no effect: LIGER_BACKEND chooses kernels, LIGER_MEMORY_BUDGET the size of a
    chunk. A mean over no rows is 0, and with ``reduction="none"`` the accuracy is one number per row.
    """
    token_weight = None
    if use_token_scaling:
        with torch.no_grad():
            same = {name: options[name] for name in ("ignore_index", "softcap")}
            token_weight = fused_linear_logprobs(_input, weight, target, bias, **same).exp()
    tensors = _input, weight, target, bias
    return _four(fused_linear_ce, *tensors, target=target, token_weight=token_weight, **options)


@takes(f"input, {_OF_HEAD}, chunk_mem_const=1")
def liger_fused_linear_cross_entropy(input, chunk_mem_const, **options):
    """:func:`liger.fused_linear_ce`: the loss, or with any metric a :class:`CrossEntropyOutput`."""
    return _packed(_apply_fused_linear_cross_entropy, input, **options)


class LigerFusedLinearCrossEntropyLoss(
    OptionsModule,
    of=liger_fused_linear_cross_entropy,
    options="ce_weight ignore_index lse_square_scale label_smoothing reduction softcap return_z_loss accum_dtype "
    "use_token_scaling return_token_accuracy return_predicted_tokens",
):
    """:func:`liger_fused_linear_cross_entropy` as a module; the weight of the lm_head comes first."""

    def forward(self, lin_weight, _input, target, bias=None):
        return self._call(_input, lin_weight, target, bias)


@takes(f"_input, {_OF_HEAD}".replace(" bias=None, ce_weight=None", " ce_weight=None, bias=None"))
def fused_linear_cross_entropy_forward(_input, weight, target, bias, reduction, **options):
    """(loss, z_loss, token_accuracy, predicted_tokens, grad_input, grad_weight, grad_bias), for a scalar
    loss.

    Gradients of tensors that require none are None.
    """
    if reduction == "none":
        raise ValueError(
            "fused_linear_cross_entropy_forward: reduction is 'none', expected 'mean' or 'sum': with these "
            "the gradients do not depend on the gradient of the loss"
        )
    leaves = [
        None if t is None else t.detach().requires_grad_(t.requires_grad) for t in (_input, weight, bias)
    ]
    with torch.enable_grad(), graph_of_its_own():
        tensors = leaves[0], leaves[1], target, leaves[2]
        result = _apply_fused_linear_cross_entropy(*tensors, reduction=reduction, **options)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = iter(torch.autograd.grad(result[0], wanted) if wanted else ())
    grads = [next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
    return (result[0].detach(), *result[1:], *grads)


def fused_linear_cross_entropy_backward(grad_output, grad_input, grad_weight, grad_bias):
    """The three gradients times ``grad_output``, a scalar; None for None."""
    return tuple(
        None if g is None else g * grad_output.to(g.dtype) for g in (grad_input, grad_weight, grad_bias)
    )


@takes(
    "_input, weight, target, temperature=1.0, ignore_index=-100, m_tiles_per_cluster=1, return_entropy=False, "
    "selected_token_ids=None"
)
def _apply_scaled_cross_entropy(
    _input, weight, target, temperature, ignore_index, m_tiles_per_cluster, return_entropy, selected_token_ids
):
    """Negative log-likelihood of each row of ``_input`` (M, H), by :func:`liger.fused_linear_logprobs`.

    Returns:
        The likelihoods (M,); with ``return_entropy`` also the entropies (M,); with ``selected_token_ids``
        (K,) also the log-probabilities (M, K) of those classes, all in float32 and differentiable, 0 in
        ignored rows.
    """
    metrics = ("entropy",) if return_entropy else ()
    result = fused_linear_logprobs(
        _input, weight, target, ignore_index=ignore_index, metrics=metrics, temperature=temperature
    )
    logprobs, entropy = (result.logprobs, result.entropy) if return_entropy else (result, None)
    outputs = [-logprobs] + ([entropy] if return_entropy else [])
    if selected_token_ids is not None:
        valid = (target != ignore_index).unsqueeze(-1)
        rows, known = _input.float(), torch.where(valid.squeeze(-1), target, 0)
        target_logit = (rows * weight[known].float()).sum(-1) / temperature
        selected = rows @ weight[selected_token_ids].float().t() / temperature
        # The partition function's logarithm: the target's logit minus its log-probability.
        outputs.append(torch.where(valid, selected - (target_logit - logprobs).unsqueeze(-1), 0.0))
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


# --- of a vocabulary that is sharded over processes ---------------------------------------------------------


def liger_fused_linear_scaled_cross_entropy_tp(
    input,
    weight,
    target,
    tp_group,
    temperature=1.0,
    ignore_index=-100,
    tiles_per_reduce=1,
    return_entropy=False,
):
    """Negative log-likelihood of each row of ``input`` (M, H), by :func:`liger.fused_linear_logprobs` with a
    group.

    Args:
        weight: (classes of this process, H); all shards have equal size.
        target: (M,) class indices among all classes.
        tp_group: the processes with the shards; None: all processes.
        tiles_per_reduce: without effect.

    Returns:
        The likelihoods (M,); with ``return_entropy`` also the entropies (M,), in float32, 0 in ignored rows.
        The gradient of ``input`` is the complete one on every process.
    """
    result = fused_linear_logprobs(
        input,
        weight,
        target,
        ignore_index=ignore_index,
        metrics=("entropy",) if return_entropy else (),
        group=torch.distributed.group.WORLD if tp_group is None else tp_group,
        temperature=temperature,
    )
    return (-result.logprobs, result.entropy) if return_entropy else -result


_FORMULAS: dict[str, Sequence[str]] = {
    "label_smoothing_formula": ("pytorch",),
    "label_smoothing_mode": ("global",),
    "reduction": ("none", "mean", "sum"),
}


@takes(
    "vocab_parallel_logits, target, tp_group, ignore_index=-100, label_smoothing=0.0, "
    "label_smoothing_formula='pytorch', label_smoothing_mode='global', reduction='none'"
)
def _apply_vocab_parallel(vocab_parallel_logits, target, tp_group, **options):
    """:func:`liger.cross_entropy` of logits (..., classes of this process), in the shape of target."""
    for name, expected in _FORMULAS.items():
        if options[name] not in expected:
            raise ValueError(
                f"LigerVocabParallelCrossEntropy: {name} is '{options[name]}', expected {' or '.join(expected)}"
            )
    del options["label_smoothing_formula"], options["label_smoothing_mode"]
    group = None if tp_group is None or tp_group.size() == 1 else tp_group
    return cross_entropy(vocab_parallel_logits, target, group=group, **options)


class LigerVocabParallelCrossEntropy(
    OptionsModule,
    of=_apply_vocab_parallel,
    options="ignore_index label_smoothing reduction label_smoothing_formula label_smoothing_mode",
):
    """Cross entropy of logits (S, B, classes of this process); the loss has the shape of target, (S, B).

    Raises:
        ValueError: in the forward, ``label_smoothing_formula="megatron"`` or
            ``label_smoothing_mode="partition"``.
    """

    def forward(
        self, vocab_parallel_logits: torch.Tensor, target: torch.Tensor, tp_group: Any = None
    ) -> torch.Tensor:
        return self._call(vocab_parallel_logits, target, tp_group)
