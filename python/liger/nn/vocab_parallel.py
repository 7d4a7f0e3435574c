"""Cross entropy of an lm_head whose classes are sharded over the processes of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from .._core.cross_entropy_results import CrossEntropyOutput
from .._core.types import Scalar
from ..distributed import vocab_parallel_fused_linear_ce
from .loss import FusedLinearCrossEntropyLoss


class VocabParallelFusedLinearCrossEntropyLoss(FusedLinearCrossEntropyLoss):
    """Cross entropy of ``input @ weight.T + bias`` where every process has a shard of the rows of the weight.

    Args:
        weight: of all classes, (V,), as in :class:`CrossEntropyLoss`.
        group, vocab_start, vocab_size: as in :func:`liger.vocab_parallel_fused_linear_ce`.
        metrics: names among ``z_loss`` and ``logprobs``.
        loss_options: other options of :class:`FusedLinearCrossEntropyLoss`.

    Shape:
        input: (..., H); weight: (classes of this process, H), or a DTensor (V, H); target: (...); bias: (classes of
        this process,), or a DTensor (V,); token_weight: (...); denominator: one element.

    Returns:
        The loss in float32, the same bits on every process, or with metrics a ``CrossEntropyOutput``.

    Raises:
        TypeError: an option of another type.
        ValueError: an unknown reduction, a metric that needs all classes in one process, or accumulate_grad_weight.
        RuntimeError: in the forward, as :func:`liger.vocab_parallel_fused_linear_ce`.

    Example::

        criterion = liger.nn.VocabParallelFusedLinearCrossEntropyLoss()
        loss = criterion(torch.randn(10, 64), torch.randn(250, 64), torch.randint(250, (10,)))  # the shard of a process

    Source: as :func:`liger.vocab_parallel_fused_linear_ce`.
    """

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        vocab_start: int | None = None,
        vocab_size: int | None = None,
        metrics: Sequence[Literal["z_loss", "logprobs"]] = (),
        **loss_options: Any,
    ) -> None:
        super().__init__(weight, metrics=metrics, **loss_options)
        missing = [name for name in metrics if name not in ("z_loss", "logprobs")]
        if missing:
            raise ValueError(
                f"metric '{missing[0]}' needs all classes in one process, expected some of z_loss, logprobs"
            )
        if self.accumulate_grad_weight:
            raise ValueError(
                f"{type(self).__name__}: accumulate_grad_weight is True, expected False with a sharded vocabulary"
            )
        self.group, self.vocab_start, self.vocab_size = group, vocab_start, vocab_size

    def _options(self) -> dict[str, Any]:
        options = super()._options()
        del options["accumulate_grad_weight"]
        return options

    def forward(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        token_weight: torch.Tensor | None = None,
        denominator: Scalar | None = None,
    ) -> torch.Tensor | CrossEntropyOutput:
        return vocab_parallel_fused_linear_ce(
            input,
            weight,
            target,
            bias,
            group=self.group,
            vocab_start=self.vocab_start,
            vocab_size=self.vocab_size,
            token_weight=token_weight,
            denominator=denominator,
            **self._options(),
        )
