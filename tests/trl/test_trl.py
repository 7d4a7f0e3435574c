# SPDX-License-Identifier: BSD-3-Clause
"""liger.trl.patch: DPO, KTO, ORPO and CPO, trained for real with it and without, give the same logs and
weights."""

import logging

import pytest
import tiny_models
import torch
import trl_trainers as made

import liger.trl

peft = pytest.importorskip("peft")


def lora(**options):
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **options)


def prompt_tuning(virtual_tokens):
    """None for 0."""
    if not virtual_tokens:
        return None
    return peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=virtual_tokens)


# --- DPO ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": ["sigmoid"]},
        {"loss_type": ["ipo"], "loss_weights": [0.5]},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]},
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        {"loss_type": ["ipo", "sft"]},
        {"loss_type": ["sigmoid", "ipo"], "loss_weights": [0.7, 0.2]},
        {"loss_type": ["sft"]},
        {"loss_type": ["exo_pair"], "label_smoothing": 0.01},
        {"loss_type": ["apo_zero"], "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
        {"precompute_ref_log_probs": True},
        {"gradient_checkpointing": True},
    ],
    ids=lambda options: ",".join(options),
)
def test_dpo(tmp_path, options):
    made.assert_same_training(lambda: made.dpo(tmp_path, **options))


@pytest.mark.parametrize("loss_type", [["ipo"], ["sigmoid"], ["ipo", "sft"]], ids=",".join)
@pytest.mark.parametrize("virtual_tokens", [0, 3])
def test_answers_that_begin_the_sequence(tmp_path, loss_type, virtual_tokens):
    """Their first token has no position that predicts it: it is no term of a sum, but counts in the means of
    ipo."""
    data = made.rows(8, prompt=(0, 2), chosen=(1, 7), rejected=(2, 6))
    assert any(not row["prompt"].strip() for row in data)

    def make():
        torch.manual_seed(9)
        config = prompt_tuning(virtual_tokens)
        return made.dpo(
            tmp_path, reference=config is None, data=data, peft_config=config, loss_type=loss_type
        )

    made.assert_same_training(make)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": ["sigmoid", "aot"], "loss_weights": [1.0, 0.3]},
        {"loss_type": ["aot"]},
        {"ld_alpha": 0.5},
        {"use_weighting": True},
        {"f_divergence_type": "js_divergence"},
    ],
    ids=lambda options: ",".join(options),
)
def test_what_stays_the_trainers_own_loss(tmp_path, caplog, options):
    with caplog.at_level(logging.INFO, logger="liger.trl"):
        made.assert_same_training(lambda: made.dpo(tmp_path, **options), in_the_head=False)
    assert f"{next(iter(options))}=" in caplog.text


@pytest.mark.parametrize("kind", made.HEADS)
@pytest.mark.parametrize("options", [{}, {"use_weighting": True}], ids=["in the head", "own loss"])
def test_heads(tmp_path, kind, options):
    """Logits that are capped or scaled, a head with the embedding's weight."""
    family, overrides = made.HEADS[kind]
    make = lambda: tiny_models.make(family, **overrides)  # noqa: E731
    made.assert_same_training(
        lambda: made.dpo(tmp_path, make(), make().requires_grad_(False), **options), in_the_head=not options
    )


def test_mixture_of_experts(tmp_path):
    """The loss of the router has its gradient, too."""

    def make():
        model = tiny_models.make(
            "Mixtral", num_local_experts=2, output_router_logits=True, router_aux_loss_coef=0.5
        )
        return made.dpo(tmp_path, model, tiny_models.make("Mixtral", num_local_experts=2))

    assert "aux_loss" in made.logged(made.assert_same_training(make))[0]


@pytest.mark.parametrize("modules_to_save", [None, ["lm_head"]], ids=["adapters", "head"])
@pytest.mark.parametrize("own_adapter", [False, True], ids=["new adapter", "copied adapter"])
def test_dpo_with_adapters(tmp_path, own_adapter, modules_to_save):
    """The reference is the model without its adapters, or with the copy of one that it came with."""

    def make():
        torch.manual_seed(9)
        config = lora(modules_to_save=modules_to_save)
        if own_adapter:
            return made.dpo(tmp_path, peft.get_peft_model(made.model(), config), False)
        return made.dpo(tmp_path, reference=False, peft_config=config)

    made.assert_same_training(make)


@pytest.mark.parametrize("make", ["dpo", "sft", "sft of texts", "dft of texts"])
def test_prompt_tuning(tmp_path, make):
    """Virtual tokens before the tokens of the batch. The last one predicts the first token of a text."""
    config = prompt_tuning(3)

    def trainer():
        torch.manual_seed(9)
        if make == "sft":
            return made.sft(tmp_path, peft_config=config)
        if "of texts" in make:
            kind = "dft" if make.startswith("dft") else "nll"
            return made.sft(tmp_path, made.rows(8, text=(3, 9)), peft_config=config, loss_type=kind)
        return made.dpo(tmp_path, reference=False, peft_config=config)

    made.assert_same_training(trainer)


def test_evaluation(tmp_path):
    def make():
        return made.dpo(
            tmp_path, eval_dataset=made.pairs(5), eval_strategy="steps", eval_steps=1,
            per_device_eval_batch_size=2,
        )  # fmt: skip

    entries = made.logged(made.assert_same_training(make))
    assert any("eval_rewards/margins" in entry for entry in entries)


def test_mixed_precision(tmp_path):
    """Weights of float32 under autocast, also around the reference."""
    trainer = liger.trl.patch(made.dpo(tmp_path, **{"bf16": True}))
    plain = made.dpo(tmp_path, **{"bf16": True})
    with made.losses_in_heads() as counted:
        for t in (trainer, plain):
            torch.manual_seed(0)
            t.train()
    ours, theirs = made.logged(trainer), made.logged(plain)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        assert mine.get("loss", 0) == pytest.approx(other.get("loss", 0), rel=0.05)
        assert mine.get("logps/chosen", 0) == pytest.approx(other.get("logps/chosen", 0), rel=0.02)
    assert counted


def test_a_model_on_the_ops_of_liger(tmp_path):
    def make():
        return made.dpo(tmp_path, liger.patch(made.model()), liger.patch(made.model(0.05)))

    made.assert_same_training(make)


def test_report_of_a_model_whose_trainer_has_its_own_head(tmp_path):
    """TRL puts its head before the head of a model which was patched; liger.trl.patch puts ours there."""
    model = liger.patch(made.model())
    trainer = made.dpo(tmp_path, model, liger.patch(made.model(0.05)))
    for m in (model, trainer.ref_model):
        report = liger.transformers.patch_report(m)
        assert "liger.trl.patch(trainer)" in report.left[""]
        assert "fused_linear_cross_entropy" not in report.replaced.values()
        assert "rms_norm" in report.replaced.values()
    liger.trl.patch(trainer)
    for m in (model, trainer.ref_model):
        report = liger.transformers.patch_report(m)
        assert report.replaced[""] == "trainer_loss" and not report.left


@pytest.mark.parametrize("kind", ["sft", "grpo", "rloo", "online_dpo"])
def test_a_report_names_the_loss_once(tmp_path, kind):
    """Of a model that was patched before its trainer: the loss of the trainer, and the layers."""
    model = liger.patch(made.model())
    if kind == "sft":
        trainer = made.sft(tmp_path, policy=model)
    elif kind == "online_dpo":
        experimental = pytest.importorskip("trl.experimental.online_dpo")
        trainer = experimental.OnlineDPOTrainer(
            model, reward_funcs=made.of_length, args=experimental.OnlineDPOConfig(str(tmp_path), **made.OPTIONS),
            train_dataset=made.rows(8, prompt=(2, 5)), processing_class=made.tokenizer(),
        )  # fmt: skip
    else:
        classes = (made.trl.RLOOTrainer, made.trl.RLOOConfig) if kind == "rloo" else (None, None)
        trainer = made.sampling(tmp_path, *classes, policy=model, beta=0.0)
    liger.trl.patch(trainer)
    report = liger.transformers.patch_report(model)
    losses = {name: what for name, what in report.replaced.items() if what.endswith(("loss", "entropy"))}
    assert losses == {"": "trainer_loss"} and not report.left
    assert {"rope", "rms_norm", "swiglu"} <= set(report.replaced.values())


# --- KTO ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("virtual_tokens", [0, 3])
def test_kto_answers_that_begin_the_sequence(tmp_path, virtual_tokens):
    data = made.rows(8, prompt=(0, 2), completion=(1, 7))
    data = data.add_column("label", [True, False, False, True] * 2)

    def make():
        torch.manual_seed(9)
        config = prompt_tuning(virtual_tokens)
        return made.kto(tmp_path, reference=config is None, data=data, peft_config=config)

    made.assert_same_training(make)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "kto", "desirable_weight": 1.3},
        {"loss_type": "apo_zero_unpaired"},
        {"precompute_ref_log_probs": True},
    ],
    ids=lambda options: ",".join(options),
)
def test_kto(tmp_path, options):
    made.assert_same_training(lambda: made.kto(tmp_path, **options))


def test_kto_with_adapters(tmp_path):
    def make():
        torch.manual_seed(9)
        return made.kto(tmp_path, reference=False, peft_config=lora())

    made.assert_same_training(make)


# --- ORPO, CPO ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, options",
    [
        ("orpo", {}),
        ("cpo", {}),
        ("cpo", {"loss_type": "hinge", "cpo_alpha": 0.0}),
        ("cpo", {"loss_type": "simpo", "cpo_alpha": 0.5, "label_smoothing": 0.1}),
        ("cpo", {"loss_type": "ipo"}),
    ],
)
def test_paired(tmp_path, name, options):
    made.assert_same_training(lambda: made.paired(tmp_path, name, **options))


def test_alphapo_keeps_its_own_loss(tmp_path):
    made.assert_same_training(
        lambda: made.paired(tmp_path, "cpo", loss_type="simpo", alpha=0.2), in_the_head=False
    )
