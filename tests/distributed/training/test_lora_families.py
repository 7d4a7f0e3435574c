# SPDX-License-Identifier: BSD-3-Clause
"""LoRA of PEFT under FSDP2 and DDP: a frozen model with adapters, on the lm_head too."""

import families
import pytest
import ranks
import torch

peft = pytest.importorskip("peft")
from test_fsdp2_families import layers_of  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

TARGETS = {"layers": ["q_proj", "down_proj"], "head": ["q_proj", "lm_head"], "experts": ["q_proj"]}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def family(targets):
    return "qwen3_moe" if targets == "experts" else "qwen3"


def make(targets, save_head=False):
    """A model with adapters that are not trivial; ``save_head``: a trainable copy of the head."""
    settings = {"target_parameters": EXPERTS} if targets == "experts" else {}
    config = peft.LoraConfig(
        r=4, target_modules=TARGETS[targets], modules_to_save=["lm_head"] if save_head else None, **settings
    )
    model = families.make(family(targets), device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = peft.get_peft_model(model, config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model.to(ranks.DEVICE).train()


def wrap_fsdp2(model):
    for layer in layers_of(model):
        fully_shard(layer, mesh=ranks.mesh())
    return fully_shard(model, mesh=ranks.mesh())


def wrap_head(model):
    for layer in layers_of(model):
        fully_shard(layer, mesh=ranks.mesh())
    fully_shard(model.base_model.model.lm_head, mesh=ranks.mesh())
    return fully_shard(model, mesh=ranks.mesh())


def wrap_parts(model):
    """Every linear layer of the head is a unit, so its weight is gathered in its own call only."""
    for module in list(model.base_model.model.lm_head.modules())[::-1]:
        if isinstance(module, torch.nn.Linear):
            fully_shard(module, mesh=ranks.mesh())
    return wrap_fsdp2(model)


WRAPPERS = {"root": wrap_fsdp2, "head": wrap_head, "parts": wrap_parts, "ddp": DistributedDataParallel}


@pytest.mark.parametrize(
    "targets, save_head", [("layers", False), ("layers", True), ("head", False), ("experts", False)]
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients(wrapper, targets, save_head):
    name = family(targets)
    inputs = families.batches(name)[0]
    exact = make(targets, save_head).double()
    if targets == "experts":
        exact.base_model.model.set_experts_implementation("eager")  # the others refuse float64
    total = sum(exact(**families.to(x, ranks.DEVICE, torch.float64)).loss for x in inputs)
    (total / ranks.WORLD).backward()
    results = []
    for is_patched in (False, True):
        model = make(targets, save_head)
        if is_patched:
            families.patched(model, name)
        wrapped = WRAPPERS[wrapper](model)
        grads = []
        for _ in range(2):
            wrapped.zero_grad()
            loss = wrapped(**families.to(inputs[ranks.RANK], ranks.DEVICE)).loss
            loss.backward()
            grads.append(families.gradients_of(wrapped))
        results.append(families.Result({0: ranks.total(loss)}, *grads, {}))
    true = families.gradients_of(exact)
    families.assert_as_exact(*results[::-1], families.Result({0: total.detach()}, true, true, {}))
