# SPDX-License-Identifier: BSD-3-Clause
"""One training run of ``liger demo`` in a separate process: python -m liger.cli._demo_worker RUN_JSON

The JSON file describes the run. Standard output has one JSON object per line: one per step, then one with the
memory.
"""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import liger
from liger_cli.demo_sizes import Size

from ..transformers.checkpointing import methods


class ResidentMemory:
    """Increase of the peak resident set size of this process since ``start()``, in bytes."""

    def start(self):
        try:
            # Resets VmHWM to the current resident size.
            Path("/proc/self/clear_refs").write_text("5")
            self.exact = True
        except OSError:
            self.exact = False
        self.level = self._status("VmRSS")

    def peak(self):
        return self._status("VmHWM") - self.level

    def _status(self, name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


class AllocatedMemory:
    """Peak bytes allocated by torch's CUDA allocator, including the model."""

    exact = True

    def start(self):
        torch.cuda.reset_peak_memory_stats()

    def peak(self):
        return torch.cuda.max_memory_allocated()


def build_model(size, device):
    """A Llama of a demo size; weights come from a fixed seed."""
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        intermediate_size=size.intermediate,
        max_position_embeddings=size.sequence,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(getattr(torch, size.dtype))
    if size.gradient_checkpointing:
        methods.enable(model)
    return model.train()


@torch.no_grad()
def nudge(model):
    """Changes every weight by one rounding (eps) of its dtype, with a random sign."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(1)
    for weight in model.parameters():
        sign = torch.randint(0, 2, weight.shape, generator=generator, device=weight.device) * 2 - 1
        weight.mul_(1 + sign.float() * torch.finfo(weight.dtype).eps)


def main(run_file):
    run = json.loads(Path(run_file).read_text())
    size, device = Size(**run["size"]), run["device"]
    batches = torch.load(run["batches"]).to(device)
    model = build_model(size, device)
    if run["kind"] == "liger":
        liger.patch(model)
    elif run["kind"] == "nudged":
        nudge(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate)

    # A first step outside the measurement: what is loaded once is no memory of a step.
    model(input_ids=batches[0], labels=batches[0]).loss.backward()
    optimizer.zero_grad(set_to_none=True)
    memory = AllocatedMemory() if device == "cuda" else ResidentMemory()
    memory.start()
    for step, tokens in enumerate(batches):
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()  # synchronises with the device
        print(json.dumps({"step": step, "loss": value, "seconds": time.perf_counter() - start}), flush=True)
    parameters = sum(p.numel() for p in model.parameters())
    end = {"peak_memory": memory.peak(), "memory_exact": memory.exact, "parameters": parameters}
    print(json.dumps(end))


if __name__ == "__main__":
    main(sys.argv[1])
