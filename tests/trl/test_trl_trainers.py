# SPDX-License-Identifier: BSD-3-Clause
"""liger.trl.patch: GRPO, RLOO, SFT, GKD and distillation, trained with it and without; what holds for all
trainers."""

import itertools
import logging
import subprocess
import sys

import pytest
import tiny_models
import torch
import transformers
import trl_trainers as made
from trl_trainers import trl

import liger.trl
from liger.losses import FusedLinearLoss
from liger.trl import _scores

peft = pytest.importorskip("peft")


# --- GRPO, RLOO ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
def test_grpo(tmp_path, loss_type):
    """Two passes over each batch: from the second on the policy is another than the one that sampled."""

    def make():
        return made.sampling(tmp_path, loss_type=loss_type, num_iterations=2, epsilon=0.01, max_steps=4)

    made.assert_same_training(make)


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.0, "temperature": 0.7},
        {"importance_sampling_level": "sequence", "num_iterations": 2},
        {"importance_sampling_level": "sequence", "num_iterations": 2, "loss_type": "luspo"},
        {"loss_type": "vespo", "num_iterations": 2, "vespo_k_pos": 1.5, "gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 2, "delta": 1.5},
        {"cast_lm_head_to_fp32": True},
    ],
    ids=lambda options: ",".join(options),
)
def test_grpo_with(tmp_path, options):
    made.assert_same_training(lambda: made.sampling(tmp_path, **options))


@pytest.mark.parametrize(
    "options",
    [{"entropy_coef": 0.05}, {"top_entropy_quantile": 0.5}, {"loss_type": "vespo", "entropy_coef": 0.05}],
    ids=lambda options: ",".join(options),
)
def test_grpo_that_keeps_its_own_loss(tmp_path, options):
    made.assert_same_training(lambda: made.sampling(tmp_path, **options), in_the_head=False)


@pytest.mark.parametrize(
    "options",
    [{}, {"loss_type": "ipo", "max_length": 9, "learning_rate": 1e-3}, {"peft": True}],
    ids=lambda options: ",".join(options),
)
def test_online_dpo(tmp_path, options):
    """``max_length`` cuts prompts off; with PEFT the reference is the model without its adapters."""
    experimental = pytest.importorskip("trl.experimental.online_dpo")
    options = dict(options)
    lora = (
        peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        if options.pop("peft", False)
        else None
    )

    def make():
        torch.manual_seed(1)  # the adapters
        return experimental.OnlineDPOTrainer(
            made.model(), reward_funcs=made.of_length,
            args=experimental.OnlineDPOConfig(
                str(tmp_path / "out"), **made.OPTIONS | {"max_new_tokens": 6, "missing_eos_penalty": None, **options}
            ),
            train_dataset=made.rows(8, prompt=(2, 5)), processing_class=made.tokenizer(), peft_config=lora,
        )  # fmt: skip

    made.assert_same_training(make, in_the_head=False)


def test_a_reward_trainer_has_no_lm_head(tmp_path):
    settings = tiny_models.config("llama", num_labels=1)
    trainer = trl.RewardTrainer(
        transformers.LlamaForSequenceClassification(settings),
        args=trl.RewardConfig(str(tmp_path), report_to=[], use_cpu=True),
        train_dataset=made.pairs(), processing_class=made.tokenizer(),
    )  # fmt: skip
    with pytest.raises(TypeError, match="given a RewardTrainer: its score head has one output"):
        liger.trl.patch(trainer)


def test_rloo(tmp_path):
    made.assert_same_training(
        lambda: made.sampling(tmp_path, trl.RLOOTrainer, trl.RLOOConfig), in_the_head=False
    )


# --- SFT ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_type": "dft"},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
        {"padding_free": True, "max_length": None},
        {"packing": True, "max_length": 16},
        {"eval_strategy": "steps", "eval_steps": 1},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_sft(tmp_path, options):
    def make():
        data = made.rows(12, text=(3, 9)) if "packing" in options else None
        others = (
            {"eval_dataset": made.rows(5, prompt=(2, 5), completion=(1, 7))}
            if "eval_steps" in options
            else {}
        )
        return made.sft(tmp_path, data, **options, **others)

    entry = made.logged(made.assert_same_training(make))[0]
    assert entry["entropy"] > 0 and "mean_token_accuracy" in entry


@pytest.mark.parametrize("kind", made.HEADS)
def test_sft_heads(tmp_path, kind):
    family, overrides = made.HEADS[kind]
    made.assert_same_training(lambda: made.sft(tmp_path, policy=tiny_models.make(family, **overrides)))


def test_sft_with_label_smoothing_keeps_its_own_loss(tmp_path):
    made.assert_same_training(lambda: made.sft(tmp_path, label_smoothing_factor=0.1), in_the_head=False)


# --- GKD ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.5},
        {"beta": 0.0},
        {"beta": 1.0, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
        {"lmbda": 1.0},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
def test_gkd(tmp_path, options):
    made.assert_same_training(lambda: made.gkd(tmp_path, **options))


@pytest.mark.parametrize(
    "options",
    [{"beta": 0.5}, {"beta": 1.0, "temperature": 0.7}, {"beta": 0.0, "gradient_accumulation_steps": 2}],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
def test_distillation(tmp_path, options):
    assert (
        "entropy" in made.logged(made.assert_same_training(lambda: made.distillation(tmp_path, **options)))[0]
    )


def test_gkd_of_a_larger_teacher(tmp_path):
    made.assert_same_training(
        lambda: made.gkd(tmp_path, teacher=tiny_models.make("llama", hidden_size=96, head_dim=24))
    )


def test_gkd_with_a_softcap(tmp_path):
    family, overrides = made.HEADS["softcap"]
    student, teacher = (tiny_models.make(family, **overrides) for _ in range(2))
    with pytest.raises(ValueError, match=r"logits of the student.*softcap"):
        liger.trl.patch(made.gkd(tmp_path, student, teacher))


# --- what holds for all -------------------------------------------------------------------------------------


def test_no_logits_are_made(tmp_path, monkeypatch):
    """The linear layer of a head is never run, be it the policy's or the reference's."""
    made_by = []
    trainers = [
        made.dpo(tmp_path),
        made.kto(tmp_path),
        made.sft(tmp_path),
        made.paired(tmp_path, "orpo"),
        made.paired(tmp_path, "cpo"),
    ]
    monkeypatch.setattr(
        torch.nn.Linear,
        "forward",
        lambda self, x: made_by.append(self) or torch.nn.functional.linear(x, self.weight),
    )
    for trainer in map(liger.trl.patch, trainers):
        trainer.train()
        heads = [trainer.model.lm_head] + (
            [trainer.ref_model.lm_head] if getattr(trainer, "ref_model", None) else []
        )
        assert not any(a is b for a, b in itertools.product(made_by, heads))


def rows_of_losses(monkeypatch):
    """The rows of hidden states in the losses of a head and in log-probabilities, in the order of the
    calls."""
    seen, run, score = [], FusedLinearLoss.run, _scores.fused_linear_logprobs
    monkeypatch.setattr(
        FusedLinearLoss,
        "run",
        lambda self, batch, *a, **k: seen.append(len(batch.input)) or run(self, batch, *a, **k),
    )
    monkeypatch.setattr(
        _scores,
        "fused_linear_logprobs",
        lambda x, *a, **k: seen.append(x[..., 0].numel()) or score(x, *a, **k),
    )
    return seen


@pytest.mark.parametrize("make", [made.dpo, made.kto], ids=lambda make: make.__name__)
def test_prompts_and_padding_are_left_out(tmp_path, monkeypatch, make):
    trainer = liger.trl.patch(make(tmp_path))
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
    longest = batch["completion_mask"].sum(1).max().item()
    assert longest < batch["completion_mask"].shape[1] - 1
    seen = rows_of_losses(monkeypatch)
    trainer._compute_loss(trainer.model, batch, False)
    assert seen[-1] == len(batch["input_ids"]) * longest


def test_left_padding(tmp_path):
    """Answers that end together, and do not begin where the prompts of others do."""
    trainers = [made.paired(tmp_path, name) for name in ("orpo", "cpo") for _ in range(2)]
    for plain, patched in zip(trainers[::2], map(liger.trl.patch, trainers[1::2]), strict=True):
        batch = next(iter(plain.get_train_dataloader()))
        for kind in ("chosen", "rejected"):
            padding = (batch[f"{kind}_attention_mask"] == 0).sum(1).tolist()
            assert len(set(padding)) > 1
            for part in ("input_ids", "attention_mask", "labels"):
                rows = zip(batch[f"{kind}_{part}"], padding, strict=True)
                batch[f"{kind}_{part}"] = torch.stack([row.roll(count) for row, count in rows])
        results = []
        for trainer in (plain, patched):
            trainer.model.zero_grad()
            loss, metrics = trainer.get_batch_loss_metrics(trainer.model, batch)
            loss.backward()
            results.append([loss.detach(), [p.grad for p in trainer.model.parameters()], metrics])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("trainer", ["GRPO", "RLOO"])
def test_prompts_of_samples_are_left_out(tmp_path, monkeypatch, trainer):
    trainer = made.sampling(
        tmp_path,
        *(getattr(trl, trainer + kind) for kind in ("Trainer", "Config")),
        temperature=0.7,
        max_steps=1,
    )
    seen = rows_of_losses(monkeypatch)
    liger.trl.patch(trainer).train()
    # The reference, then the policy; the hidden state before each token of a completion, and at most one
    # more.
    assert len(seen) >= 2 and all(rows <= 4 * (6 + 1) for rows in seen)


def test_generation_and_plain_calls_are_as_before(tmp_path):
    trainer = made.dpo(tmp_path)
    inputs = tiny_models.batch()
    # The layers round as they do after liger.trl.patch.
    liger.patch(trainer.model, fused_linear_cross_entropy=False)
    before = trainer.model(**inputs)
    tokens = trainer.model.generate(inputs["input_ids"][:1], max_new_tokens=3, do_sample=False)
    liger.trl.patch(trainer)
    after = trainer.model(**inputs)
    assert torch.equal(after.logits, before.logits) and torch.equal(after.loss, before.loss)
    assert torch.equal(
        trainer.model.generate(inputs["input_ids"][:1], max_new_tokens=3, do_sample=False), tokens
    )


def test_one_call_patches_the_layers_too(tmp_path, capfd):
    trainer = liger.trl.patch(made.dpo(tmp_path))
    for model in (trainer.model, trainer.ref_model):
        report = liger.transformers.patch_report(model)
        assert {"trainer_loss", "rms_norm", "rope", "swiglu"} <= set(report.replaced.values())
        assert not report.not_asked_for
    assert capfd.readouterr().err.count("liger.trl.patch: LlamaForCausalLM: 1 x trainer_loss") == 2


def test_layers_that_are_patched_keep_their_options(tmp_path, capfd):
    trainer = made.dpo(tmp_path)
    liger.patch(trainer.model, rope=False, swiglu=False)
    before = liger.transformers.patch_report(trainer.model).replaced
    liger.trl.patch(trainer)
    assert liger.transformers.patch_report(trainer.model).replaced == before | {"": "trainer_loss"}
    assert "rope" not in before.values()


def test_patching_again_changes_nothing(tmp_path):
    trainer = liger.trl.patch(made.sft(tmp_path))
    loss, forward = trainer.compute_loss, trainer.model.forward
    assert liger.trl.patch(trainer) is trainer
    assert (trainer.compute_loss, trainer.model.forward) == (loss, forward)


def test_a_subclass_with_a_loss_of_its_own_keeps_it(tmp_path, caplog):
    class Doubled(trl.DPOTrainer):
        def _compute_loss(self, model, inputs, return_outputs):
            return 2 * super()._compute_loss(model, inputs, return_outputs)

    plain = made.dpo(tmp_path)
    batch = next(iter(plain.get_train_dataloader()))
    expected = 2 * plain._compute_loss(plain.model, batch, False)
    trainer = made.dpo(tmp_path)
    trainer.__class__ = Doubled
    with caplog.at_level(logging.INFO, logger="liger.trl"):
        liger.trl.patch(trainer)
    loss = trainer._compute_loss(trainer.model, batch, False)
    torch.testing.assert_close(loss, expected)
    assert "Doubled has a loss of its own" in caplog.text


def test_without_trl():
    code = "import sys; sys.modules['trl'] = None; import liger.trl"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'liger.trl needs trl, which is not installed: pip install "liger-ops[trl]"' in done.stderr


def test_an_encoder_and_a_decoder(tmp_path):
    trainer = made.paired(tmp_path, "cpo")
    trainer.is_encoder_decoder = True
    with pytest.raises(ValueError, match="has an encoder and a decoder, expected a causal language model"):
        liger.trl.patch(trainer)


def test_scale_of_logits_that_is_none(tmp_path):
    trainer = made.sft(tmp_path)
    trainer.model.config.logit_scale = 0.0
    with pytest.raises(
        ValueError, match=r"the logits of llama are scaled by 0\.0, expected a positive number"
    ):
        liger.trl.patch(trainer)


def test_unknown_trainer():
    with pytest.raises(
        TypeError, match=r"liger\.trl\.patch was given a dict, expected a trainer of TRL: .*DPOTrainer"
    ):
        liger.trl.patch({})


def test_head_with_an_adapter(tmp_path):
    """TRL refuses it for most trainers; ORPO's would lose the adapter."""
    trainer = made.paired(tmp_path, "orpo")
    trainer.model.lm_head = peft.get_peft_model(
        torch.nn.Sequential(trainer.model.lm_head), peft.LoraConfig(target_modules=["0"])
    ).base_model.model[0]
    with pytest.raises(RuntimeError, match=r"the head is a peft.*expected a torch.nn.Linear"):
        liger.trl.patch(trainer).train()
