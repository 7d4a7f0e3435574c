# SPDX-License-Identifier: BSD-3-Clause
"""Optimizers of other packages: 8-bit Adam of bitsandbytes and torchao, GaLore; by themselves and in the
Trainer."""

import contextlib

import pytest
import torch

import liger

transformers = pytest.importorskip("transformers")

from combinations import (  # noqa: E402
    DEVICES,
    assert_replaced,
    assert_same_training,
    assert_same_weights,
    inputs_of,
    tiny,
    types,
)
from trainer_runs import train  # noqa: E402

# By default Adam makes whole steps of gradients that are rounding alone. A large eps makes its steps
# proportional to the gradients; states of 8 and 4 bits still amplify roundings where these change a bit.
EPS = 1e-3
BOUND = 0.02
# The projection of GaLore depends on singular vectors, which roundings rotate where singular values are close
# to each other. With every direction kept, one projection and an eps that makes Adam linear, the result does
# not depend on them. The Trainer does not pass eps on to GaLore.
RANK, LINEAR_EPS, LINEAR_LR = 64, 1.0, 0.1


def uncompiled(name):
    """The steps of torchao's optimizers are compiled, which takes half a minute on a CPU."""
    return (
        torch.compiler.set_stance("force_eager") if name.startswith("torchao") else contextlib.nullcontext()
    )


def bitsandbytes(name):
    return lambda parameters: getattr(pytest.importorskip("bitsandbytes").optim, name)(
        parameters, lr=1e-2, eps=EPS, min_8bit_size=64
    )


def torchao(name):
    return lambda parameters: getattr(pytest.importorskip("torchao.optim"), name)(
        parameters, lr=1e-2, eps=EPS, block_size=64
    )


def galore(parameters):
    package = pytest.importorskip("galore_torch")
    low_rank = [p for p in parameters if p.dim() == 2 and min(p.shape) > 8]
    others = [p for p in parameters if p.dim() != 2 or min(p.shape) <= 8]
    settings = {"rank": RANK, "update_proj_gap": 100, "scale": 1.0, "proj_type": "std"}
    return package.GaLoreAdamW(
        [{"params": others}, {"params": low_rank, **settings}],
        lr=LINEAR_LR,
        eps=LINEAR_EPS,
        no_deprecation_warning=True,
    )


OPTIMIZERS = {
    "bitsandbytes AdamW8bit": bitsandbytes("AdamW8bit"),
    "torchao AdamW8bit": torchao("AdamW8bit"),
    "torchao AdamW4bit": torchao("AdamW4bit"),
    "GaLore": galore,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", types("qwen3", "gemma3", "mixtral"))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name, model_type, device):
    ours, theirs = liger.patch(tiny(model_type, device)), tiny(model_type, device)
    with uncompiled(name):
        assert_same_training(
            ours, theirs, inputs_of(model_type, device), make_optimizer=OPTIMIZERS[name], weights=BOUND
        )


GALORE = {
    "optim_target_modules": ["attn", "mlp"],
    "optim_args": "rank=4,update_proj_gap=2",
    "learning_rate": 1e-3,
}
# Name in TrainingArguments -> (package, further arguments).
NAMES = {
    "adamw_bnb_8bit": ("bitsandbytes", {}),
    "paged_adamw_8bit": ("bitsandbytes", {}),
    "galore_adamw": ("galore_torch", GALORE),
    "galore_adamw_layerwise": ("galore_torch", {**GALORE, "gradient_accumulation_steps": 1}),
    "adamw_torch_8bit": ("torchao", {}),
    # They update weights in the backward.
    "lomo": ("lomo_optim", {"learning_rate": 1e-2, "gradient_accumulation_steps": 1}),
    "adalomo": ("lomo_optim", {"learning_rate": 1e-3, "gradient_accumulation_steps": 1}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", types("qwen3", "gemma3_text", "mixtral"))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_optimizer_of_the_trainer(name, model_type, device, tmp_path, monkeypatch):
    package, settings = NAMES[name]
    pytest.importorskip(package)
    if name == "adalomo" and model_type == "mixtral":
        pytest.skip("AdaLomo takes no parameters of three dimensions, which the experts are")
    if name == "adalomo" and device == "cpu":
        # It creates its states by cuda(); their update runs on any device.
        monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)
    tied = {"tie_word_embeddings": model_type == "gemma3_text"}
    plain, ours = tiny(model_type, **tied), liger.patch(tiny(model_type, **tied))
    before = {n: p.detach().clone() for n, p in plain.named_parameters()}
    losses = []
    with uncompiled(package):
        for model in (ours, plain):
            torch.manual_seed(0)
            losses.append(
                train(
                    model, tmp_path, optim=name, **{"adam_epsilon": EPS, **settings}, use_cpu=device == "cpu"
                )
            )
    torch.testing.assert_close(*losses, rtol=2e-4, atol=0)
    assert_replaced(ours, like=liger.patch(tiny(model_type)))
    if package == "galore_torch":
        assert all((p - before[n]).any() for n, p in ours.cpu().named_parameters())
    else:
        assert_same_weights(ours, plain, before, BOUND)


@pytest.mark.gpu
def test_optimizer_states_on_the_cpu():
    optim = pytest.importorskip("torchao.optim")

    def make(parameters):
        return optim.CPUOffloadOptimizer(
            parameters, torch.optim.AdamW, offload_gradients=False, lr=1e-2, eps=EPS
        )

    ours, theirs = liger.patch(tiny("llama", "cuda")), tiny("llama", "cuda")
    assert_same_training(ours, theirs, inputs_of("llama", "cuda"), make_optimizer=make, weights=BOUND)
