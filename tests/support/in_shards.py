# SPDX-License-Identifier: BSD-3-Clause
"""Functions of an lm_head whose classes are sharded: over the processes of a DTensor, else over all
processes, unless a call says over which. With a group results are plain tensors."""

import functools
import inspect

import torch.distributed as dist
from torch.distributed.tensor import DTensor

import liger
from liger.distributed.vocab.shards import vocab_group


def _with_group(function, main, dim):
    """``main``: the name of the tensor whose dimension ``dim`` has the classes."""
    position = list(inspect.signature(function).parameters).index(main)

    @functools.wraps(function)
    def call(*arguments, **options):
        if all(options.get(name) is None for name in ("group", "vocab_start", "vocab_size")):
            sharded = arguments[position] if position < len(arguments) else options[main]
            group = vocab_group(sharded, dim) if isinstance(sharded, DTensor) else None
            options["group"] = group or dist.group.WORLD
        return function(*arguments, **options)

    return call


cross_entropy = _with_group(liger.cross_entropy, "logits", -1)
fused_linear_ce = _with_group(liger.fused_linear_ce, "weight", 0)
fused_linear_logprobs = _with_group(liger.fused_linear_logprobs, "weight", 0)
