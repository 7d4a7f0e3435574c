# SPDX-License-Identifier: BSD-3-Clause
"""Types that the annotations of several public functions share."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, TypedDict

import torch
import torch.distributed as dist

Device: TypeAlias = torch.device | str | int | None
Scalar: TypeAlias = float | torch.Tensor  # a number, or a tensor with one element
Sizes: TypeAlias = int | Sequence[int]

Activation: TypeAlias = Literal["silu", "gelu_tanh", "gelu"]
ExpertActivation: TypeAlias = Literal["silu", "gelu_tanh", "gelu", "gpt_oss"]
Approximate: TypeAlias = Literal["none", "tanh"]
CastingMode: TypeAlias = Literal["llama", "gemma", "none"]
GateActivation: TypeAlias = Literal["silu", "sigmoid"]
CrossEntropyMetric: TypeAlias = Literal["z_loss", "token_accuracy", "argmax", "logprobs", "entropy"]
LogProbMetric: TypeAlias = Literal["entropy", "argmax", "log_sum_sq_probs", "mean_logits"]
Reduction: TypeAlias = Literal["mean", "sum", "none"]
DivergenceReduction: TypeAlias = Literal["none", "sum", "mean", "batchmean"]


# --- options, for type checkers: the functions have the defaults --------------------------------------------


class ShardOptions(TypedDict, total=False):
    """The classes of the vocabulary that this process has."""

    group: "dist.ProcessGroup | None"
    vocab_start: int | None
    vocab_size: int | None


class LowRankOptions(TypedDict, total=False):
    """The low-rank term of an lm_head (LoRA)."""

    lora_a: torch.Tensor | None
    lora_b: torch.Tensor | None
    lora_scale: float


class _CrossEntropyOptions(ShardOptions, total=False):
    ce_weight: torch.Tensor | None
    token_weight: torch.Tensor | None
    denominator: Scalar | None
    ignore_index: int
    label_smoothing: float
    lse_square_scale: float
    reduction: Reduction
    softcap: float | None


class CrossEntropyOptions(_CrossEntropyOptions, total=False):
    """The options of :func:`liger.cross_entropy` but ``metrics``."""

    inplace: bool


class FusedCrossEntropyOptions(_CrossEntropyOptions, LowRankOptions, total=False):
    """The options of :func:`liger.fused_linear_ce` but ``metrics``."""

    accum_dtype: torch.dtype | None
    memory_budget: int | None
    accumulate_grad_weight: bool


class LogProbOptions(ShardOptions, LowRankOptions, total=False):
    """The options of :func:`liger.fused_linear_logprobs` but ``metrics``."""

    ignore_index: int
    recompute: bool | None
    accum_dtype: torch.dtype | None
    logits_dtype: torch.dtype | None
    memory_budget: int | None
    softcap: float | None
    temperature: float
    accumulate_grad_weight: bool
