# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of patched models with other packages share: tiny models of several types, and training
beside a twin.

The sizes of the models are multiples of 64, the block size of quantisation in 4 bits.
"""

import collections
import functools
import tempfile

import pytest
import torch
import transformers
from tiny_models import assert_same_step, fill, step

import liger.transformers as lt
from model_scan import inputs
from model_scan.configs import tiny_config

CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
}
# A dense model, one with images and a mixture of experts run in a quick run.
QUICK = ("qwen3", "gemma3", "mixtral")


def types(*names):
    """Model types as parameters of a test: of all, or of those that are named. Few run in a quick run."""
    marked = {name: () if name in QUICK else (pytest.mark.slow,) for name in names or CLASSES}
    return [pytest.param(name, marks=marks) for name, marks in marked.items()]


TYPES = types()
IMAGES = ("gemma3", "qwen2_5_vl", "llava")
EXPERTS = ("qwen3_moe", "mixtral")
SIZES = {"intermediate_size": 128, "moe_intermediate_size": 64}
# Kinds that patching replaces in the language model of every type, besides the MLP or the experts. Where
# queries and keys have norms, the rotation is a part of "qk_norm_rope".
COMMON = {"fused_linear_cross_entropy", "fused_add_rms_norm", "rope", "rms_norm"}

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Where a module is patched in relation to what another package does with it.
ORDERS = ["patch first", "patch last"]


def tiny(model_type, device="cpu", **settings):
    """A tiny model in float32 and in training mode, with the same weights for the same arguments."""
    config = tiny_config(model_type)
    for part in (config, *(v for v in vars(config).values() if isinstance(v, transformers.PretrainedConfig))):
        for name, size in SIZES.items():
            if hasattr(part, name):
                setattr(part, name, size)
    for name, value in settings.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = getattr(transformers, CLASSES[model_type])(config).float()
        fill(model)
        for name, parameter in model.named_parameters():
            # The projection of images of Gemma 3 is zero in a new model.
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.05)
            # A bias of all keys changes no attention weight: its gradient is rounding alone.
            if name.endswith("k_proj.bias"):
                parameter.requires_grad_(False)
    return model.to(device).train()


@functools.cache
def _cpu_inputs(model_type):
    model = tiny(model_type)
    return inputs.image_batch(model) if model_type in IMAGES else inputs.text_batch(model)


def inputs_of(model_type, device="cpu"):
    """Tokens with labels, and images for the types that take them."""
    found = _cpu_inputs(model_type)
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in found.items()}


@functools.cache
def _folder():
    return tempfile.TemporaryDirectory(prefix="liger-combinations-")


@functools.cache
def checkpoint(model_type, **settings):
    """The path of a saved tiny model."""
    path = f"{_folder().name}/{model_type}-{'-'.join(f'{n}={v}' for n, v in settings.items())}"
    tiny(model_type, **settings).save_pretrained(path)
    return path


def load(model_type, quantization_config=None, device="cpu", settings=None, **keywords):
    """A tiny model in float32 that transformers has loaded from a checkpoint, and perhaps quantised."""
    return getattr(transformers, CLASSES[model_type]).from_pretrained(
        checkpoint(model_type, **(settings or {})),
        quantization_config=quantization_config,
        dtype=torch.float32,
        device_map=device,
        **keywords,
    )


def lora(model, *targets, **settings):
    """The model with adapters whose B is not zero, the same at every call with the same arguments."""
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=list(targets), **settings)
    return adapted(model, config)


def adapted(model, config):
    """The model with adapters of PEFT whose parameters are not zero, in training mode."""
    import peft

    torch.manual_seed(11)
    wrapped = peft.get_peft_model(model, config).train()
    for parameter in wrapped.parameters():
        if parameter.requires_grad and not parameter.any():
            torch.nn.init.normal_(parameter.data, std=0.05)
    return wrapped


def targets_of(model_type):
    """The linear layers of a model that have adapters in the tests. Experts are no linear layers."""
    attention = ("q_proj", "v_proj")
    return attention if model_type in EXPERTS else (*attention, "gate_proj", "down_proj")


def seeded_step(model, given):
    """({"loss": loss}, gradients), on the CPU, of a step whose dropout is drawn from the same seed at every
    call."""
    torch.manual_seed(4)
    output, gradients = step(model, **given)
    return {"loss": output["loss"].detach().cpu()}, {name: g.cpu() for name, g in gradients.items()}


def assert_same_training(ours, theirs, given, steps=3, make_optimizer=None, weights=1e-3):
    """Loss and gradients of the first step agree within a few roundings, later losses and the trained weights
    too.

    Args:
        make_optimizer: function of the trained parameters; SGD by default, which does not amplify roundings.
        weights: bound of the difference of each trained weight, relative to its change, in the Frobenius
            norm.
    """
    make_optimizer = make_optimizer or functools.partial(torch.optim.SGD, lr=0.1)
    _, gradients = seeded_step(theirs, given)
    # The last layer of the vision tower of LLaVA has no part in the result.
    before = {n: p.detach().to("cpu", copy=True) for n, p in theirs.named_parameters() if n in gradients}
    optimizers = [make_optimizer([p for p in m.parameters() if p.requires_grad]) for m in (ours, theirs)]
    for number in range(steps):
        results = [seeded_step(model, given) for model in (ours, theirs)]
        if number == 0:
            assert_same_step(*results)
        torch.testing.assert_close(results[0][0]["loss"], results[1][0]["loss"], rtol=1e-4, atol=0)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_weights(ours, theirs, before, weights)


def assert_same_weights(ours, theirs, before, bound):
    """Every weight in ``before``, on the CPU, has changed, by the same difference in both models."""
    found, expected = dict(ours.named_parameters()), dict(theirs.named_parameters())
    for name, old in before.items():
        our, their = found[name].detach().cpu(), expected[name].detach().cpu()
        change, difference = (their - old).norm().item(), (our - their).norm().item()
        assert change > 0, f"{name} was not trained"
        rounding = 1e-7 * their.norm().item()
        assert difference <= bound * change + rounding, f"{name}: {difference / change:.1e} of its change"


def kinds(model):
    """How many modules of each kind run on liger, without the layers of LoRA; fails if another module of a
    known kind was left alone."""
    report, modules = lt.patch_report(model), dict(model.named_modules())
    left = {name: reason for name, reason in report.left.items() if not hasattr(modules[name], "lora_A")}
    assert left == {}, left
    return collections.Counter(kind for kind in report.replaced.values() if kind != "lora_linear")


def has_common_parts(model):
    found = {"rope" if kind == "qk_norm_rope" else kind for kind in kinds(model)}
    return found >= COMMON


def assert_replaced(model, like):
    """The parts that are replaced are the parts of a patched model without the other package."""
    assert kinds(model) == kinds(like) and has_common_parts(model)


def generated(model, given):
    """The tokens that a model generates."""
    prompt = {name: value for name, value in given.items() if name != "labels"}
    model.eval()
    with torch.no_grad():
        tokens = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    return tokens


def assert_same_generation(ours, theirs, given):
    assert torch.equal(generated(ours, given), generated(theirs, given))


def loss_of(model, given):
    """The loss in evaluation."""
    with torch.no_grad():
        return model.eval()(**given)["loss"]
