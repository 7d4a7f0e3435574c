# SPDX-License-Identifier: BSD-3-Clause
"""Trains a small Llama on preference pairs with a TRL trainer and the losses of liger, and prints the reward
margin.

    python examples/preference.py
    python examples/preference.py --loss orpo --steps 100
    accelerate launch --num_processes 2 examples/preference.py

Weights are random and the data is synthetic, so nothing is downloaded. A prompt lists a few words. The chosen
answer has their number and repeats them in order; the rejected answer has a wrong number and the reverse
order. The margin is also measured on prompts outside the training set. The run takes less than a minute on
two CPU cores.
"""

import argparse
import copy
import os
import random
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import trl

import liger.trl

WORDS = [
    "river", "stone", "cloud", "apple", "tiger", "piano", "silver", "garden", "winter", "coffee", "window", "bridge",
]  # fmt: skip
NUMBERS = ["one", "two", "three", "four"]
LOSSES = ("dpo", "kto", "orpo", "cpo", "simpo")


def make_tokenizer():
    vocabulary = ["<pad>", "<bos>", "<eos>", "repeat", ":", *NUMBERS, *WORDS]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>"
    )


def make_pairs(count, seed):
    """Prompts with a right answer, and a wrong one with another number and reverse order."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        words = draw.sample(WORDS, draw.randint(2, len(NUMBERS)))
        number = NUMBERS[len(words) - 1]
        wrong = draw.choice([n for n in NUMBERS if n != number])
        rows.append(
            {
                "prompt": f"repeat {' '.join(words)} :",
                "chosen": f" {number} {' '.join(words)}",
                "rejected": f" {wrong} {' '.join(reversed(words))}",
            }
        )
    return Dataset.from_list(rows)


def unpaired(pairs):
    """One row per answer, with a label, the format of KTO."""
    answers = [
        {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
        for row in pairs
        for kind in ("chosen", "rejected")
    ]
    return Dataset.from_list(answers)


def make_model(tokenizer):
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_trainer(loss, steps, folder):
    tokenizer = make_tokenizer()
    model = liger.patch(make_model(tokenizer), fused_linear_cross_entropy=False)
    train, evaluation = make_pairs(512, 1), make_pairs(128, 2)
    if loss == "kto":
        train, evaluation = unpaired(train), unpaired(evaluation)
    common = {
        "output_dir": folder, "max_steps": steps, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 64,
        "learning_rate": 1e-3, "logging_steps": max(steps // 10, 1), "eval_strategy": "steps", "save_strategy": "no",
        "eval_steps": steps, "bf16": torch.cuda.is_available(), "report_to": [], "disable_tqdm": True, "beta": 0.5,
        "gradient_checkpointing": False,
    }  # fmt: skip
    data = {"train_dataset": train, "eval_dataset": evaluation, "processing_class": tokenizer}
    if loss in ("dpo", "kto"):
        trainer, config = getattr(trl, f"{loss.upper()}Trainer"), getattr(trl, f"{loss.upper()}Config")
        return trainer(model, ref_model=copy.deepcopy(model), args=config(**common), **data)
    if loss == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer(model, args=ORPOConfig(max_length=64, **common), **data)
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    kind = {"loss_type": "simpo", "simpo_gamma": 0.5} if loss == "simpo" else {}
    return CPOTrainer(model, args=CPOConfig(max_length=64, **kind, **common), **data)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loss", choices=LOSSES, default="dpo")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = liger.trl.patch(make_trainer(options.loss, options.steps, folder))
        before = trainer.evaluate()["eval_rewards/margins"]
        trainer.train()
        after = trainer.evaluate()["eval_rewards/margins"]
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "rewards/margins" in entry:
                print(
                    f"step {entry['step']:4}: loss {entry['loss']:.4f}, margin {entry['rewards/margins']:.3f}"
                )
        print(f"margin on other prompts, before and after training: {before:.3f} {after:.3f}")


if __name__ == "__main__":
    main()
