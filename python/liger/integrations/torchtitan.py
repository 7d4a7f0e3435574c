# SPDX-License-Identifier: BSD-3-Clause
"""Overrides of torchtitan, each chosen by its name:

    --override.imports liger.integrations.torchtitan.loss liger.integrations.torchtitan.rms_norm \\
        liger.integrations.torchtitan.swiglu
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config.override import derive, override
from torchtitan.distributed.spmd_types import spmd_mesh_size
from torchtitan.models.common import FeedForward, RMSNorm
from typing_extensions import Unpack

from .._core.modules.overriding import overriding
from .._core.op.types import FusedCrossEntropyOptions
from ..ops.fused_linear_ce.op import fused_linear_ce
from ..ops.rms_norm import rms_norm as _rms_norm
from ..ops.swiglu import swiglu as _swiglu


class LigerRMSNorm(RMSNorm):
    """:func:`liger.rms_norm`, rounded once."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _rms_norm(x, self.weight, self.eps, casting_mode="gemma")


class LigerFeedForward(FeedForward):
    """The three projections around :func:`liger.swiglu`."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(_swiglu(self.w1(x), self.w3(x)))


class LigerLoss(ChunkedLossWrapper):
    """:func:`liger.fused_linear_ce` of the hidden states. One graph: no loop over chunks, and no backward
    within the forward."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        options: FusedCrossEntropyOptions = field(default_factory=FusedCrossEntropyOptions)
        """Options of liger.fused_linear_ce, such as memory_budget."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.options = config.options

    def set_lm_head(self, lm_head: nn.Module) -> None:
        if type(lm_head).forward is not nn.Linear.forward:
            raise TypeError(
                f"liger.integrations.torchtitan.loss: the lm_head is of {type(lm_head).__name__}, expected a "
                "linear layer that computes nothing else"
            )
        super().set_lm_head(lm_head)

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        head = self.lm_head

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            if isinstance(hidden, DTensor) or isinstance(head.weight, DTensor) or spmd_mesh_size("tp") > 1:
                raise RuntimeError(
                    "liger.integrations.torchtitan.loss: the lm_head is tensor parallel, expected "
                    "--parallelism.tensor_parallel_degree 1"
                )
            options: FusedCrossEntropyOptions = {
                **self.options,
                "reduction": "sum" if global_valid_tokens is None else "mean",
                "denominator": global_valid_tokens,
            }
            return fused_linear_ce(hidden, head.weight, labels, head.bias, **options)

        # In a call of the head, so that the hooks of FSDP gather its weight and reduce its gradient. Labels
        # and denominator are no arguments of that call: FSDP would round the denominator to 16 bits.
        with overriding(head, forward=forward):
            return head(pred), {}


@override(target=RMSNorm.Config, exact=True, description="liger.rms_norm")
def rms_norm(cfg: RMSNorm.Config) -> LigerRMSNorm.Config:
    return derive(cfg, LigerRMSNorm.Config)


@override(target=FeedForward.Config, exact=True, description="liger.swiglu")
def swiglu(cfg: FeedForward.Config) -> LigerFeedForward.Config:
    return derive(cfg, LigerFeedForward.Config)


@override(target=ChunkedLossWrapper.Config, exact=True, description="liger.fused_linear_ce")
def loss(cfg: ChunkedLossWrapper.Config, **options: Unpack[FusedCrossEntropyOptions]) -> LigerLoss.Config:
    """Takes the options of :func:`liger.fused_linear_ce`, such as label_smoothing and memory_budget."""
    if type(cfg.loss_fn) is not CrossEntropyLoss.Config:
        raise TypeError(
            f"liger.integrations.torchtitan.loss: loss_fn is {type(cfg.loss_fn).__qualname__}, expected "
            "CrossEntropyLoss.Config"
        )
    return derive(cfg, LigerLoss.Config, options=options)
