"""Functions of an lm_head whose classes are sharded over all processes, unless a call says over which."""

import functools

import torch.distributed as dist
from torch.distributed.tensor import DTensor

import liger


def _over_all(function):
    @functools.wraps(function)
    def call(*arguments, **options):
        # A DTensor says itself over which processes.
        has_dtensor = any(isinstance(value, DTensor) for value in (*arguments, *options.values()))
        if not has_dtensor and all(
            options.get(name) is None for name in ("group", "vocab_start", "vocab_size")
        ):
            options["group"] = dist.group.WORLD
        return function(*arguments, **options)

    return call


cross_entropy = _over_all(liger.cross_entropy)
fused_linear_ce = _over_all(liger.fused_linear_ce)
fused_linear_logprobs = _over_all(liger.fused_linear_logprobs)
