# SPDX-License-Identifier: BSD-3-Clause
"""A contestant at work: its model, its optimizer and the measurement of its steps."""

import importlib
import time

import torch

import liger
from liger.transformers.checkpointing import methods
from liger.transformers.step_graphs import WARM_UP

# Allowed relative difference of the first loss from the unpatched model's.
SAME_LOSS = 2e-3


def quantise(model, device):
    """Replaces the linear layers of the decoder by 4-bit ones of bitsandbytes, from the same weights, and
    prepares the model as the recipe of docs/recipes/lora.md does: the other parameters are float32."""
    nn = importlib.import_module("bitsandbytes").nn
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                made = nn.Linear4bit(
                    child.in_features, child.out_features, bias=False, compute_dtype=child.weight.dtype,
                    quant_type="nf4",
                )  # fmt: skip
                made.weight = nn.Params4bit(child.weight.detach(), requires_grad=False, quant_type="nf4")
                setattr(module, name, made.to(device))
    model.is_loaded_in_4bit = True  # PEFT asks for it
    # Checkpointing stays as it is.
    importlib.import_module("peft").prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def with_adapters(model, rank):
    """The model of PEFT with LoRA on all linear layers of the decoder, in float32 as PEFT's default is."""
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


class Trainee:
    """The model and optimizer of a contestant."""

    def __init__(self, contestant, size, device):
        self.contestant, self.size, self.device = contestant, size, device
        self.samples, self.host, self.peak, self.loss = [], [], None, None

    def make_model(self):
        """The model before the contestant prepares it, with the same weights for every contestant."""
        transformers = importlib.import_module("transformers")
        settings = {"tie_word_embeddings": True, **self.size.config}
        config = transformers.AutoConfig.for_model(
            self.size.family, **settings, use_cache=False, attn_implementation=self.size.attention
        )
        torch.manual_seed(0)
        with torch.device(self.device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return model.to(self.size.dtype).train()

    def make_optimizer(self, parameters):
        return self.contestant.optimizer(parameters, capturable=self.contestant.captured)

    def build(self):
        self.model = self.make_model()
        captured = self.contestant.captured
        if self.size.checkpointing:
            # The state of the random generator cannot be read during a capture, and this model has no
            # dropout.
            settings = {"preserve_rng_state": False} if captured else {}
            methods.enable(self.model, **settings)
        if self.size.nf4:
            quantise(self.model, self.device)
        if self.size.lora:
            self.model = with_adapters(self.model, self.size.lora)
        self.call = self.contestant.prepare(self.model)
        self.optimizer = self.make_optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.step = self.eager_step
        if captured:
            graphed = liger.transformers.graph_step(self.call, self.optimizer)
            self.step = lambda tokens: graphed(input_ids=tokens, labels=tokens)

    def eager_step(self, tokens):
        # The other parameters of a 4-bit model are float32: autocast, as with bf16=True in the Trainer.
        half = self.size.nf4 and self.size.dtype == torch.bfloat16
        with torch.autocast(self.device, torch.bfloat16, enabled=half):
            loss = self.call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def idle_bytes(self):
        """Bytes of model and optimizer between steps."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        kept = [*self.model.parameters(), *self.model.buffers(), *filter(torch.is_tensor, states)]
        return sum({t.data_ptr(): t.nbytes for t in kept if t.device.type == self.device}.values())

    def warm_up(self, batches):
        if self.contestant.captured:
            losses = [self.step(batches[0]) for _ in range(WARM_UP)]
            torch.cuda.synchronize()
            others = torch.cuda.memory_allocated() - self.idle_bytes()
            torch.cuda.reset_peak_memory_stats()
            self.step(batches[0])  # is captured
            self.peak = torch.cuda.max_memory_allocated() - others
        else:
            losses = [self.step(batches[i % len(batches)]) for i in range(self.contestant.warm_up)]
        if self.loss is None:
            self.loss = losses[0].item()

    def measure(self, tokens):
        """Runs a step between two synchronisations; records its time and host time, and peak memory."""
        gpu = self.device == "cuda"
        if gpu:
            torch.cuda.synchronize()
            others = torch.cuda.memory_allocated() - self.idle_bytes()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        self.step(tokens)
        issued = time.perf_counter()
        if gpu:
            torch.cuda.synchronize()
            self.peak = max(self.peak or 0, torch.cuda.max_memory_allocated() - others)
        self.samples.append((time.perf_counter() - start) * 1e3)
        self.host.append((issued - start) * 1e3)
