"""liger.trl.patch: trainers of TRL, trained for real with it and without, give the same logs and the same weights."""

import itertools
import logging

import pytest
import tiny_models
import torch
import trl_trainers as made
from trl_trainers import trl

import liger.trl
from liger.losses import FusedLinearLoss
from liger.trl import _scores, _supervised

peft = pytest.importorskip("peft")
HEAD = {
    "softcap": ("Gemma2", {"final_logit_softcapping": 5.0}),
    "scale": ("Granite", {"logits_scaling": 0.5}),
    "tied": ("llama", {"tie_word_embeddings": True}),
}


@pytest.fixture
def in_the_head(monkeypatch):
    """Counts the losses that are made within a head; TRL's own fused head may not be used by a patched trainer."""
    counted = []
    for owner, name in ((FusedLinearLoss, "run"), (_supervised, "fused_linear_ce")):
        real = getattr(owner, name)

        def seen(*arguments, real=real, **how):
            counted.append(1)
            return real(*arguments, **how)

        monkeypatch.setattr(owner, name, seen)
    return counted


def lora(**options):
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **options)


def assert_same_training(make, counted=None, tolerance=1e-4):
    """Trains two trainers, one of them patched: losses, gradient norms, all metrics and the weights agree.

    ``counted`` losses are then made in the head of the patched one, or none if it is None.
    """
    plain, patched = make(), liger.trl.patch(make())
    for trainer in (plain, patched):
        before = [p.detach().clone() for p in trainer.model.parameters()]
        torch.manual_seed(0)
        trainer.train()
        moved = zip(before, trainer.model.parameters(), strict=True)
        assert any(not torch.equal(a, b) for a, b in moved)
    ours, theirs = made.logged(patched), made.logged(plain)
    assert len(ours) == len(theirs) >= made.OPTIONS["max_steps"]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            assert mine[name] == pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True), name
    weights = dict(plain.model.named_parameters())
    for name, parameter in patched.model.named_parameters():
        # Plain gradient descent: a weight has moved by its gradient.
        torch.testing.assert_close(parameter, weights[name], rtol=tolerance, atol=tolerance / 10)
    if counted is not None:
        assert len(counted) >= made.OPTIONS["max_steps"]
    return patched


# --- DPO ----------------------------------------------------------------------------------------------------------


def dpo(folder, policy=None, reference=True, data=None, **options):
    others = {
        "peft_config": options.pop("peft_config", None),
        "eval_dataset": options.pop("eval_dataset", None),
    }
    if reference:
        others["ref_model"] = made.model(0.05) if reference is True else reference
    return trl.DPOTrainer(
        made.model() if policy is None else policy, args=trl.DPOConfig(str(folder), **made.OPTIONS | options),
        train_dataset=data or made.pairs(), processing_class=made.tokenizer(), **others,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": ["sigmoid"]},
        {"loss_type": ["ipo"], "loss_weights": [0.5]},
        {"loss_type": ["exo_pair"], "label_smoothing": 0.01},
        {"loss_type": ["apo_zero"], "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
        {"precompute_ref_log_probs": True},
        {"gradient_checkpointing": True},
    ],
    ids=lambda options: ",".join(options),
)
def test_dpo(tmp_path, in_the_head, options):
    assert_same_training(lambda: dpo(tmp_path, **options), in_the_head)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]},
        {"loss_type": ["aot"]},
        {"ld_alpha": 0.5},
        {"use_weighting": True},
        {"f_divergence_type": "js_divergence"},
    ],
    ids=lambda options: ",".join(options),
)
def test_what_stays_the_trainers_own_loss(tmp_path, in_the_head, caplog, options):
    with caplog.at_level(logging.INFO, logger="liger.trl"):
        assert_same_training(lambda: dpo(tmp_path, **options))
    assert not in_the_head
    assert f"{next(iter(options))}=" in caplog.text


@pytest.mark.parametrize("kind", HEAD)
@pytest.mark.parametrize("options", [{}, {"use_weighting": True}], ids=["in the head", "own loss"])
def test_heads(tmp_path, in_the_head, kind, options):
    """Logits that are capped or scaled, a head with the embedding's weight."""
    family, overrides = HEAD[kind]
    make = lambda: tiny_models.make(family, **overrides)  # noqa: E731
    assert_same_training(
        lambda: dpo(tmp_path, make(), make().requires_grad_(False), **options),
        None if options else in_the_head,
    )


def test_mixture_of_experts(tmp_path, in_the_head):
    """The loss of the router has its gradient, too."""

    def make():
        model = tiny_models.make(
            "Mixtral", num_local_experts=2, output_router_logits=True, router_aux_loss_coef=0.5
        )
        return dpo(tmp_path, model, tiny_models.make("Mixtral", num_local_experts=2))

    assert "aux_loss" in made.logged(assert_same_training(make, in_the_head))[0]


@pytest.mark.parametrize("modules_to_save", [None, ["lm_head"]], ids=["adapters", "head"])
@pytest.mark.parametrize("own_adapter", [False, True], ids=["new adapter", "copied adapter"])
def test_dpo_with_adapters(tmp_path, in_the_head, own_adapter, modules_to_save):
    """The reference is the model without its adapters, or with the copy of one that it came with."""

    def make():
        torch.manual_seed(9)
        config = lora(modules_to_save=modules_to_save)
        if own_adapter:
            return dpo(tmp_path, peft.get_peft_model(made.model(), config), False)
        return dpo(tmp_path, reference=False, peft_config=config)

    assert_same_training(make, in_the_head)


@pytest.mark.parametrize("make", ["dpo", "sft"])
def test_prompt_tuning(tmp_path, in_the_head, make):
    """Virtual tokens before those of the batch."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)

    def trainer():
        torch.manual_seed(9)
        if make == "sft":
            return sft(tmp_path, peft_config=config)
        return dpo(tmp_path, reference=False, peft_config=config)

    assert_same_training(trainer, in_the_head)


def test_evaluation(tmp_path, in_the_head):
    def make():
        return dpo(
            tmp_path, eval_dataset=made.pairs(5), eval_strategy="steps", eval_steps=1,
            per_device_eval_batch_size=2,
        )  # fmt: skip

    entries = made.logged(assert_same_training(make, in_the_head))
    assert any("eval_rewards/margins" in entry for entry in entries)


def test_mixed_precision(tmp_path, in_the_head):
    """Weights of float32 under autocast, also around the reference."""
    trainer = liger.trl.patch(dpo(tmp_path, **{"bf16": True}))
    plain = dpo(tmp_path, **{"bf16": True})
    for t in (trainer, plain):
        torch.manual_seed(0)
        t.train()
    ours, theirs = made.logged(trainer), made.logged(plain)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        assert mine.get("loss", 0) == pytest.approx(other.get("loss", 0), rel=0.05)
        assert mine.get("logps/chosen", 0) == pytest.approx(other.get("logps/chosen", 0), rel=0.02)
    assert in_the_head


def test_a_model_on_the_ops_of_liger(tmp_path, in_the_head):
    def make():
        return dpo(tmp_path, liger.patch(made.model()), liger.patch(made.model(0.05)))

    assert_same_training(make, in_the_head)


# --- KTO ----------------------------------------------------------------------------------------------------------


def kto(folder, reference=True, **options):
    data = made.rows(8, prompt=(2, 5), completion=(1, 7)).add_column("label", [True, False, False, True] * 2)
    others = {"peft_config": options.pop("peft_config", None)}
    if reference:
        others["ref_model"] = made.model(0.05)
    return trl.KTOTrainer(
        made.model(), args=trl.KTOConfig(str(folder), **made.OPTIONS | options), train_dataset=data,
        processing_class=made.tokenizer(), **others,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "kto", "desirable_weight": 1.3},
        {"loss_type": "apo_zero_unpaired"},
        {"precompute_ref_log_probs": True},
    ],
    ids=lambda options: ",".join(options),
)
def test_kto(tmp_path, in_the_head, options):
    assert_same_training(lambda: kto(tmp_path, **options), in_the_head)


def test_kto_with_adapters(tmp_path, in_the_head):
    def make():
        torch.manual_seed(9)
        return kto(tmp_path, reference=False, peft_config=lora())

    assert_same_training(make, in_the_head)


# --- GRPO, RLOO ---------------------------------------------------------------------------------------------------


def of_length(completions, **_):
    """A reward that differs within a group."""
    return [float(len(set(text.split())) % 5) + 0.1 * len(text) for text in completions]


def sampling(folder, cls=None, config=None, **options):
    cls, config = cls or trl.GRPOTrainer, config or trl.GRPOConfig
    # The trainer loads the reference from where the model came from.
    path = folder / "model"
    if not path.exists():
        made.model().save_pretrained(path)
        made.tokenizer().save_pretrained(path)
    options = {"num_generations": 2, "max_completion_length": 6, "beta": 0.05, **options}
    if cls is trl.GRPOTrainer:
        options.setdefault("model_init_kwargs", {"dtype": "float32"})
    return cls(
        str(path), reward_funcs=of_length, args=config(str(folder / "out"), **made.OPTIONS | options),
        train_dataset=made.rows(8, prompt=(2, 5)),
    )  # fmt: skip


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"])
def test_grpo(tmp_path, in_the_head, loss_type):
    """Two passes over each batch: from the second on the policy is another than the one that sampled."""

    def make():
        return sampling(tmp_path, loss_type=loss_type, num_iterations=2, epsilon=0.01, max_steps=4)

    assert_same_training(make, in_the_head)


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.0, "temperature": 0.7},
        {"importance_sampling_level": "sequence", "num_iterations": 2},
        {"gradient_accumulation_steps": 2, "delta": 1.5},
        {"cast_lm_head_to_fp32": True},
    ],
    ids=lambda options: ",".join(options),
)
def test_grpo_with(tmp_path, in_the_head, options):
    assert_same_training(lambda: sampling(tmp_path, **options), in_the_head)


@pytest.mark.parametrize(
    "options",
    [{"entropy_coef": 0.05}, {"top_entropy_quantile": 0.5}, {"loss_type": "vespo"}],
    ids=lambda options: ",".join(options),
)
def test_grpo_that_keeps_its_own_loss(tmp_path, in_the_head, options):
    assert_same_training(lambda: sampling(tmp_path, **options))
    assert not in_the_head


def test_rloo(tmp_path):
    assert_same_training(lambda: sampling(tmp_path, trl.RLOOTrainer, trl.RLOOConfig))


# --- SFT ----------------------------------------------------------------------------------------------------------


def sft(folder, data=None, policy=None, **options):
    others = {name: options.pop(name, None) for name in ("eval_dataset", "peft_config")}
    return trl.SFTTrainer(
        made.model() if policy is None else policy, args=trl.SFTConfig(str(folder), **made.OPTIONS | options),
        train_dataset=data or made.rows(8, prompt=(2, 5), completion=(1, 7)), processing_class=made.tokenizer(),
        **others,
    )  # fmt: skip


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
def test_sft(tmp_path, in_the_head, options):
    def make():
        data = made.rows(12, text=(3, 9)) if "packing" in options else None
        others = (
            {"eval_dataset": made.rows(5, prompt=(2, 5), completion=(1, 7))}
            if "eval_steps" in options
            else {}
        )
        return sft(tmp_path, data, **options, **others)

    entry = made.logged(assert_same_training(make, in_the_head))[0]
    assert entry["entropy"] > 0 and "mean_token_accuracy" in entry


@pytest.mark.parametrize("kind", HEAD)
def test_sft_heads(tmp_path, in_the_head, kind):
    family, overrides = HEAD[kind]
    assert_same_training(lambda: sft(tmp_path, policy=tiny_models.make(family, **overrides)), in_the_head)


def test_sft_with_label_smoothing_keeps_its_own_loss(tmp_path, in_the_head):
    assert_same_training(lambda: sft(tmp_path, label_smoothing_factor=0.1))
    assert not in_the_head


# --- ORPO, CPO ----------------------------------------------------------------------------------------------------


def paired(folder, name, **options):
    experimental = pytest.importorskip(f"trl.experimental.{name}")
    trainer, config = (getattr(experimental, f"{name.upper()}{kind}") for kind in ("Trainer", "Config"))
    return trainer(
        made.model(), args=config(str(folder), **made.OPTIONS | options), train_dataset=made.pairs(),
        processing_class=made.tokenizer(),
    )  # fmt: skip


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
def test_paired(tmp_path, in_the_head, name, options):
    assert_same_training(lambda: paired(tmp_path, name, **options), in_the_head)


def test_alphapo_keeps_its_own_loss(tmp_path, in_the_head):
    assert_same_training(lambda: paired(tmp_path, "cpo", loss_type="simpo", alpha=0.2))
    assert not in_the_head


# --- GKD ----------------------------------------------------------------------------------------------------------


def gkd(folder, student=None, teacher=None, **options):
    pytest.importorskip("liger.ops.fused_linear_divergence")
    experimental = pytest.importorskip("trl.experimental.gkd")
    generator = torch.Generator().manual_seed(4)
    data = [
        {
            "messages": [
                {"role": role, "content": made.sentence(generator, 2, 6)} for role in ("user", "assistant")
            ]
        }
        for _ in range(8)
    ]
    tokenizer = made.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return experimental.GKDTrainer(
        student or made.model(), teacher_model=teacher or made.model(0.2),
        args=experimental.GKDConfig(str(folder), **made.OPTIONS | {"lmbda": 0.0, "max_new_tokens": 4, **options}),
        train_dataset=made.Dataset.from_list(data), processing_class=tokenizer,
    )  # fmt: skip


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
    assert_same_training(lambda: gkd(tmp_path, **options))


def test_gkd_of_a_larger_teacher(tmp_path):
    assert_same_training(
        lambda: gkd(tmp_path, teacher=tiny_models.make("llama", hidden_size=96, head_dim=24))
    )


def test_gkd_with_a_softcap(tmp_path):
    family, overrides = HEAD["softcap"]
    student, teacher = (tiny_models.make(family, **overrides) for _ in range(2))
    with pytest.raises(ValueError, match=r"logits of the student.*softcap"):
        liger.trl.patch(gkd(tmp_path, student, teacher))


# --- what holds for all -------------------------------------------------------------------------------------------


def test_no_logits_are_made(tmp_path, monkeypatch):
    """The linear layer of a head is never run, be it the policy's or the reference's."""
    made_by = []
    trainers = [
        dpo(tmp_path),
        kto(tmp_path),
        sft(tmp_path),
        paired(tmp_path, "orpo"),
        paired(tmp_path, "cpo"),
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
    """The rows of hidden states in the losses of a head and in log-probabilities, in the order of the calls."""
    seen, run, score = [], FusedLinearLoss.run, _scores.fused_linear_logprobs
    monkeypatch.setattr(
        FusedLinearLoss,
        "run",
        lambda self, batch, *a, **k: seen.append(len(batch.hidden)) or run(self, batch, *a, **k),
    )
    monkeypatch.setattr(
        _scores,
        "fused_linear_logprobs",
        lambda x, *a, **k: seen.append(x[..., 0].numel()) or score(x, *a, **k),
    )
    return seen


@pytest.mark.parametrize("make", [dpo, kto], ids=lambda make: make.__name__)
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
    trainers = [paired(tmp_path, name) for name in ("orpo", "cpo") for _ in range(2)]
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
    trainer = sampling(
        tmp_path,
        *(getattr(trl, trainer + kind) for kind in ("Trainer", "Config")),
        temperature=0.7,
        max_steps=1,
    )
    seen = rows_of_losses(monkeypatch)
    liger.trl.patch(trainer).train()
    # The reference, then the policy; the hidden state before each token of a completion, and at most one more.
    assert len(seen) >= 2 and all(rows <= 4 * (6 + 1) for rows in seen)


def test_generation_and_plain_calls_are_as_before(tmp_path):
    trainer = dpo(tmp_path)
    inputs = tiny_models.batch()
    before = trainer.model(**inputs)
    tokens = trainer.model.generate(inputs["input_ids"][:1], max_new_tokens=3, do_sample=False)
    liger.trl.patch(trainer)
    after = trainer.model(**inputs)
    assert torch.equal(after.logits, before.logits) and torch.equal(after.loss, before.loss)
    assert torch.equal(
        trainer.model.generate(inputs["input_ids"][:1], max_new_tokens=3, do_sample=False), tokens
    )


def test_patching_again_changes_nothing(tmp_path):
    trainer = liger.trl.patch(sft(tmp_path))
    loss, forward = trainer.compute_loss, trainer.model.forward
    assert liger.trl.patch(trainer) is trainer
    assert (trainer.compute_loss, trainer.model.forward) == (loss, forward)


def test_a_subclass_with_a_loss_of_its_own_keeps_it(tmp_path, caplog):
    class Doubled(trl.DPOTrainer):
        def _compute_loss(self, model, inputs, return_outputs):
            return 2 * super()._compute_loss(model, inputs, return_outputs)

    plain = dpo(tmp_path)
    batch = next(iter(plain.get_train_dataloader()))
    expected = 2 * plain._compute_loss(plain.model, batch, False)
    trainer = dpo(tmp_path)
    trainer.__class__ = Doubled
    with caplog.at_level(logging.INFO, logger="liger.trl"):
        liger.trl.patch(trainer)
    loss = trainer._compute_loss(trainer.model, batch, False)
    torch.testing.assert_close(loss, expected)
    assert "Doubled has a loss of its own" in caplog.text


def test_unknown_trainer():
    with pytest.raises(
        TypeError, match=r"liger\.trl\.patch was given a dict, expected a trainer of TRL: .*DPOTrainer"
    ):
        liger.trl.patch({})


def test_head_with_an_adapter(tmp_path):
    """TRL refuses it for most trainers; ORPO's would lose the adapter."""
    trainer = paired(tmp_path, "orpo")
    trainer.model.lm_head = peft.get_peft_model(
        torch.nn.Sequential(trainer.model.lm_head), peft.LoraConfig(target_modules=["0"])
    ).base_model.model[0]
    with pytest.raises(RuntimeError, match=r"the head is a peft.*expected a torch.nn.Linear"):
        liger.trl.patch(trainer).train()
