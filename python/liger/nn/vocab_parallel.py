"""Cross entropy over a projection whose classes are spread over the processes of a group."""

from ..distributed import vocab_parallel_fused_linear_ce
from .loss import FusedLinearCrossEntropyLoss


class VocabParallelFusedLinearCrossEntropyLoss(FusedLinearCrossEntropyLoss):
    """Cross entropy of ``input @ weight.T + bias`` where every process holds some rows of the weight.

    Args:
        weight: of all classes, (V,), as in :class:`CrossEntropyLoss`.
        group, vocab_start, vocab_size: as in :func:`liger.vocab_parallel_fused_linear_ce`.
        metrics: names among ``z_loss`` and ``logprobs``.
        loss_options: the others of :class:`FusedLinearCrossEntropyLoss`.

    Shape:
        input: (..., H); weight: (classes of this process, H), or a DTensor (V, H); target: (...); bias: as the rows of
        weight; token_weight: (...); denominator: one element.

    Returns:
        The loss in float32, the same bits on every process, or with metrics a ``CrossEntropyOutput``.

    Raises:
        ValueError: an unknown reduction, or a metric that does not exist for a vocabulary in parts.
        RuntimeError: what :func:`liger.vocab_parallel_fused_linear_ce` refuses.
    """

    def __init__(
        self, weight=None, *, group=None, vocab_start=None, vocab_size=None, metrics=(), **loss_options
    ):
        super().__init__(weight, metrics=metrics, **loss_options)
        missing = [name for name in metrics if name not in ("z_loss", "logprobs")]
        if missing:
            raise ValueError(
                f"metric '{missing[0]}' needs all classes in one process, expected some of z_loss, logprobs"
            )
        self.group, self.vocab_start, self.vocab_size = group, vocab_start, vocab_size

    def forward(self, input, weight, target, bias=None, *, token_weight=None, denominator=None):
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
