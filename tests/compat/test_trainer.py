# SPDX-License-Identifier: BSD-3-Clause
"""``TrainingArguments(use_liger_kernel=True)``, and the ORPO trainer of liger_kernel."""

import logging

import pytest
import tiny_models
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import trainer_runs  # noqa: E402

from liger.transformers import patch_report  # noqa: E402


def train(tmp_path, model, **options):
    """The losses that a Trainer logs in three steps, and the loss of its evaluation."""
    return trainer_runs.train(model, tmp_path, learning_rate=5e-5, **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The losses without liger."""
    torch.manual_seed(0)
    return train(tmp_path_factory.mktemp("plain"), tiny_models.make("llama"))


@pytest.mark.parametrize(
    "config, loss",
    [
        (None, "fused_linear_cross_entropy"),
        ({"cross_entropy": True, "fused_linear_cross_entropy": False, "unknown": 1}, "cross_entropy"),
        ({"cross_entropy": True}, "fused_linear_cross_entropy"),
        ({"rope": False, "swiglu": False}, "fused_linear_cross_entropy"),
    ],
)
def test_use_liger_kernel(tmp_path, plain, config, loss):
    model = tiny_models.make("llama")
    losses = train(tmp_path, model, use_liger_kernel=True, liger_kernel_config=config)
    found = set(patch_report(model).replaced.values())
    expected = {"rms_norm", "fused_add_rms_norm", loss} | {"rope", "swiglu"} - {
        n for n, v in (config or {}).items() if not v
    }
    assert found == expected
    assert losses == pytest.approx(plain, rel=1e-4) and len(plain) == 4


@pytest.mark.parametrize("config", [None, {"cross_entropy": True, "fused_linear_cross_entropy": False}])
@pytest.mark.parametrize(
    "options", [{"label_smoothing_factor": 0.1}, {"prediction_loss_only": True}], ids=str
)
def test_evaluate(tmp_path, config, options):
    """Also where the Trainer computes the loss: it asks for no logits, but passes no labels."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    losses = []
    for liger_options in ({"use_liger_kernel": True, "liger_kernel_config": config}, {}):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **liger_options,
            **options,
        )
        trainer = transformers.Trainer(
            tiny_models.make("llama"), arguments, eval_dataset=trainer_runs.Tokens()
        )
        if liger_options:
            _apply_liger_kernel_to_instance(model=trainer.model, **(config or {}))
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_peft(tmp_path):
    peft = pytest.importorskip("peft")

    def make():
        torch.manual_seed(0)
        return peft.get_peft_model(
            tiny_models.make("qwen3"), peft.LoraConfig(target_modules=["q_proj", "v_proj"])
        )

    model = make()
    losses = train(tmp_path, model, use_liger_kernel=True)
    assert "fused_linear_cross_entropy" in patch_report(model).replaced.values()
    assert losses == pytest.approx(train(tmp_path, make()), rel=1e-4)


def test_a_model_in_which_nothing_fits(tmp_path, caplog):
    """transformers' Trainer goes on; one line says that nothing was patched."""
    settings = transformers.BertConfig(
        vocab_size=tiny_models.VOCAB,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    model = transformers.BertForMaskedLM(settings)
    with caplog.at_level(logging.WARNING, logger="liger.compat"):
        losses = train(
            tmp_path, model, use_liger_kernel=True,
            liger_kernel_config=dict.fromkeys(("layer_norm", "geglu", "relu_squared"), False),
        )  # fmt: skip
    assert len(losses) == 4
    lines = [r.message for r in caplog.records if "nothing in BertForMaskedLM can be patched" in r.message]
    assert len(lines) == (0 if patch_report(model).replaced else 1)


def test_orpo_trainer(tmp_path):
    experimental = pytest.importorskip("trl.experimental.orpo")
    import trl_trainers as made
    from liger_kernel.transformers.trainer.orpo_trainer import LigerORPOTrainer

    def make(trainer_class):
        return trainer_class(
            made.model(), args=experimental.ORPOConfig(str(tmp_path), **made.OPTIONS), train_dataset=made.pairs(),
            processing_class=made.tokenizer(),
        )  # fmt: skip

    trainers = make(LigerORPOTrainer), make(experimental.ORPOTrainer)
    for trainer in trainers:
        torch.manual_seed(0)
        with made.losses_in_heads() as counted:
            trainer.train()
        assert bool(counted) == (trainer is trainers[0])
    for mine, other in zip(*map(made.logged, trainers), strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-4, nan_ok=True)
