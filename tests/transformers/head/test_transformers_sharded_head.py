# SPDX-License-Identifier: BSD-3-Clause
"""An lm_head that torch sharded over a group of one process; tests/distributed has groups of several."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

import tiny_models
from processes import needs_gloo, of_the_torch_backend
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import liger
from liger.transformers import patch_report
from liger.transformers.head.sharded import KIND, why_from_logits

pytestmark = [needs_gloo, of_the_torch_backend]


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


OUTPUTS = {
    "gathered": ColwiseParallel(output_layouts=Replicate()),
    "gathered as a DTensor": ColwiseParallel(output_layouts=Replicate(), use_local_output=False),
    "local": ColwiseParallel(),
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_the_loss_is_of_the_sharded_classes(mesh, output):
    plain, given = tiny_models.make("llama"), tiny_models.batch()
    model = parallelize_module(tiny_models.make("llama"), mesh, {"lm_head": OUTPUTS[output]})
    report = patch_report(liger.patch(model, verbose=False))
    assert KIND in report.replaced.values() and not report.left
    found, grads = tiny_models.step(model, **given)
    assert found.logits is None
    grads = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}
    tiny_models.assert_same_step((found, grads), tiny_models.step(plain, **given))


def test_a_head_that_shards_no_classes(mesh):
    plan = {"lm_head": RowwiseParallel(input_layouts=Replicate())}
    model = liger.patch(parallelize_module(tiny_models.make("llama"), mesh, plan), verbose=False)
    (reason,) = patch_report(model).left.values()
    assert "placements (Shard(dim=1),), expected shards of the classes" in reason
    loss = model(**tiny_models.batch()).loss
    torch.testing.assert_close(loss, tiny_models.make("llama")(**tiny_models.batch()).loss)


ALLOWED = {"classes": None, "added": None, "accumulate_grad_weight": False}
REFUSED = {
    "bias": ({}, "shards the classes of the weight, but not of the bias"),
    "classes": ({"classes": 7}, "it cuts off the logits of some classes, which its head shards"),
    "added": ({"added": "a bias"}, "it adds a bias to the logits, and its head shards their classes"),
    "sum": ({"accumulate_grad_weight": True}, "accumulate_grad_weight does not support a head that shards"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_needs_logits(mesh, case):
    changed, words = REFUSED[case]
    head, recipe = torch.nn.Linear(4, 8), SimpleNamespace(**ALLOWED | changed)
    weight, bias = (distribute_tensor(t.detach(), mesh, [Shard(0)]) for t in (head.weight, head.bias))
    reason = why_from_logits(head, weight, head.bias if case == "bias" else bias, recipe)
    assert words in reason and reason.endswith(": the loss is computed from full logits")
    assert why_from_logits(head, weight, bias, SimpleNamespace(**ALLOWED)) is None


def test_a_shard_that_is_no_dtensor():
    """As hooks of older versions of transformers leave it."""

    def gathers(module, inputs, output):
        return output

    head = torch.nn.Linear(4, 8)
    assert why_from_logits(head, head.weight, None, None) is None
    gathers.__module__ = "transformers.integrations.tensor_parallel"
    head.register_forward_hook(gathers)
    assert "a shard of the weight that is no DTensor" in why_from_logits(head, head.weight, None, None)
