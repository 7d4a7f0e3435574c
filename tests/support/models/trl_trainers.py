# SPDX-License-Identifier: BSD-3-Clause
"""Tiny trainers of TRL on models with random weights and data that is made here, and how two of them are
compared."""

import contextlib
import importlib.util
import os

import pytest
import tiny_models
import torch

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
trl = pytest.importorskip("trl")
pytest.importorskip("datasets")

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

import liger.trl  # noqa: E402
from liger.losses import FusedLinearLoss  # noqa: E402
from liger.trl import _supervised  # noqa: E402

WORDS = [f"w{i}" for i in range(tiny_models.VOCAB - 3)]
OPTIONS = {
    "report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True,
    "per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1, "save_strategy": "no", "learning_rate": 0.05,
    "lr_scheduler_type": "constant", "seed": 3, "optim": "sgd", "max_grad_norm": 0.0,
}  # fmt: skip
# Logits that are capped or scaled, and a head with the weight of the embedding.
HEADS = {
    "softcap": ("Gemma2", {"final_logit_softcapping": 5.0}),
    "scale": ("Granite", {"logits_scaling": 0.5}),
    "tied": ("llama", {"tie_word_embeddings": True}),
}


def tokenizer():
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>"
    )


def sentence(generator, shortest, longest):
    length = int(torch.randint(shortest, longest + 1, (), generator=generator))
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator))


def rows(count, **columns):
    """A dataset; every column is given by the shortest and longest length of its texts."""
    generator = torch.Generator().manual_seed(11)
    return Dataset.from_list(
        [{name: " " + sentence(generator, *span) for name, span in columns.items()} for _ in range(count)]
    )


def pairs(count=8):
    return rows(count, prompt=(2, 5), chosen=(1, 7), rejected=(2, 6))


def model(seed_shift=0.0, **overrides):
    made = tiny_models.make("llama", **overrides)
    if seed_shift:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            for parameter in made.parameters():
                parameter.add_(seed_shift * torch.randn_like(parameter))
    return made


def logged(trainer):
    """What a trainer has logged for its steps, without times."""
    skip = ("time", "runtime", "per_second", "epoch", "flos", "step")
    return [
        {k: v for k, v in entry.items() if not any(s in k for s in skip)}
        for entry in trainer.state.log_history
    ]


# --- trainers -----------------------------------------------------------------------------------------------


def dpo(folder, policy=None, reference=True, data=None, **options):
    others = {
        "peft_config": options.pop("peft_config", None),
        "eval_dataset": options.pop("eval_dataset", None),
    }
    if reference:
        others["ref_model"] = model(0.05) if reference is True else reference
    return trl.DPOTrainer(
        model() if policy is None else policy, args=trl.DPOConfig(str(folder), **OPTIONS | options),
        train_dataset=data or pairs(), processing_class=tokenizer(), **others,
    )  # fmt: skip


def kto(folder, reference=True, data=None, **options):
    if data is None:
        data = rows(8, prompt=(2, 5), completion=(1, 7)).add_column("label", [True, False, False, True] * 2)
    others = {"peft_config": options.pop("peft_config", None)}
    if reference:
        others["ref_model"] = model(0.05)
    return trl.KTOTrainer(
        model(), args=trl.KTOConfig(str(folder), **OPTIONS | options), train_dataset=data,
        processing_class=tokenizer(), **others,
    )  # fmt: skip


def of_length(completions, **_):
    """A reward that differs within a group."""
    return [float(len(set(text.split())) % 5) + 0.1 * len(text) for text in completions]


def sampling(folder, cls=None, config=None, policy=None, **options):
    cls, config = cls or trl.GRPOTrainer, config or trl.GRPOConfig
    options = {"num_generations": 2, "max_completion_length": 6, "beta": 0.05, **options}
    if policy is None:
        # The trainer loads the reference from where the policy came from.
        policy = str(folder / "model")
        model().save_pretrained(policy)
        if cls is trl.GRPOTrainer:
            options["model_init_kwargs"] = {"dtype": "float32"}
    return cls(
        policy, reward_funcs=of_length, args=config(str(folder / "out"), **OPTIONS | options),
        train_dataset=rows(8, prompt=(2, 5)), processing_class=tokenizer(),
    )  # fmt: skip


def sft(folder, data=None, policy=None, **options):
    others = {name: options.pop(name, None) for name in ("eval_dataset", "peft_config")}
    return trl.SFTTrainer(
        model() if policy is None else policy, args=trl.SFTConfig(str(folder), **OPTIONS | options),
        train_dataset=data or rows(8, prompt=(2, 5), completion=(1, 7)), processing_class=tokenizer(),
        **others,
    )  # fmt: skip


def paired(folder, name, **options):
    experimental = pytest.importorskip(f"trl.experimental.{name}")
    trainer, config = (getattr(experimental, f"{name.upper()}{kind}") for kind in ("Trainer", "Config"))
    return trainer(
        model(), args=config(str(folder), **OPTIONS | options), train_dataset=pairs(),
        processing_class=tokenizer(),
    )  # fmt: skip


def conversations(count=8):
    generator = torch.Generator().manual_seed(4)
    roles = ("user", "assistant")
    return Dataset.from_list(
        [
            {"messages": [{"role": r, "content": sentence(generator, 2, 6)} for r in roles]}
            for _ in range(count)
        ]
    )


def gkd(folder, student=None, teacher=None, **options):
    experimental = pytest.importorskip("trl.experimental.gkd")
    with_template = tokenizer()
    with_template.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return experimental.GKDTrainer(
        student or model(), teacher_model=teacher or model(0.2), processing_class=with_template,
        args=experimental.GKDConfig(str(folder), **OPTIONS | {"lmbda": 0.0, "max_new_tokens": 4, **options}),
        train_dataset=conversations(),
    )  # fmt: skip


def distillation(folder, **options):
    return trl.DistillationTrainer(
        model(), teacher_model=model(0.2), train_dataset=rows(8, prompt=(2, 5)),
        args=trl.DistillationConfig(str(folder), **OPTIONS | {"max_completion_length": 6, **options}),
        processing_class=tokenizer(),
    )  # fmt: skip


# --- comparison ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def losses_in_heads():
    """A list that grows with every loss that is made within a head."""
    counted, owners = [], {"run": FusedLinearLoss, "fused_linear_ce": _supervised}
    if importlib.util.find_spec("liger.ops.fused_linear_divergence.op"):
        owners["fused_linear_jsd"] = importlib.import_module("liger.trl._distillation")
    with pytest.MonkeyPatch.context() as patches:
        for name, owner in owners.items():
            real = getattr(owner, name)

            def seen(*arguments, real=real, **how):
                counted.append(1)
                return real(*arguments, **how)

            patches.setattr(owner, name, seen)
        yield counted


def assert_same_training(make, in_the_head=True, tolerance=1e-4):
    """Trains two trainers, one of them patched: losses, gradient norms, all metrics and the weights agree.

    The losses of the patched one are made in the head, or none of them is; None asks for neither.
    """
    plain, patched = make(), liger.trl.patch(make())
    with losses_in_heads() as counted:
        for trainer in (plain, patched):
            before = [p.detach().clone() for p in trainer.model.parameters()]
            torch.manual_seed(0)
            trainer.train()
            moved = zip(before, trainer.model.parameters(), strict=True)
            assert any(not torch.equal(a, b) for a, b in moved)
    ours, theirs = logged(patched), logged(plain)
    assert len(ours) == len(theirs) >= OPTIONS["max_steps"]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            assert mine[name] == pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True), name
    weights = dict(plain.model.named_parameters())
    for name, parameter in patched.model.named_parameters():
        # Plain gradient descent: a weight has moved by its gradient.
        torch.testing.assert_close(parameter, weights[name], rtol=tolerance, atol=tolerance / 10)
    if in_the_head is not None:
        assert len(counted) >= OPTIONS["max_steps"] if in_the_head else not counted
    return patched
