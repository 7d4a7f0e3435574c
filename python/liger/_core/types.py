"""Types that the annotations of several public functions share."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch

Device: TypeAlias = torch.device | str | int | None
Scalar: TypeAlias = float | torch.Tensor  # a number, or a tensor with one element
Sizes: TypeAlias = int | Sequence[int]

Activation: TypeAlias = Literal["silu", "gelu_tanh", "gelu"]
ExpertActivation: TypeAlias = Literal["silu", "gelu_tanh", "gelu", "gpt_oss"]
Approximate: TypeAlias = Literal["none", "tanh"]
CastingMode: TypeAlias = Literal["llama", "gemma", "none"]
GateActivation: TypeAlias = Literal["silu", "sigmoid"]
Metric: TypeAlias = Literal["z_loss", "token_accuracy", "predicted_tokens", "logprobs", "entropy"]
Reduction: TypeAlias = Literal["mean", "sum", "none"]
DivergenceReduction: TypeAlias = Literal["none", "sum", "mean", "batchmean"]
