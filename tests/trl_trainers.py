"""Tiny trainers of TRL on models with random weights and data that is made here."""

import pytest
import tiny_models
import torch

# Before trl is imported, which has to warn about it otherwise.
trl = pytest.importorskip("trl")
pytest.importorskip("datasets")

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

WORDS = [f"w{i}" for i in range(tiny_models.VOCAB - 3)]
OPTIONS = {
    "report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True,
    "per_device_train_batch_size": 4, "max_steps": 2, "logging_steps": 1, "save_strategy": "no", "learning_rate": 0.05,
    "lr_scheduler_type": "constant", "seed": 3, "optim": "sgd", "max_grad_norm": 0.0,
}  # fmt: skip


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
