# SPDX-License-Identifier: BSD-3-Clause
"""What patching touches and what it does not: instances, classes, globals, copies, pickles, and the way
back."""

import gc
import inspect
import threading

import pytest
import torch
from torch import nn

import liger

transformers = pytest.importorskip("transformers")

from tiny_models import FAMILIES, VOCAB, assert_same_step, batch, config, make, step, twin  # noqa: E402

import liger.transformers as lt  # noqa: E402
from liger.transformers.head import loss_call  # noqa: E402


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(autouse=True)
def _reverted():
    yield
    lt.unpatch_future()


def results(model):
    """Everything a step shows, bit by bit."""
    output, grads = step(model, **batch())
    return [output.loss, output.logits, *grads.values()]


def same(a, b):
    return len(a) == len(b) and all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def is_patched(model):
    return any("_liger_recipe" in type(module).__dict__ for module in model.modules())


def attributes(owner):
    """What stands in a module or a class, without what Python, copy and transformers cache there."""
    caches = "__slotnames__", "__warningregistry__"
    return {k: v for k, v in vars(owner).items() if k not in caches and not k.endswith("_cached_value")}


def snapshot(modeling):
    """The globals of a modeling module, and the attributes of its classes."""
    names = {name: value for name, value in attributes(modeling).items() if not name.startswith("_liger")}
    return names, {name: attributes(value) for name, value in names.items() if inspect.isclass(value)}


# --- only this model ----------------------------------------------------------------------------------------


def test_other_models_and_torch_are_untouched(family):
    modeling = inspect.getmodule(type(make(family)))
    other = make(family)
    before, names = results(other), snapshot(modeling)
    owners = nn, nn.functional, nn.Linear, nn.CrossEntropyLoss, nn.Module
    torch_names = [attributes(owner) for owner in owners]
    model = make(family)
    results(liger.patch(model))
    assert snapshot(modeling) == names
    assert [attributes(owner) for owner in owners] == torch_names
    assert not is_patched(other) and same(results(other), before)
    assert not is_patched(make(family))


def test_patching_takes_no_random_numbers():
    model = make("llama")
    torch.manual_seed(5)
    liger.patch(model)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_hooks_are_kept_and_called():
    model, calls = make("llama"), []
    names = ["lm_head", "model.norm", "model.layers.0.mlp", "model.layers.1.self_attn"]
    for name in names:
        module = model.get_submodule(name)
        module.register_forward_hook(lambda *_, n=name: calls.append(n))
        module.register_full_backward_hook(lambda *_, n=name: calls.append(f"backward {n}"))
    step(liger.patch(model), **batch())
    assert sorted(calls) == sorted([*names, *(f"backward {name}" for name in names)])


@pytest.mark.covering(1)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", ["llama", "Gemma2"])
def test_a_hook_that_changes_the_logits_acts_on_logits(family, compiled, caplog):
    """As of a mask of some classes, or a watermark: the head returns logits then."""
    loss_call.warn_about_head.cache_clear()
    plain = make(family)
    models = plain, liger.patch(twin(plain))
    shift = torch.linspace(-1, 2, VOCAB)
    for model in models:
        model.lm_head.register_forward_hook(lambda module, args, output: 2 * output + shift)
    expected = step(plain, **batch())
    found = step(torch.compile(models[1], backend="eager") if compiled else models[1], **batch())
    if compiled:
        found = found[0], {name.removeprefix("_orig_mod."): grad for name, grad in found[1].items()}
    assert_same_step(found, expected)
    if not compiled:
        assert "may change the logits: the loss is computed from full logits" in caplog.text


def hook_of_the_head(register):
    """A hook for which ``register`` is the method of a module, or a function for hooks of all modules."""

    def add(model, seen):
        if "pre" in register:
            hook = lambda module, grads: seen.append((module, *grads))  # noqa: E731
        elif "backward" in register:
            hook = lambda module, grads_in, grads: seen.append((module, *grads))  # noqa: E731
        else:
            hook = lambda module, args, output: seen.append((module, output))  # noqa: E731
        everywhere = getattr(nn.modules.module, register, None)
        return getattr(model.lm_head, register)(hook) if everywhere is None else everywhere(hook)

    return add


@pytest.mark.filterwarnings("ignore:.*[Bb]ackward hook")
@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_module_forward_hook",
        "register_module_full_backward_hook",
        "register_module_full_backward_pre_hook",
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_hooks_of_the_head_see_logits_and_their_gradient(register, wrapped, caplog):
    """Also hooks of all modules, and hooks of PEFT's wrapper for ``modules_to_save``."""
    loss_call.warn_about_head.cache_clear()
    plain = make("llama")
    if wrapped:
        peft = pytest.importorskip("peft")
        plain = peft.get_peft_model(
            plain, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
        ).base_model.model
    models, results, found = (plain, liger.patch(twin(plain))), [], []
    for model in models:
        seen = []
        handle = hook_of_the_head(register)(model, seen)
        results.append(step(model, **batch()))
        handle.remove()
        found.append([tensor for module, tensor, *_ in seen if module is model.lm_head])
    assert_same_step(results[1], results[0])
    assert len(found[0]) == len(found[1]) == 1
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-7)
    assert "its head" in caplog.text and "the loss is computed from full logits" in caplog.text
    assert models[1](**batch()).logits is None


def test_patching_again_replaces_the_options():
    model = liger.patch(make("llama"))
    liger.patch(model, rope=False, swiglu=False, fused_linear_cross_entropy=False, fused_add_rms_norm=False)
    assert set(lt.patch_report(model).replaced.values()) == {"rms_norm"}
    assert type(model.lm_head) is nn.Linear
    none = dict.fromkeys(("rope", "rms_norm", "swiglu", "geglu", "fused_linear_cross_entropy"), False)
    assert not is_patched(liger.patch(model, **none))


def test_threads_do_not_mix_their_losses():
    """A second thread that wants logits, while the first is inside a call that wants its loss."""
    model = liger.patch(make("llama"))
    hidden, seen = torch.randn(1, 3, 64), []

    def while_labels_are_active(*_):
        thread = threading.Thread(target=lambda: seen.append(model.lm_head(hidden)))
        thread.start()
        thread.join()

    model.model.norm.register_forward_hook(while_labels_are_active)
    model(**batch())
    assert seen[0].shape == (1, 3, VOCAB)


def test_a_model_inside_another_keeps_its_own_labels():
    teacher, student = liger.patch(make("qwen2")), liger.patch(make("llama"))
    expected = student(**batch()).loss
    student.model.register_forward_hook(lambda *_: teacher(**batch(tokens=5)) and None)
    assert torch.equal(student(**batch()).loss, expected)


def test_bad_arguments():
    with pytest.raises(ValueError, match="nothing in Linear can be patched as asked; looked for"):
        liger.patch(nn.Linear(3, 4))
    for function in (
        liger.patch,
        liger.unpatch,
        liger.transformers.patch_report,
        liger.transformers.checkpoint,
    ):
        with pytest.raises(
            TypeError, match=rf"{function.__name__} expects a torch.nn.Module, not LlamaConfig"
        ):
            function(config("llama"))
    with pytest.raises(TypeError, match="reglu"):
        liger.patch(make("llama"), reglu=True)


# --- copies and files ---------------------------------------------------------------------------------------


def test_save_pretrained(tmp_path, family):
    plain = make(family)
    model = liger.patch(twin(plain))
    model.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path, attn_implementation="eager").train()
    assert type(loaded) is type(plain) and loaded.config.architectures == [type(plain).__name__]
    assert same(results(loaded), results(plain))


def _parameters_alive():
    # By type(): isinstance() would ask weak proxies that other tests left behind, and proxies of dead objects
    # raise.
    return sum(issubclass(type(o), nn.Parameter) for o in gc.get_objects())


def test_no_reference_outlives_the_model():
    model = liger.patch(make("llama"))
    results(model)
    before = _parameters_alive()
    count = len(list(model.parameters()))
    del model
    gc.collect()
    assert _parameters_alive() <= before - count


# --- models made later --------------------------------------------------------------------------------------


def test_models_made_later(family):
    before = make(family)
    lt.patch_future(family)
    model = make(family)
    assert not is_patched(before) and is_patched(model)
    rope = "qk_norm_rope" if family == "qwen3" else "rope"
    assert set(lt.patch_report(model).replaced.values()) == {
        rope, "rms_norm", "swiglu", "fused_add_rms_norm", "fused_linear_cross_entropy",
    }  # fmt: skip
    assert_same_step(step(model, **batch()), step(before, **batch()))
    assert not is_patched(make("qwen2" if family == "llama" else "llama"))
    others = dict(rope=False, rms_norm=False, mlp=False, fused_linear_cross_entropy=False)
    lt.patch_future(family, **others, cross_entropy=True)
    assert set(lt.patch_report(make(family)).replaced.values()) == {"cross_entropy"}
    lt.patch_future(family, **others, rms_norm_gated=False, layer_norm=False, relu_squared=False, gelu=False)
    assert not is_patched(make(family)) and is_patched(model)


def test_unpatch_future_restores_the_class(family):
    base = next(c for c in type(make(family)).__mro__ if transformers.PreTrainedModel in c.__bases__)
    before = attributes(base)
    other = "qwen2" if family == "llama" else "llama"
    lt.patch_future(family)
    lt.patch_future(other)
    assert attributes(base) != before
    lt.unpatch_future(family)
    assert attributes(base) == before and is_patched(make(other))
    lt.unpatch_future()
    assert not is_patched(make(other))


def test_later_models_load_checkpoints(tmp_path):
    plain = make("llama")
    plain.save_pretrained(tmp_path)
    lt.patch_future("llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").train()
    assert is_patched(model)
    assert_same_step(step(model, **batch()), step(plain, **batch()))


@pytest.mark.parametrize("options", [{}, {"tiled_mlp": True}], ids=str)
@pytest.mark.parametrize(("model_type", "settings"), [("llama", {}), ("Mixtral", {"num_local_experts": 4})])
def test_hooks_of_activations_are_called(model_type, settings, options):
    """Of activations that an op contains; a hook may come after the patch."""
    plain = make(model_type, **settings)
    patched = liger.patch(twin(plain), **options)
    unhooked = step(twin(plain), **batch())[0]["loss"]
    for model in (plain, patched):
        (module, *_) = [m for m in model.modules() if hasattr(m, "act_fn")]
        module.act_fn.register_forward_hook(lambda module, args, output: 2 * output)
    ours, theirs = step(patched, **batch()), step(plain, **batch())
    assert not torch.equal(theirs[0]["loss"], unhooked)
    assert_same_step(ours, theirs)
