# SPDX-License-Identifier: BSD-3-Clause
"""The estimated time of a layer: the FLOPs that torch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers.integrations.moe")

from tiny_models import make

from liger.transformers.checkpointing.layer_times import estimated

MODELS = {
    "llama": {},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 16, "moe_intermediate_size": 40, "num_experts_per_tok": 3},
}


@pytest.mark.parametrize("family", MODELS)
def test_flops_of_the_experts_of_a_token(family):
    model, tokens = make(family, **MODELS[family]), 6
    if family != "llama":
        model.set_experts_implementation("eager")
    mlp = model.model.layers[0].mlp
    with FlopCounterMode(display=False) as counter:
        mlp(torch.randn(1, tokens, 64))
    assert estimated(mlp, tokens, 0) == (counter.get_total_flops(), 0)
