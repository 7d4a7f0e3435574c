# SPDX-License-Identifier: BSD-3-Clause
"""fully_shard (FSDP2) of patched models: checkpointing, mixed precision, ignored labels, the router's
loss."""

import families
import pytest
import torch
from test_fsdp2_families import run
from torch.distributed.fsdp import MixedPrecisionPolicy

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Every unit returns bfloat16, as in accelerate's plugin.
BF16_OUTPUT = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16
)


@pytest.mark.parametrize("checkpointing", ["reentrant", "non_reentrant", "wrapper"])
@pytest.mark.parametrize("name", families.FAMILIES)
def test_checkpointing(name, checkpointing):
    run(name, "tail", checkpointing)


@pytest.mark.parametrize("layout", ["root", "tail"])
@pytest.mark.parametrize("name", families.FAMILIES)
def test_mixed_precision(name, layout):
    run(name, layout, dtype=torch.bfloat16, mp_policy=BF16)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_mixed_precision_with_checkpointing(name):
    run(name, "tail", "non_reentrant", torch.bfloat16, mp_policy=BF16_OUTPUT, reshard_after_forward=True)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_rank_without_valid_label(name):
    run(name, "tail", steps=families.batches(name, ignored_rank=1))


@pytest.mark.parametrize("name", families.MOE)
def test_router_loss(name):
    """The loss of the router is added to the loss of the head, in place."""
    run(name, "tail", steps=families.batches(name, output_router_logits=True))
