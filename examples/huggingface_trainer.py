# SPDX-License-Identifier: BSD-3-Clause
"""Trains a Llama on real text with the Hugging Face Trainer and liger's ops, on one device or on many.

    python examples/huggingface_trainer.py --output_dir out
    accelerate launch --config_file examples/fsdp2.yaml examples/huggingface_trainer.py \\
        --output_dir out --use_tiled_mlp true --tiled_mlp_num_shards 4
    torchrun --nproc-per-node 2 examples/huggingface_trainer.py --deepspeed examples/zero3.json \\
        --output_dir out --use_tiled_mlp true --tiled_mlp_num_shards 4

The text is the source code of Python's standard library, one token per byte, so nothing is downloaded. The
script has all arguments of ``transformers.TrainingArguments``. docs/guides/distributed.md describes the loss
under each framework.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import liger
from liger.transformers import patch_report


@dataclass
class ExampleArguments:
    use_liger: bool = True
    use_tiled_mlp: bool = False
    tiled_mlp_num_shards: int | None = None
    sequence_length: int = 512
    hidden_size: int = 256
    intermediate_size: int = 1024
    layers: int = 4
    heads: int = 4
    vocab_size: int = 256


class StandardLibrary(torch.utils.data.Dataset):
    """The bytes of Python's standard library in windows of equal length."""

    def __init__(self, length, limit=4 << 20):
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"\n".join(path.read_bytes() for path in paths)[:limit]
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.windows = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def make_model(example):
    if example.use_tiled_mlp and not example.use_liger:
        raise ValueError("--use_tiled_mlp true needs --use_liger true")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=example.vocab_size,
            hidden_size=example.hidden_size,
            intermediate_size=example.intermediate_size,
            num_hidden_layers=example.layers,
            num_attention_heads=example.heads,
            num_key_value_heads=example.heads,
            max_position_embeddings=example.sequence_length,
        )
    )
    if example.use_liger:
        liger.patch(model, tiled_mlp=example.use_tiled_mlp, tiled_mlp_num_shards=example.tiled_mlp_num_shards)
    return model


def main():
    example, training = HfArgumentParser((ExampleArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training.seed)
    model = make_model(example)
    trainer = Trainer(model=model, args=training, train_dataset=StandardLibrary(example.sequence_length))
    result = trainer.train()
    if trainer.is_world_process_zero():
        if example.use_liger:
            print(patch_report(model))
        step_tokens = training.train_batch_size * training.world_size * training.gradient_accumulation_steps
        speed = result.metrics["train_samples_per_second"] * example.sequence_length
        print(
            f"{result.global_step} steps of {step_tokens * example.sequence_length} tokens, {speed:.0f} tokens/s"
        )
        print(f"mean loss {result.training_loss:.4f}")
        if torch.cuda.is_available():
            print(f"peak memory {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB per GPU")


if __name__ == "__main__":
    main()
