"""Ops over tensors that are spread over the processes of a group."""

from .vocab_parallel import vocab_parallel_cross_entropy, vocab_parallel_fused_linear_ce

__all__ = ["vocab_parallel_cross_entropy", "vocab_parallel_fused_linear_ce"]
