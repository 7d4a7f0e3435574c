# SPDX-License-Identifier: BSD-3-Clause
"""Tiny Hugging Face models of several families, their batches on each rank, and some steps of training.

A test trains a model twice under the same wrapper, patched and not patched, and a float64 copy in one
process. Loss, gradients and weights of the patched model must be as near to float64 as in the model
that is not patched.
"""

import copy
from collections import Counter
from typing import NamedTuple

import ranks
import torch
import transformers

import liger
from liger.transformers import patch_report

VOCAB, HIDDEN, EXPERTS, IMAGE_TOKEN, TOKENS_PER_IMAGE = 300, 64, 8, 290, 4
# Sequences of different lengths on the ranks.
LENGTHS = (13, 9, 11, 6, 12, 8, 10, 7)
LEARNING_RATE, MOMENTUM = 0.01, 0.9
# Rounding of sums in another order, in units of the dtype; the least magnitude that errors are relative to,
# as a share of the largest tensor of a kind.
FLOOR, LEAST = 2, 1e-4
# The same for float32 on GPUs, where reductions across warps and split-K GEMMs change the order of every sum.
# A gradient of the first layer follows about 16 of them: two layers, forward and backward, of GEMMs, norms
# and attention. Their roundings are independent, so they add up to the square root of that number.
FLOOR_OF_GPU = 4

# Tensor parallelism spreads them over the ranks.
KV_HEADS = max(2, ranks.WORLD)
_TEXT = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2 * KV_HEADS, "num_key_value_heads": KV_HEADS, "head_dim": 16, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8, "vision_use_head": False,
}  # fmt: skip
_GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 5}
_MOE = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
# Of types with norms of queries and keys, in two layers.
_QK_NORMS = {"rope": 0, "qk_norm_rope": 2}
_COMMON = {"rope": 2, "fused_add_rms_norm": 2, "fused_linear_cross_entropy": 1}


class Family(NamedTuple):
    """``model`` and ``config``: classes of transformers; ``parts``: {kind: count} of what a patch
    replaces."""

    model: str
    config: str
    options: dict
    parts: dict
    experts: bool = False


FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {}, {**_QK_NORMS, "rms_norm": 9, "swiglu": 2}),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", _GEMMA, {"rms_norm": 9, "geglu": 2}),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", _GEMMA, {**_QK_NORMS, "rms_norm": 13, "geglu": 2}),
    "gemma3_vl": Family(
        "Gemma3ForConditionalGeneration", "Gemma3Config", _GEMMA,
        {**_QK_NORMS, "rms_norm": 14, "geglu": 2, "layer_norm": 5},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        {**_MOE, "num_experts": EXPERTS, "moe_intermediate_size": 48, "norm_topk_prob": True},
        {**_QK_NORMS, "rms_norm": 9, "experts": 2}, experts=True,
    ),
    "mixtral": Family(
        "MixtralForCausalLM", "MixtralConfig", {**_MOE, "num_local_experts": EXPERTS},
        {"rms_norm": 5, "experts": 2}, experts=True,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM", "GptOssConfig", {**_MOE, "num_local_experts": EXPERTS, "sliding_window": 5},
        {"rms_norm": 5, "experts": 2}, experts=True,
    ),
}  # fmt: skip
MOE = [name for name, family in FAMILIES.items() if family.experts]
# A layer with linear attention and one with full attention, which have one class in transformers.
HYBRID = {
    "qwen3_next": Family(
        "Qwen3NextForCausalLM", "Qwen3NextConfig",
        {
            **_MOE, "num_experts": EXPERTS, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
        {"rms_norm": 7, "rms_norm_gated": 1, "experts": 2, "swiglu": 2, "rope": 0, "qk_norm_rope": 1}, experts=True,
    ),
}  # fmt: skip
# The plain dense model: no norms of queries and keys, no tied head.
LLAMA = {"llama": Family("LlamaForCausalLM", "LlamaConfig", {}, {"rms_norm": 5, "swiglu": 2})}
ALL = {**FAMILIES, **HYBRID, **LLAMA}


def make(name, tied=None, device=ranks.DEVICE, **options):
    """The model of a family in training mode, float32, with the same weights for the same arguments.

    ``tied``: the lm_head has the weight of the embedding; None: as in the configuration of the family.
    ``options``: of that configuration.
    """
    family = ALL[name]
    settings = {**_TEXT, **family.options, **options}
    if tied is not None:
        settings["tie_word_embeddings"] = tied
    if name == "gemma3_vl":
        sizes = {"mm_tokens_per_image": TOKENS_PER_IMAGE, "image_token_index": IMAGE_TOKEN}
        settings = {"text_config": settings, "vision_config": dict(_VISION), **sizes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = getattr(transformers, family.model)(getattr(transformers, family.config)(**settings))
        fill(model, family.experts)
    return model.to(device).train()


@torch.no_grad()
def fill(model, experts):
    """Weights of norms and biases that are not trivial, and routers that choose experts by the id of a token.

    Choices that depend on rounding would make two correct models differ.
    """
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.1)
        elif experts and ("mlp.gate." in name or "mlp.router." in name):
            parameter.copy_(4 * torch.eye(EXPERTS, HIDDEN))
    if experts:
        weight, ids = model.get_input_embeddings().weight, torch.arange(VOCAB)
        weight[ids, ids % EXPERTS] = 3.0
        weight[ids, (ids + 1) % EXPERTS] = 2.0


def batch(name, step, rank, ignored=False, images=True):
    """The inputs of a rank at a step. Rows and lengths differ between ranks, and labels are ignored in part
    or all."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    length = LENGTHS[rank] + step
    ids = torch.randint(3, IMAGE_TOKEN, (2, length), generator=generator)
    if ALL[name].experts:
        # Tokens of rank 0 choose all experts but one, tokens of other ranks four of eight.
        ids = ids // EXPERTS * EXPERTS + ids % (EXPERTS - 2 if rank == 0 else 3)
    labels = ids.clone()
    labels[0, : 2 + step + 2 * rank] = -100
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    labels[mask == 0] = -100
    if ignored:
        labels.fill_(-100)
    inputs = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    if name == "gemma3_vl":
        inputs["token_type_ids"] = torch.zeros_like(ids)
        if images:
            where = slice(1, 1 + TOKENS_PER_IMAGE)
            ids[:, where], inputs["token_type_ids"][:, where] = IMAGE_TOKEN, 1
            labels[:, where] = -100
            inputs["pixel_values"] = torch.randn(2, 3, 32, 32, generator=generator)
    return inputs


def batches(name, steps=3, ignored_rank=None, text_rank=None, data_ranks=ranks.WORLD, **keywords):
    """``[{inputs of rank 0}, {of rank 1}, ...]`` of every step.

    Their denominator makes the average over ranks the mean over all tokens. ``ignored_rank`` has no valid
    label, ``text_rank`` no image; ``keywords``: of every call of the model. ``data_ranks``: how many ranks
    have a batch of their own, all by default; with tensor parallelism several ranks share one.
    """
    found = []
    for step in range(steps):
        of_ranks = [
            batch(name, step, rank, ignored=rank == ignored_rank, images=rank != text_rank)
            for rank in range(data_ranks)
        ]
        count = sum(int((inputs["labels"][:, 1:] != -100).sum()) for inputs in of_ranks)
        more = {"num_items_in_batch": count / data_ranks, "use_cache": False, **keywords}
        found.append([{**inputs, **more} for inputs in of_ranks])
    return found


def to(inputs, device, dtype=None):
    """The inputs on a device, floating-point tensors in a dtype."""
    return {
        name: value.to(device, dtype if value.is_floating_point() else None)
        if isinstance(value, torch.Tensor)
        else value
        for name, value in inputs.items()
    }


def optimizer_of(model):
    """Momentum is linear in the gradients: errors of weights are errors of gradients."""
    # foreach, the default on GPUs, takes no parameters of which some are DTensors.
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, foreach=False)


class Result(NamedTuple):
    """The losses of all steps, the gradients of the first and of the last step, and how the weights have
    changed."""

    losses: dict
    first: dict
    last: dict
    changes: dict


def result(losses, grads, before, after):
    """``grads``: of every step; a gradient may be None."""
    changes = {name: after[name].double() - before[name].double() for name in before}
    return Result(dict(enumerate(losses)), grads[0], grads[-1], changes)


def parameters_of(model):
    """(name in the model without wrappers, parameter) of each."""
    for name, parameter in model.named_parameters():
        yield name.replace("_checkpoint_wrapped_module.", "").removeprefix("module."), parameter


def weights_of(model):
    return {name: ranks.whole(p.detach().to(ranks.DEVICE)).clone() for name, p in parameters_of(model)}


def gradients_of(model):
    return {
        name: None if p.grad is None else ranks.whole(p.grad.to(ranks.DEVICE)).clone()
        for name, p in parameters_of(model)
    }


def in_float64(model):
    """A copy of a model that is not patched."""
    model = copy.deepcopy(model).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others refuse float64
    return model


def exactly(model, steps, data_ranks=ranks.WORLD):
    """The :class:`Result` of one process in float64, with the batches of all ranks."""
    model = in_float64(model)
    optimizer, losses, grads, before = optimizer_of(model), [], [], weights_of(model)
    for of_ranks in steps:
        optimizer.zero_grad()
        total = 0.0
        for inputs in of_ranks:
            loss = model(**to(inputs, ranks.DEVICE, torch.float64)).loss / data_ranks
            loss.backward()
            total += loss.detach()
        losses.append(total)
        grads.append(gradients_of(model))
        optimizer.step()
    return result(losses, grads, before, weights_of(model))


def assert_as_exact(ours, theirs, exact, dtype=torch.float32):
    """Losses, gradients and changes of weights are as near to float64 as in the model that is not
    patched.

    A tensor of ``ours`` may err three times as much (on a GPU, whose sums have no fixed order, four times) as
    the same tensor of ``theirs``, or as the median tensor of its kind. Where the one model has no gradient,
    neither has the other.
    """
    wrong = []
    for kind in Result._fields:
        wrong += [
            f"{kind} {line}" for line in _errors(*(getattr(r, kind) for r in (ours, theirs, exact)), dtype)
        ]
    assert not wrong, "\n".join(wrong)


def _errors(ours, theirs, exact, dtype):
    assert ours.keys() == theirs.keys() == exact.keys()
    for name in ours:
        if (ours[name] is None) != (theirs[name] is None):
            yield f"{name}: only {'the plain' if ours[name] is None else 'the patched'} model has a gradient"
    names = [name for name in ours if None not in (ours[name], theirs[name])]
    if not names:
        return
    # A gradient that float64 alone knows to be zero, such as the gradient of the bias of keys, is compared
    # with the others.
    goals = {name: theirs[name].new_zeros(()) if exact[name] is None else exact[name] for name in names}
    least = LEAST * max(goal.abs().max().item() for goal in goals.values())

    def error(value, goal):
        difference = (value.double() - goal.double()).abs().max().item()
        return difference / max(goal.abs().max().item(), least)

    units = FLOOR_OF_GPU if ranks.ON_GPU and dtype == torch.float32 else FLOOR
    errors = {name: error(theirs[name], goals[name]) for name in names}
    median = sorted(errors.values())[len(errors) // 2]
    for name in names:
        found = error(ours[name], goals[name])
        allowed = (4 if ranks.ON_GPU else 3) * max(errors[name], median)
        allowed += units * torch.finfo(dtype).eps
        if not found <= allowed:
            yield f"{name}: error {found:.3g}, allowed {allowed:.3g}"


def patched(model, name, parts=None, **options):
    """Patches a model; ``parts``: counts that differ from the family's, because of the options."""
    liger.patch(model, **options)
    assert_patched(model, name, parts)
    return model


def assert_patched(model, name, parts=None):
    """The report has every part of the family, perhaps LoRA layers, and no module that was left as before."""
    report = patch_report(model)
    assert not report.left
    expected = {**_COMMON, **ALL[name].parts, **(parts or {})}
    if "tiled_mlp" in expected:
        del expected[next(kind for kind in ("swiglu", "geglu") if kind in expected)]
    found = Counter(kind for kind in report.replaced.values() if kind != "lora_linear")
    assert found == {kind: n for kind, n in expected.items() if n}


class Choices:
    """How many tokens each expert of a model got in the last call; ``idle`` is whether some expert got
    none."""

    def __init__(self, model):
        self.indices = []
        for module in model.modules():
            if type(module).__name__.endswith("Experts"):
                module.register_forward_pre_hook(self._record)

    def _record(self, module, args):
        self.indices.append(args[1].detach())

    @property
    def idle(self):
        return all(len(index.unique()) < EXPERTS for index in self.indices) and len(self.indices) > 0
