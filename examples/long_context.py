# SPDX-License-Identifier: BSD-3-Clause
"""Trains a model with the shape of Llama-3.2-1B on one very long sequence on one GPU, and measures four
features.

    python examples/long_context.py                      # 262144 tokens: 30 GiB, and more without a feature
    python examples/long_context.py --tokens 65536
    python examples/long_context.py --size tiny          # a few seconds on a CPU

The features are gradient checkpointing, flash attention, the tiled MLP and the fused linear cross entropy. A
training step is measured with all four, and without each of them, in separate processes: tokens per second
and peak memory, or the size of the allocation that failed. Weights and tokens are random; nothing is
downloaded.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

FEATURES = {
    "tiled_mlp": "tiled MLP",
    "fused_linear_cross_entropy": "fused linear cross entropy",
    "checkpointing": "gradient checkpointing",
    "flash": "flash attention",
}
SIZES = {
    "llama-3.2-1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rope_theta": 500000.0,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    },
}  # fmt: skip
TOKENS = {"llama-3.2-1b": 262144, "tiny": 256}
GIB = 2**30


def build(size, tokens, features, device):
    from transformers import LlamaConfig, LlamaForCausalLM

    import liger

    attention = "sdpa" if "flash" in features else "eager"
    config = LlamaConfig(
        **SIZES[size], max_position_embeddings=tokens, tie_word_embeddings=True, attn_implementation=attention
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.train()
    if "checkpointing" in features:
        # gradient_checkpointing_enable before transformers 5.24.
        model.activation_checkpointing_enable({"use_reentrant": False})
    return liger.patch(
        model,
        tiled_mlp="tiled_mlp" in features,
        fused_linear_cross_entropy="fused_linear_cross_entropy" in features,
    )


def attention_kernels(device, features):
    """Context manager that allows flash attention only, without fallback; on a CPU PyTorch chooses."""
    if device == "cuda" and "flash" in features:
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    return contextlib.nullcontext()


def measure(size, tokens, steps, features):
    """Trains for ``steps``; returns tokens_per_second, peak_gib and losses, or out_of_memory and held_gib."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    times, losses = [], []
    try:
        model = build(size, tokens, features, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        batch = torch.randint(SIZES[size]["vocab_size"], (1, tokens), device=device)
        for _ in range(steps):
            synchronize()
            start = time.perf_counter()
            with attention_kernels(device, features):
                loss = model(input_ids=batch, labels=batch, use_cache=False).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            times.append(time.perf_counter() - start)
    except torch.OutOfMemoryError as error:
        return {
            "out_of_memory": " ".join(str(error).split(". ")[1:2]),
            "held_gib": torch.cuda.max_memory_allocated() / GIB,
        }
    peak = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None
    return {"tokens_per_second": tokens / min(times), "peak_gib": peak, "losses": losses}


def run_in_subprocess(arguments, features):
    command = [sys.executable, __file__, "--size", arguments.size, "--tokens", str(arguments.tokens)]
    command += ["--steps", str(arguments.steps), "--only", ",".join(features) or "none"]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])


def line(name, result):
    if "out_of_memory" in result:
        return f"{name:38} out of memory with {result['held_gib']:.1f} GiB in use. {result['out_of_memory']}"
    peak = "" if result["peak_gib"] is None else f"{result['peak_gib']:7.1f} GiB"
    losses = " -> ".join(f"{loss:.3f}" for loss in result["losses"])
    return f"{name:38} {result['tokens_per_second']:9.0f} tokens/s {peak}   loss {losses}"


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="llama-3.2-1b")
    parser.add_argument("--tokens", type=int, help="length of the sequence")
    parser.add_argument("--steps", type=int, default=2, help="training steps; the fastest counts")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.tokens = arguments.tokens or TOKENS[arguments.size]
    if arguments.only is not None:
        features = [] if arguments.only == "none" else arguments.only.split(",")
        print(json.dumps(measure(arguments.size, arguments.tokens, arguments.steps, features)))
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{arguments.size}, one sequence of {arguments.tokens} tokens, {device}", flush=True)
    print(line("all of it", run_in_subprocess(arguments, list(FEATURES))), flush=True)
    for feature, name in FEATURES.items():
        others = [other for other in FEATURES if other != feature]
        print(line(f"without {name}", run_in_subprocess(arguments, others)), flush=True)


if __name__ == "__main__":
    main()
