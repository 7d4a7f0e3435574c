# SPDX-License-Identifier: BSD-3-Clause
"""Models that accelerate spreads over devices: its hooks load offloaded weights, and move inputs between
devices."""

import pytest
import torch
from torch import nn

import liger

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from accelerate import hooks  # noqa: E402
from called_ops import CalledOps  # noqa: E402
from combinations import (  # noqa: E402
    CLASSES,
    COMMON,
    ORDERS,
    TYPES,
    assert_same_generation,
    assert_same_training,
    checkpoint,
    has_common_parts,
    inputs_of,
    kinds,
    load,
    lora,
    loss_of,
    seeded_step,
    tiny,
    types,
)
from tiny_models import assert_same_step  # noqa: E402

import liger.transformers as lt  # noqa: E402
from liger.nn import TiledSwiGLUMLP  # noqa: E402
from liger.transformers.recipe import classes  # noqa: E402

TEXTS = types("qwen3", "gemma3_text", "mixtral")


def parts_of(model):
    """The names of the modules that a device map places: the layers of the language model, and what is beside
    them."""
    layers = next(n for n, m in model.named_modules() if n.endswith("layers") and "vision" not in n)
    found, parent = [f"{layers}.0", f"{layers}.1"], layers.rpartition(".")[0]
    for prefix in (*(parent.split(".")[:n] for n in range(parent.count(".") + 2)),):
        inner = model.get_submodule(".".join(prefix))
        names = [".".join((*prefix, name)) for name, _ in inner.named_children()]
        found += [name for name in names if not (layers + ".").startswith(name + ".")]
    return found


def device_map(model, default, **others):
    """Every part on one device, except those whose name contains a key of ``others``."""
    return {
        part: next((where for key, where in others.items() if key in part), default)
        for part in parts_of(model)
    }


def dispatched(model, folder, order, default="cpu", options=(), **others):
    if order == "patch first":
        liger.patch(model, **dict(options))
    places = device_map(model, default, **others)
    main = next((place for place in places.values() if place not in ("cpu", "disk")), "cpu")
    model = accelerate.dispatch_model(
        model, device_map=places, main_device=main, offload_dir=str(folder), force_hooks=True
    )
    return liger.patch(model, **dict(options)) if order == "patch last" else model


OFFLOADED = {
    "a layer": {"layers.1": "disk"},
    "the head": {"lm_head": "disk", "norm": "disk"},
    # nn.MultiheadAttention in a vision tower reads a weight of a submodule, which hooks do not load for it.
    "everything": {"vision_tower": "cpu", "": "disk"},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("where", OFFLOADED)
@pytest.mark.parametrize("model_type", TYPES)
def test_weights_on_the_disk(model_type, where, order, tmp_path):
    """They are there only inside the call of the module that has them."""
    plain, ours = tiny(model_type), tiny(model_type).eval()
    ours = dispatched(ours, tmp_path, order, **OFFLOADED[where])
    assert any(p.is_meta for p in ours.parameters())
    assert kinds(ours) == kinds(liger.patch(tiny(model_type)))
    given = inputs_of(model_type)
    torch.testing.assert_close(loss_of(ours, given), loss_of(plain, given), rtol=1e-5, atol=0)
    with torch.no_grad():
        skipped = ours(**given, skip_logits=True)
    assert skipped.logits is None
    torch.testing.assert_close(skipped.loss, loss_of(plain, given), rtol=1e-5, atol=0)
    assert_same_generation(ours, plain, given)


@pytest.mark.parametrize("order", ORDERS)
def test_tiled_mlps_on_the_disk(order, tmp_path):
    options = {"tiled_mlp": True, "tiled_mlp_num_shards": 3}
    ours = dispatched(tiny("llama"), tmp_path, order, options=options, layers="disk")
    given = inputs_of("llama")
    assert kinds(ours)["tiled_mlp"] == 2
    torch.testing.assert_close(loss_of(ours, given), loss_of(tiny("llama"), given), rtol=1e-5, atol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", TEXTS)
def test_from_pretrained_with_a_device_map(model_type, tied, tmp_path):
    settings = {"tie_word_embeddings": tied}
    plain = load(model_type, settings=settings)
    # A tied head has the device of the embedding.
    places = device_map(plain, "disk", embed_tokens="cpu", **({"lm_head": "cpu"} if tied else {}))
    cls = getattr(transformers, CLASSES[model_type])
    ours = cls.from_pretrained(
        checkpoint(model_type, **settings), device_map=places, offload_folder=str(tmp_path)
    )
    liger.patch(ours)
    assert any(p.is_meta for p in ours.parameters()) and has_common_parts(ours)
    given = inputs_of(model_type)
    torch.testing.assert_close(loss_of(ours, given), loss_of(plain, given), rtol=1e-5, atol=0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_type", TEXTS)
def test_training_behind_hooks(model_type, order, tmp_path):
    plain, ours = tiny(model_type), dispatched(tiny(model_type), tmp_path, order)
    assert_same_training(ours, plain, inputs_of(model_type))


def ops_of_liger(model, given):
    with CalledOps() as ops:
        model(**given).loss.backward()
    return sorted(name for name in ops.full_names if name.startswith("liger::"))


@pytest.mark.covering(1)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("options", [{}, {"tiled_mlp": True}], ids=["", "tiled"])
@pytest.mark.parametrize("model_type", TEXTS)
def test_every_op_runs_behind_hooks_that_move_nothing(model_type, options, order, tmp_path):
    """accelerate puts hooks on every module that has weights where a model is spread over several devices."""
    ours, given = dispatched(tiny(model_type), tmp_path, order, options=options), inputs_of(model_type)
    assert ops_of_liger(ours, given) == ops_of_liger(liger.patch(tiny(model_type), **options), given)


def test_a_tiled_mlp_behind_hooks_that_move_nothing():
    module, x = (
        TiledSwiGLUMLP.from_config(tiny("llama").config),
        torch.randn(5, tiny("llama").config.hidden_size),
    )
    expected = module(x)
    for projection in module.children():
        hooks.add_hook_to_module(projection, hooks.AlignDevicesHook("cpu"))
    with CalledOps() as ops:
        assert torch.equal(module(x), expected)
    assert "liger::tiled_mlp_forward" in ops.full_names


def test_which_hooks_move_nothing():
    x = torch.randn(2, 4)

    def is_plain(hook=None, forward=None):
        norm = nn.LayerNorm(4)
        if hook is not None:
            hooks.add_hook_to_module(norm, hook)
        if forward is not None:
            norm.forward = forward
        return classes.is_called_plainly(norm, x)

    assert is_plain() and is_plain(hooks.AlignDevicesHook("cpu"))
    assert not is_plain(hooks.AlignDevicesHook("meta"))
    assert not is_plain(hooks.AlignDevicesHook(None))
    assert not is_plain(hooks.AlignDevicesHook("cpu", io_same_device=True))
    assert not is_plain(hooks.AlignDevicesHook("cpu", offload=True))
    assert not is_plain(hooks.ModelHook())
    assert not is_plain(hooks.SequentialHook(hooks.AlignDevicesHook("cpu")))
    assert not is_plain(hooks.AlignDevicesHook("cpu"), forward=lambda x: x)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_type", TEXTS)
def test_hooks_that_were_removed(model_type, order, tmp_path):
    """accelerate leaves the forward of the class as an attribute of each module."""
    plain, ours = tiny(model_type), dispatched(tiny(model_type), tmp_path, order)
    hooks.remove_hook_from_submodules(ours)
    assert any("forward" in module.__dict__ for module in ours.modules())
    expected, given = kinds(liger.patch(tiny(model_type))), inputs_of(model_type)
    assert kinds(ours) == expected and ours(**given).logits is None
    liger.unpatch(ours)
    assert not lt.patch_report(ours).replaced
    assert torch.equal(ours(**given).logits, plain(**given).logits)
    liger.patch(ours)
    assert kinds(ours) == expected
    assert_same_step(seeded_step(ours, given), seeded_step(plain, given))


def test_hooks_removed_before_patching(tmp_path):
    plain, ours = tiny("llama"), dispatched(tiny("llama"), tmp_path, None)
    hooks.remove_hook_from_submodules(ours)
    liger.patch(ours, tiled_mlp=True, tiled_mlp_num_shards=3)
    assert kinds(ours).keys() == (COMMON | {"tiled_mlp"})
    given = inputs_of("llama")
    assert_same_step(seeded_step(ours, given), seeded_step(plain, given))


def test_the_wrapper_of_accelerator_prepare_that_was_removed():
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    ours = accelerator.unwrap_model(
        accelerator.prepare_model(liger.patch(tiny("llama"))), keep_fp32_wrapper=False
    )
    assert "forward" in ours.__dict__ and kinds(ours)["fused_linear_cross_entropy"]
    liger.unpatch(ours)
    given, plain = inputs_of("llama"), tiny("llama")
    assert torch.equal(ours(**given).logits, plain(**given).logits)
    assert kinds(liger.patch(ours))["fused_linear_cross_entropy"]
    assert_same_step(seeded_step(ours, given), seeded_step(plain, given))


def test_patched_without_weights():
    plain = tiny("qwen3")
    with accelerate.init_empty_weights():
        ours = transformers.Qwen3ForCausalLM(plain.config)
    ours = accelerate.load_checkpoint_and_dispatch(
        liger.patch(ours), checkpoint("qwen3"), device_map={"": "cpu"}
    )
    assert_same_training(ours.train(), plain, inputs_of("qwen3"))


# --- on GPUs ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("part", ["layers.1", "lm_head", "layers"])
@pytest.mark.parametrize("model_type", [*TEXTS, "gemma3"])
def test_weights_offloaded_to_the_cpu(model_type, part, order, tmp_path):
    plain, ours = tiny(model_type, "cuda"), tiny(model_type).eval()
    ours = dispatched(ours, tmp_path, order, default=0, **{part: "cpu"})
    given = inputs_of(model_type, "cuda")
    assert has_common_parts(ours)
    torch.testing.assert_close(loss_of(ours, given), loss_of(plain, given), rtol=1e-5, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(
            ours(**given, skip_logits=True).loss, loss_of(plain, given), rtol=1e-5, atol=0
        )
    assert_same_generation(ours, plain, given)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_type", [*TEXTS, "gemma3"])
def test_two_gpus(model_type, order, tmp_path):
    """Inputs and labels are on the first GPU, the last layer and the head on the second.

    A tied head is on the first, as in a map of accelerate: it ties the two again after it has moved them, so
    they have one device, and the hook of the embedding must send the tokens there.
    """
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    plain = tiny(model_type, "cuda")
    tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    places = {"layers.1": 1, "norm": 1, "lm_head": 0 if tied else 1}
    ours, unpatched = (dispatched(tiny(model_type), tmp_path, o, default=0, **places) for o in (order, None))
    assert not lt.patch_report(unpatched).replaced
    for model in (ours, unpatched):
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        assert (head.device.index, embedding.device.index) == (places["lm_head"], 0)
    given = inputs_of(model_type, "cuda")
    expected = seeded_step(plain, given)
    assert_same_step(seeded_step(unpatched, given), expected)
    assert_same_step(seeded_step(ours, given), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", TEXTS)
def test_device_map_auto(model_type):
    pytest.importorskip("peft")
    ours = liger.patch(load(model_type, device="auto"))
    assert has_common_parts(ours)
    ours, theirs = (lora(m, "q_proj", init_lora_weights=False) for m in (ours, load(model_type, device=0)))
    assert_same_training(ours, theirs, inputs_of(model_type, "cuda"))
