# SPDX-License-Identifier: BSD-3-Clause
"""E7: loss curves of training on real text from the same weights: unpatched, liger-kernel, liger.

A further unpatched run starts from weights that differ by one rounding each: the yardstick of what rounding
does. With class weights the loss is computed as in one step over all of its micro-batches: the sum of
weighted losses, divided by the sum of the weights of all targets.
"""

import contextlib
import importlib
import os

import torch
import torch.nn.functional as F

import liger
from liger.cli._demo_worker import nudge
from liger.transformers.checkpointing import methods
from liger_bench.models import sizes as model_sizes
from liger_bench.models.contestants import with_liger_kernel

from . import pictures, sharded_training, tables, text, training
from .cells import Cell, Experiment, packages
from .results import cells_of, ordered

METHODS = ("transformers", "liger", "nudged", "liger-kernel")
STEPS = 100
MICRO_BATCHES = 4
DEEPSPEED = "DeepSpeed"
# Size -> family, dtype, batch, sequence, class weights.
SIZES = {
    "Llama-3.2-1B bf16": ("llama", "bfloat16", 4, 512, False),
    "Qwen3 bf16": ("qwen3", "bfloat16", 8, 512, False),
    "Gemma 3 bf16": ("gemma3_text", "bfloat16", 8, 512, False),
    "Qwen3 float32": ("qwen3", "float32", 8, 512, False),
    "Gemma 3 float32": ("gemma3_text", "float32", 8, 512, False),
    "Qwen3 bf16, class weights": ("qwen3", "bfloat16", 8, 512, True),
    f"Qwen3 bf16, class weights, {DEEPSPEED}": ("qwen3", "bfloat16", 8, 512, True),
}
# Of Qwen3 and Gemma 3: small models with the vocabulary of a trained tokenizer.
SMALL = {
    "vocab_size": 32768, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512,
}  # fmt: skip
TINY = {**model_sizes.SELF_TEST.config, "max_position_embeddings": 64}
CLASSES = {"llama": "Llama", "qwen3": "Qwen3", "gemma3_text": "Gemma3"}
CONFIGS = {"gemma3_text": "Gemma3TextConfig"}


def cells(tiny):
    sizes = {"Qwen3 float32": ("qwen3", "float32", 2, 16, False)} if tiny else SIZES
    if tiny:
        sizes["Gemma 3 float32"] = ("gemma3_text", "float32", 2, 16, False)
        sizes["Qwen3 float32, class weights"] = ("qwen3", "float32", 4, 16, True)
        sizes[f"Qwen3 float32, class weights, {DEEPSPEED}"] = ("qwen3", "float32", 4, 16, True)
    names = ("family", "dtype", "batch", "sequence", "weighted")
    return [
        Cell(
            method,
            size,
            index,
            dict(zip(names, given, strict=True)),
            (*packages(method), *(("deepspeed",) if DEEPSPEED in size else ())),
            ladder=f"{method} {size}",
            seconds=240,
            expected=12.0,
        )
        for index, (size, given) in enumerate(sizes.items())
        for method in METHODS
    ]


def make_model(given, machine):
    import transformers

    family = given["family"]
    full = model_sizes.FULL.config if family == "llama" else SMALL
    settings = {**(TINY if machine.tiny else full), "tie_word_embeddings": True, "use_cache": False}
    config_name = CONFIGS.get(family, f"{CLASSES[family]}Config")
    config = getattr(transformers, config_name)(**settings, attn_implementation="sdpa")
    torch.manual_seed(0)
    with torch.device(machine.device):
        model = getattr(transformers, f"{CLASSES[family]}ForCausalLM")(config)
    return model.to(getattr(torch, given["dtype"])).train()


# --- losses with class weights ------------------------------------------------------------------------------


def _plain(hidden, weight, target, class_weight, denominator):
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, target, class_weight, reduction="sum") / denominator


def _liger(hidden, weight, target, class_weight, denominator):
    return liger.fused_linear_ce(hidden, weight, target, ce_weight=class_weight, denominator=denominator)


def _liger_kernel(hidden, weight, target, class_weight, denominator):
    loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
    return loss(ce_weight=class_weight, reduction="sum")(weight, hidden, target) / denominator


WEIGHTED = {"liger": _liger, "liger-kernel": _liger_kernel}


def weighted_step(model, tokens, class_weight, head_loss, backward=torch.Tensor.backward):
    """The loss of a step over micro-batches, with gradients: sum of weighted losses over the sum of
    weights. ``backward(loss)`` runs for each of them."""
    denominator = class_weight[tokens[:, 1:]].sum()
    total = torch.zeros((), device=tokens.device)
    for part in tokens.chunk(MICRO_BATCHES):
        hidden = model.model(input_ids=part).last_hidden_state[:, :-1].flatten(0, 1)
        loss = head_loss(hidden, model.lm_head.weight, part[:, 1:].flatten(), class_weight, denominator)
        backward(loss)
        total += loss.detach()
    return total


def deepspeed_backward(model, optimizer, machine, batch, dtype):
    """Backward and step of a micro-batch under DeepSpeed, which accumulates gradients and steps once per
    batch."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if machine.gpu else "cpu")
    import deepspeed

    sharded_training.start(machine)
    config = {
        "train_micro_batch_size_per_gpu": batch // MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )

    def backward(loss):
        # The engine divides by the number of micro-batches.
        engine.backward(loss * MICRO_BATCHES)
        engine.step()

    return backward


# --- a run --------------------------------------------------------------------------------------------------


def measure(cell, machine):
    given, method = cell.settings, cell.method
    model = make_model(given, machine)
    if method == "nudged":
        nudge(model)
    elif method == "liger":
        liger.patch(model)
    elif method == "liger-kernel":
        with_liger_kernel(model)
    if given["family"] == "llama":
        methods.enable(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    vocabulary = model.config.vocab_size
    steps = 6 if machine.tiny else STEPS
    batches = text.batches(machine, vocabulary, steps, given["batch"], given["sequence"])
    generator = torch.Generator().manual_seed(2)
    class_weight = (0.5 + torch.rand(vocabulary, generator=generator)).to(machine.device)
    losses, backward = [], torch.Tensor.backward
    under_deepspeed = DEEPSPEED in cell.size
    if under_deepspeed:
        backward = deepspeed_backward(model, optimizer, machine, given["batch"], given["dtype"])
    context = liger.use_backend(training.backend(machine)) if method == "liger" else contextlib.nullcontext()
    with context:
        for tokens in batches:
            if given["weighted"]:
                loss = weighted_step(model, tokens, class_weight, WEIGHTED.get(method, _plain), backward)
            else:
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
            if not under_deepspeed:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
    return {"losses": torch.stack(losses).float().tolist()}


# --- report -------------------------------------------------------------------------------------------------


def gaps(result):
    """{size: {method: (mean, largest) difference of its losses from the unpatched model's}}"""
    found = {}
    for size in ordered(result, "size"):
        curves = {c["method"]: c["losses"] for c in cells_of(result, size=size) if c["status"] == "ok"}
        plain = curves.pop("transformers", None)
        if plain is None:
            continue
        found[size] = {}
        for method, losses in curves.items():
            apart = [abs(a - b) for a, b in zip(plain, losses, strict=True)]
            found[size][method] = sum(apart) / len(apart), max(apart)
    return found


def table(result):
    rows = []
    known = gaps(result)
    losses = {(c["size"], c["method"]): c for c in result["cells"].values()}
    others = [method for method in METHODS if method != "transformers"]
    for size in ordered(result, "size"):
        plain = losses.get((size, "transformers"))
        row = [size, f"{plain['losses'][0]:.3f} to {plain['losses'][-1]:.3f}" if size in known else ""]
        for method in others:
            if method in known.get(size, {}):
                mean, most = known[size][method]
                row.append(f"{mean:.1e}, {most:.1e}")
            else:
                row.append(tables.shape(losses.get((size, method))) or "")
        rows.append(row)
    return (
        "Mean and largest difference of the losses from the losses of the unpatched run; *nudged* is the yardstick.\n\n"
        + tables.markdown(["model", "loss, unpatched", *others], rows)
    )


def draw(result):
    return {"": pictures.loss_differences(result, "How far is a loss from the unpatched run?")}


EXPERIMENT = Experiment("E7", "Loss curves on real text", cells, measure, table, draw)
