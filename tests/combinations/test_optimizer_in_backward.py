# SPDX-License-Identifier: BSD-3-Clause
"""Optimizer steps in the backward: torch's hooks after the accumulation of each gradient, and LOMO.

Every gradient is freed before the next one exists, in a patched model as in any other.
"""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import liger

transformers = pytest.importorskip("transformers")

from combinations import DEVICES, assert_same_weights, inputs_of, tiny, types  # noqa: E402

from liger.transformers.checkpointing import methods  # noqa: E402

LEARNING_RATE, STEPS = 0.05, 3


class InBackward:
    """SGD with momentum for each parameter, whose hook makes its step and frees its gradient.

    A parameter with a ``main_grad`` has its gradient there, and ``grad`` is None.
    """

    def __init__(self, model):
        self.names = {p: n for n, p in model.named_parameters() if p.requires_grad}
        self.freed, self.most, self.stepped = [], 0, []
        for parameter in self.names:
            optimizer = torch.optim.SGD([parameter], lr=LEARNING_RATE, momentum=0.9)
            parameter.register_post_accumulate_grad_hook(self._hook(optimizer))

    def _hook(self, optimizer):
        def step(parameter):
            assert all(storage.expired() for storage in self.freed), "an earlier gradient is still in memory"
            self.most = max(self.most, sum(p.grad is not None for p in self.names))
            if hasattr(parameter, "main_grad"):
                assert parameter.grad is None
                parameter.grad = parameter.main_grad.clone()
                parameter.main_grad.zero_()
            optimizer.step()
            self.freed.append(StorageWeakRef(parameter.grad.untyped_storage()))
            parameter.grad = None
            self.stepped.append(self.names[parameter])

        return step


def train(model, given, most=1):
    """(losses, names of the parameters that made a step, in order of their names); each makes one in each
    backward.

    ``most``: gradients that may exist at a time.
    """
    optimizer, losses, names = InBackward(model), [], []
    for _ in range(STEPS):
        torch.manual_seed(4)
        loss = model(**given)["loss"]
        loss.backward()
        losses.append(loss.detach().cpu())
        del loss
        assert all(p.grad is None for p in model.parameters())
        assert all(storage.expired() for storage in optimizer.freed)
        assert len(set(optimizer.stepped)) == len(optimizer.stepped)
        names.append(sorted(optimizer.stepped))
        optimizer.stepped.clear()
    assert optimizer.most <= most
    return torch.stack(losses), names


def run(model_type, device, change=None, most=1, **options):
    tied = {"tie_word_embeddings": model_type.startswith("gemma")}
    theirs = tiny(model_type, device, **tied)
    ours = liger.patch(tiny(model_type, device, **tied), **options)
    before = {n: p.detach().to("cpu", copy=True) for n, p in theirs.named_parameters()}
    if change is not None:
        change(ours)
    given = inputs_of(model_type, device)
    (our_losses, our_names), (losses, names) = train(ours, given, most), train(theirs, given)
    assert our_names == names
    torch.testing.assert_close(our_losses, losses, rtol=1e-4, atol=0)
    # Unused heads of vision towers have no gradient.
    assert_same_weights(ours, theirs, {name: before[name] for name in names[0]}, 2e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", types())
def test_hooks(model_type, device):
    run(model_type, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("model_type", types("qwen3", "gemma3_text", "mixtral"))
def test_checkpointing(model_type, reentrant, device):
    """The recomputation of a layer reads weights that have not had their step."""
    run(model_type, device, lambda model: methods.enable(model, use_reentrant=reentrant))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", types("llama", "gemma3_text"))
@pytest.mark.parametrize("options", [{"tiled_mlp": True, "tiled_mlp_num_shards": 3}, {"recompute": True}])
def test_recomputed_activations(model_type, options, device):
    run(model_type, device, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "model_type, where", [("qwen3", "grad"), ("qwen3", "main_grad"), ("gemma3_text", "grad")]
)
def test_accumulate_grad_weight(model_type, where, device):
    """The gradient of the lm_head is the sum that the backward adds to. That of a tied weight is complete
    with the gradient of the embedding, the last of the backward."""

    def change(model):
        weight = model.get_output_embeddings().weight
        if where == "main_grad":
            weight.main_grad = torch.zeros_like(weight)

    run(model_type, device, change, 2 if model_type == "gemma3_text" else 1, accumulate_grad_weight=True)


def test_lomo_refuses_accumulate_grad_weight():
    """LOMO has hooks of the gradient that autograd passes on, and with this option the head has none."""
    lomo = pytest.importorskip("lomo_optim")
    model = liger.patch(tiny("llama"), accumulate_grad_weight=True)
    optimizer = lomo.Lomo(model, lr=1e-2)
    with pytest.raises(RuntimeError, match="accumulate_grad_weight"):
        optimizer.fused_backward(model(**inputs_of("llama"))["loss"], 1e-2)
