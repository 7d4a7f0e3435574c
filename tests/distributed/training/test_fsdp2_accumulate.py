# SPDX-License-Identifier: BSD-3-Clause
"""accumulate_grad_weight under fully_shard, and with a weight that is a DTensor. test_ddp.py has it under
DDP."""

import pytest
import ranks
import tiny_models
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import liger


def sharded(tied, **options):
    model = tiny_models.make("llama", ranks.DEVICE, tie_word_embeddings=tied)
    inputs = tiny_models.batch(ranks.DEVICE, rows=2 * ranks.WORLD)
    count = (inputs["labels"][:, 1:] != -100).sum()
    expected = tiny_models.step(tiny_models.twin(model), **inputs, num_items_in_batch=count)
    liger.patch(model, accumulate_grad_weight=True)
    for layer in model.model.layers:
        fully_shard(layer, mesh=ranks.mesh(), **options)
    fully_shard(model, mesh=ranks.mesh(), **options)
    mine = {name: value.chunk(ranks.WORLD)[ranks.RANK] for name, value in inputs.items()}
    return model, {**mine, "num_items_in_batch": count / ranks.WORLD}, expected


@pytest.mark.parametrize("reshard", [False, True], ids=["", "reshard"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_fully_shard(tied, reshard):
    """The gradient is added to the gradient of the gathered parameter, which fully_shard reduces."""
    model, inputs, expected = sharded(tied, reshard_after_forward=reshard)
    for _ in range(2):
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        grads = {name: ranks.whole(p.grad) for name, p in model.named_parameters()}
        tiny_models.assert_same_step(({"loss": ranks.total(loss) / ranks.WORLD}, grads), expected)


def test_fully_shard_in_bfloat16_is_refused():
    """The gathered parameter is bfloat16 and has no float32 gradient."""
    model, inputs, _ = sharded(False, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    with pytest.raises(RuntimeError, match="weight of dtype bfloat16, which has no float32 gradient"):
        model(**inputs)


def test_weights_that_are_dtensors_are_refused():
    x, weight = torch.randn(5, 8), torch.randn(12, 8)
    for placement in (Shard(0), Shard(1)):
        parameter = torch.nn.Parameter(distribute_tensor(weight.to(ranks.DEVICE), ranks.mesh(), [placement]))
        whole = distribute_tensor(x.to(ranks.DEVICE), ranks.mesh())
        target = distribute_tensor(torch.arange(5, device=ranks.DEVICE), ranks.mesh())
        with pytest.raises(
            RuntimeError, match="accumulate_grad_weight with weight, a DTensor, expected a whole plain"
        ):
            liger.fused_linear_ce(whole, parameter, target, accumulate_grad_weight=True)
