# SPDX-License-Identifier: BSD-3-Clause
"""Every option of liger.patch can be given wherever liger_kernel patches a model, with the same default."""

import dataclasses

import pytest
import tiny_models
import torch

transformers = pytest.importorskip("transformers")

import liger  # noqa: E402
from liger.compat.patching import functions as compat  # noqa: E402
from liger.compat.patching.architectures import LOSS_FROM_LOGITS, OPEN, PARAMETERS  # noqa: E402
from liger.transformers.patching.options import LOSSES, NAMES, Options  # noqa: E402
from liger.transformers.recipe.classes import recipe_of  # noqa: E402

DEFAULTS = dataclasses.asdict(Options())
# What an option needs besides itself.
NEEDED = {
    "tiled_mlp_num_shards": {"tiled_mlp": True},
    "accumulate_grad_weight": {"cross_entropy": False, "fused_linear_cross_entropy": True},
    "cross_entropy": {"fused_linear_cross_entropy": False},
    "fused_linear_cross_entropy": {"cross_entropy": False},
}


def other_value(name):
    return {"mlp": False, "tiled_mlp_num_shards": 2}.get(name, not DEFAULTS[name])


@pytest.fixture
def asked(monkeypatch):
    """The options of the patches since, which are not carried out."""
    found = []
    monkeypatch.setattr(compat, "_patch_instance", lambda model, options: found.append(Options(**options)))
    monkeypatch.setattr(compat, "hook", lambda model_type, options: found.append(options))
    return found


@pytest.mark.parametrize("model", [None, torch.nn.Linear(1, 1)], ids=["later", "one"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_every_function(asked, name, model):
    function = getattr(compat, f"apply_liger_kernel_to_{name}")
    function(model=model)
    default = dataclasses.asdict(asked.pop())
    losses = {loss: default.pop(loss) for loss in LOSSES}
    assert default == {option: value for option, value in DEFAULTS.items() if option not in LOSSES}
    from_logits, has_loss = name in LOSS_FROM_LOGITS, "cross_entropy" in PARAMETERS[name]
    assert tuple(losses.values()) == (from_logits, has_loss and not from_logits)
    for option in NAMES:
        # Where liger_kernel's default is another loss, that loss is the other value.
        value = not losses[option] if option in LOSSES else other_value(option)
        function(model=model, **{**NEEDED.get(option, {}), option: value})
        assert getattr(asked.pop(), option) == value, option
    if name not in OPEN:
        with pytest.raises(TypeError, match=f"{function.__name__}: .*'unknown'.*expected .*recompute"):
            function(unknown=True)


@pytest.mark.parametrize("model_type", ["llama", "stablelm"])
def test_every_option_of_one_instance(asked, model_type):
    """Also of a type that liger_kernel does not know."""
    model = torch.nn.Linear(1, 1)
    model.config = type("Config", (), {"model_type": model_type})
    compat._apply_liger_kernel_to_instance(model=model, unknown=True)
    assert dataclasses.asdict(asked.pop()) == DEFAULTS
    for option in NAMES:
        given = {**NEEDED.get(option, {}), option: other_value(option)}
        compat._apply_liger_kernel_to_instance(model=model, **given)
        assert getattr(asked.pop(), option) == other_value(option), option


def recipes(model):
    """What each module was replaced by, apart from the arguments that the model takes."""
    found = {name: recipe_of(module) for name, module in model.named_modules()}
    return {
        name: dataclasses.replace(recipe, like_liger_kernel=False)
        if hasattr(recipe, "like_liger_kernel")
        else recipe
        for name, recipe in found.items()
    }


def one(**options):
    model = tiny_models.make("llama")
    compat.apply_liger_kernel_to_llama(model=model, **options)
    return model


def instance(**options):
    model = tiny_models.make("llama")
    compat._apply_liger_kernel_to_instance(model=model, **options)
    return model


def later(**options):
    compat.apply_liger_kernel_to_llama(**options)
    try:
        return tiny_models.make("llama")
    finally:
        compat.apply_liger_kernel_to_llama(**dict.fromkeys(PARAMETERS["llama"][:-1], False))


def auto(**options):
    from liger_kernel.transformers import AutoLigerKernelForCausalLM

    return AutoLigerKernelForCausalLM.from_config(tiny_models.config("llama"), **options)


@pytest.mark.parametrize("make", [one, instance, later, auto], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "options", [{}, {"recompute": True}, {"recompute": False, "inplace": False}], ids=str
)
def test_the_modules_are_those_of_liger_patch(make, options):
    assert recipes(make(**options)) == recipes(liger.patch(tiny_models.make("llama"), **options))


# --- arguments of the model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_shift_labels_without_labels(training):
    """The loss; a model that liger.patch has patched returns none, as transformers' model does."""
    batch = tiny_models.batch()
    ids = batch["input_ids"]
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    plain = tiny_models.make("llama").train(training)
    expected = plain(input_ids=ids, labels=ids)
    for model in (one(), later()):
        model.train(training)
        output = model(input_ids=ids, shift_labels=shifted)
        torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-6)
        assert (output.logits is None) == training
        by_position = model(ids, None, None, None, None, None, shift_labels=shifted)
        assert torch.equal(by_position.loss, output.loss)
    ours = liger.patch(tiny_models.make("llama")).train(training)(input_ids=ids, shift_labels=shifted)
    theirs = plain(input_ids=ids, shift_labels=shifted)
    assert ours.loss is None and theirs.loss is None
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)


def test_skip_logits_without_labels():
    """transformers' Trainer passes it where it computes the loss from the logits itself."""
    ids = tiny_models.batch()["input_ids"]
    output = one()(input_ids=ids, skip_logits=True)
    assert output.loss is None
    torch.testing.assert_close(
        output.logits, tiny_models.make("llama")(input_ids=ids).logits, rtol=1e-4, atol=1e-5
    )
    with pytest.raises(ValueError, match="skip_logits=True needs labels"):
        liger.patch(tiny_models.make("llama"))(input_ids=ids, skip_logits=True)
