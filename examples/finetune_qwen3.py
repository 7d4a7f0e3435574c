# SPDX-License-Identifier: BSD-3-Clause
"""Fine-tunes Qwen3 on a chat data set: LoRA or all weights, one GPU, packed conversations, evaluation,
saving.

    pip install "liger-ops[transformers]" peft datasets accelerate
    liger plan --model Qwen/Qwen3-1.7B --tokens 8192             # does a step fit, before a GPU is rented
    python examples/finetune_qwen3.py --output_dir out                  # LoRA on HuggingFaceH4/no_robots
    python examples/finetune_qwen3.py --output_dir out --full true --learning_rate 1e-5
    python examples/finetune_qwen3.py --output_dir out --data chats.jsonl --model my/folder

A line of a JSONL file, or a row of a data set, has ``messages``: a list of {"role": ..., "content": ...} that
ends with the assistant's answer, which is learned. Several conversations are packed into one sequence of
``--length`` tokens; positions start again with each, so none attends to another. The program has all
arguments of ``transformers.TrainingArguments``.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

import liger

IGNORED = -100  # a label without loss


@dataclass
class Settings:
    model: str = "Qwen/Qwen3-1.7B"
    data: str = "HuggingFaceH4/no_robots"  # a data set of the Hub, or a JSONL file
    length: int = 4096  # tokens of a packed sequence; longer conversations are cut off
    held_out: int = 100  # conversations for evaluation
    full: bool = False  # train all weights instead of LoRA adapters
    rank: int = 16


def conversations(source):
    """The ``messages`` of every row."""
    if Path(source).is_file():
        with open(source, encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines if line.strip()]
    else:
        from datasets import load_dataset

        rows = load_dataset(source, split="train")
    return [row["messages"] for row in rows]


def tokens_of(messages, tokenizer, length):
    """(token ids, labels) of a conversation: the last answer has labels, what comes before it has none."""
    *before, answer = messages
    if answer["role"] != "assistant":
        raise ValueError(f"a conversation ends with a message of {answer['role']}, expected the assistant's")
    prompt = tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    if not text.startswith(prompt):
        raise ValueError("the chat template changes the prompt when an answer follows: no label can be set")
    prompt, answer = (
        tokenizer(part, add_special_tokens=False).input_ids for part in (prompt, text[len(prompt) :])
    )
    return (prompt + answer)[:length], ([IGNORED] * len(prompt) + answer)[:length]


def packed(examples, length):
    """Sequences of whole conversations, up to ``length`` tokens each, first come, first packed."""
    bins = []
    for ids, labels in examples:
        if not bins or len(bins[-1]["input_ids"]) + len(ids) > length:
            bins.append({"input_ids": [], "labels": [], "position_ids": []})
        bins[-1]["input_ids"] += ids
        # The first token of a conversation would be predicted from the one before it.
        bins[-1]["labels"] += [IGNORED, *labels[1:]]
        bins[-1]["position_ids"] += range(len(ids))
    return bins


def collate(rows):
    """One packed sequence; without an attention mask, transformers separates conversations by their
    positions."""
    (row,) = rows
    batch = {name: torch.tensor([values]) for name, values in row.items()}
    # No logits in evaluation, either: 4096 tokens of Qwen3 would take 2.3 GiB in float32.
    return {**batch, "skip_logits": True, "use_cache": False}


def load(settings, device):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype)
    if not settings.full:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=settings.rank, lora_alpha=2 * settings.rank, target_modules="all-linear")
        model = get_peft_model(model, adapters)
    liger.patch(model)
    if device.type == "cuda":
        # Recomputes as many layers as the memory of this GPU asks for, and no more.
        liger.transformers.checkpoint(model)
    return model


def main():
    settings, training = HfArgumentParser((Settings, TrainingArguments)).parse_args_into_dataclasses()
    # A batch is one packed sequence. The loss alone is evaluated, and is all that a step returns.
    training.per_device_train_batch_size = training.per_device_eval_batch_size = 1
    training.prediction_loss_only = True
    set_seed(training.seed)

    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    chats = conversations(settings.data)
    random.Random(training.seed).shuffle(chats)
    examples = [tokens_of(chat, tokenizer, settings.length) for chat in chats]
    held_out, train = examples[: settings.held_out], examples[settings.held_out :]

    trainer = Trainer(
        model=load(settings, training.device),
        args=training,
        train_dataset=packed(train, settings.length),
        eval_dataset=packed(held_out, settings.length),
        data_collator=collate,
        processing_class=tokenizer,
    )
    print(f"evaluation loss before: {trainer.evaluate()['eval_loss']:.4f}")
    trainer.train()
    print(f"evaluation loss after: {trainer.evaluate()['eval_loss']:.4f}")
    trainer.save_model()
    print(f"saved to {training.output_dir}: {'weights' if settings.full else 'adapters'} and tokenizer")
    print(liger.transformers.patch_report(trainer.model))
    if training.device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
