# SPDX-License-Identifier: BSD-3-Clause
"""The plan of liger.transformers.checkpoint: bytes of layers and steps, layers for given bytes, growing
lengths."""

import re

import pytest
import torch

pytest.importorskip("transformers")

import saved_bytes
import tiny_models
from combinations import tiny
from planned_llama import LAYERS, MOST, PLENTY, calls_of_layers, kept, llama, measured, whole_layers

import liger
import liger.transformers as lt
from liger.transformers.checkpointing import decoder_layers
from liger.transformers.checkpointing.activation_bytes import HostCopy, Probe
from liger.transformers.checkpointing.checkpoint import planners

pytestmark = pytest.mark.usefixtures(whole_layers.__name__)


@pytest.mark.parametrize("count", range(MOST + 1))
def test_layers_for_given_bytes(count):
    full, layer = measured()
    for missing, expected in ((0, count), (1, count - 1)):
        model = llama()
        lt.checkpoint(model, full + count * layer - missing)
        for _ in range(3):
            tiny_models.step(model, **tiny_models.batch())
        expected = max(expected, 0)
        assert kept(model) == [False] * (LAYERS - expected) + [True] * expected
        calls = calls_of_layers(model)
        tiny_models.step(model, **tiny_models.batch())
        # The forward, and in the backward the layers that are recomputed.
        assert calls == [*range(LAYERS), *reversed(range(LAYERS - expected))]


def test_a_model_in_another_dtype():
    """A settled plan counts the bytes of layers again."""
    model, given = lt.checkpoint(llama().bfloat16(), PLENTY), tiny_models.batch()
    (planner,) = planners(model)
    costs, levels = [], []
    for change in (model.bfloat16, model.float, model.float):
        change()
        for _ in range(3):
            tiny_models.step(model, **given)
            levels.append(planner.step.kept)
        assert planner.settled == {False}
        costs.append(planner.plan.cost(1))
    assert levels == [0, MOST, MOST, 0, *[MOST] * 5]
    assert 1.5 * costs[0] < costs[1] == costs[2]
    kinds = {decoder_layers.kind(layer) for layer in (*model.model.layers, model.model.layers[0].bfloat16())}
    assert len(kinds) == 2


def test_bytes_of_a_layer():
    """Those that autograd saves, counted without the planner."""
    model, sizes = llama(), {}
    layer = model.model.layers[2]
    outside = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in outside:
            sizes[storage.data_ptr()] = (storage.nbytes(), storage)
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)

    def enter(module, args, kwargs):
        tensors = [*args, *kwargs.values(), *kwargs["position_embeddings"]]
        outside.update(t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor))
        hooks.__enter__()

    layer.register_forward_pre_hook(enter, with_kwargs=True)
    layer.register_forward_hook(lambda *_: hooks.__exit__())
    tiny_models.step(model, **tiny_models.batch())
    assert measured()[1] == sum(size for size, _ in sizes.values()) > 22 * 64 * 4 * 5


def kept_per_token(model_type, **options):
    """Bytes per token of a layer that keeps its activations, by the planner and by its allocations."""
    planned = []

    def prepare(model):
        lt.checkpoint(liger.patch(model, **options), PLENTY)
        for _ in range(3):
            saved_bytes.step(model, saved_bytes.ids())
        model.zero_grad()
        (planner,) = planners(model)
        planned.append(planner.plan.cost(1) / (saved_bytes.ROWS * saved_bytes.TOKENS))

    allocated = saved_bytes.saved_per_token(prepare, model_type)
    assert planned[0] == planned[1]
    # The plan does not count the input of the layer, which a recomputed layer saves as well: 64 numbers of 2
    # bytes.
    return planned[0] + 2 * 64, allocated


@pytest.mark.parametrize(
    "model_type", tiny_models.first_is_quick("qwen3", "llama", "gemma3_text", "mixtral", "phi3")
)
def test_bytes_of_layers_that_recompute_cheap_outputs(model_type):
    plain, recompute = kept_per_token(model_type), kept_per_token(model_type, recompute=True)
    tolerance = 0.015 if model_type == "mixtral" else 0
    assert plain[0] == pytest.approx(plain[1], rel=tolerance, abs=0)
    assert recompute[0] == pytest.approx(recompute[1], rel=tolerance, abs=0)
    assert recompute[0] < 0.9 * plain[0]


def strided():
    mask = torch.randn(2, 1, 11, 16)[..., :11]
    yield mask.expand(2, 4, 11, 11)
    yield torch.randn(4, 6, 5).transpose(0, 2)
    yield torch.randn(3, 1, 7).expand(3, 5, 7)[1:]
    yield torch.randint(2, (5, 9)).bool()[:, ::2]
    yield torch.randn(8).unfold(0, 4, 2)
    yield torch.randn(0, 3).t()
    yield torch.tensor(2.5, dtype=torch.bfloat16)


@pytest.mark.parametrize("x", list(strided()), ids=lambda x: f"{tuple(x.shape)} {x.stride()}")
def test_copies_on_the_host_come_back_with_their_strides(x):
    copy = HostCopy(x)
    again = copy.restored()
    assert again.stride() == x.stride() and again.dtype == x.dtype
    assert torch.equal(again, x)
    assert copy.data.numel() <= x.numel()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [11, 16])
def test_a_padded_mask_on_a_device(tokens):
    """The step that counts, too: memory-efficient attention wants the rows of its mask aligned, whatever the
    length."""
    models = [
        liger.patch(tiny_models.make("llama", "cuda", num_hidden_layers=LAYERS, attn_implementation="sdpa"))
        for _ in range(2)
    ]
    given = tiny_models.batch("cuda", tokens=tokens)
    lt.checkpoint(models[0], PLENTY * 1000)
    for _ in range(3):
        steps = [tiny_models.step(model, **given) for model in models]
        for name, expected in steps[1][1].items():
            torch.testing.assert_close(steps[0][1][name], expected, msg=name)


def test_patching_again_measures_again(capsys):
    """More layers fit the same memory when they save less, and fewer when they save more."""
    model = liger.patch(saved_bytes.build("llama", layers=LAYERS), verbose=False)
    lt.checkpoint(model, PLENTY)

    def steps():
        for _ in range(3):
            saved_bytes.step(model, saved_bytes.ids())
            model.zero_grad()

    steps()
    (planner,) = planners(model)
    planner.meter.limit = planner.last_start[False] + planner.plan.need(False, 0, planner.longest)
    planner.meter.limit += 2 * planner.plan.cost(1)
    counts = []
    for options in ({}, {"recompute": True}, {}):
        liger.patch(model, **options, verbose=False)
        assert lt.patch_report(model).checkpointing.endswith("until a step has been measured")
        steps()
        counts.append(sum(kept(model)))
    assert counts == [2, 3, 2]
    assert capsys.readouterr().err.count("\n") == 4


def test_layers_with_other_patches_are_of_another_kind():
    model = liger.patch(llama(), recompute=True)
    liger.unpatch(model.model.layers[1])
    kinds = [decoder_layers.kind(layer) for layer in model.model.layers]
    assert kinds[0] == kinds[2] == kinds[3] != kinds[1]


def test_layers_on_several_devices_are_all_recomputed(capsys):
    model = lt.checkpoint(llama(), PLENTY)
    (planner,) = planners(model)
    model.model.layers[3].to("meta")
    planner._begin(torch.zeros(1, 2, 8))
    assert planner.allowed == 0
    assert capsys.readouterr().err == (
        "liger: checkpoint: the layers are on several devices, so all of them are recomputed\n"
    )


def test_ranks_without_a_plan_count_on_all_ranks():
    """Another rank could not count its first step: here, too, a layer counts once more, for a new plan."""
    model = lt.checkpoint(llama(), PLENTY)
    (planner,) = planners(model)
    tiny_models.step(model, **tiny_models.batch())
    planner.agreement.largest = lambda numbers: [*numbers[:-1], 1]
    planner.agreement.smallest = lambda numbers: [0, 0]
    tiny_models.step(model, **tiny_models.batch())
    assert planner.plan is None
    assert isinstance(vars(planner.layers[-1])["_gradient_checkpointing_func"], Probe)
    del planner.agreement.smallest, planner.agreement.largest
    for _ in range(3):
        tiny_models.step(model, **tiny_models.batch())
    assert sum(kept(model)) == MOST and not planner.probes


def test_growing_lengths(capsys):
    full, layer = measured(attn_implementation="sdpa")
    model = llama(attn_implementation="sdpa")
    lt.checkpoint(model, full + 3 * layer)
    for _ in range(3):
        tiny_models.step(model, **tiny_models.batch())
    assert sum(kept(model)) == 3
    assert "1 of 4 LlamaDecoderLayer recompute all, 0 keep attention, 3 keep all (" in capsys.readouterr().err
    calls = calls_of_layers(model)
    tiny_models.step(model, **tiny_models.batch(tokens=12))
    assert 0 < sum(kept(model)) < 3
    assert len(calls) == 2 * LAYERS - sum(kept(model))
    err = capsys.readouterr().err
    words = "(.) of 4 layers recompute all, 0 keep attention, (.) keep all, instead of 1, 0 and 3\n"
    found = re.search(f"24 tokens are more than in any step before: {words}", err)
    assert [int(number) for number in found.groups()] == [LAYERS - sum(kept(model)), sum(kept(model))]
    tiny_models.step(model, **tiny_models.batch(tokens=40))
    assert sum(kept(model)) == 0
    assert (
        "80 tokens are more than in any step before: 4 of 4 layers recompute all" in capsys.readouterr().err
    )
    # Shorter steps have the plan of the longest.
    tiny_models.step(model, **tiny_models.batch())
    assert sum(kept(model)) == 0


def test_tokens_argument(capsys):
    full, layer = measured(attn_implementation="sdpa")
    counts = []
    for tokens in (None, 22, 24, 80):
        model = llama(attn_implementation="sdpa")
        lt.checkpoint(model, full + 3 * layer, tokens=tokens)
        for _ in range(3):
            tiny_models.step(model, **tiny_models.batch())
        counts.append(sum(kept(model)))
    assert counts[:2] == [3, 3] and 3 > counts[2] > counts[3] == 0
    assert "at 80 tokens" in lt.patch_report(model).checkpointing


def test_eager_attention_grows_with_the_length():
    """Twice the length at the same number of tokens: scores of twice the size."""
    full, layer = measured()
    model = llama()
    lt.checkpoint(model, full + LAYERS * layer)
    for _ in range(2):
        tiny_models.step(model, **tiny_models.batch())
    assert sum(kept(model)) == MOST
    tiny_models.step(model, **tiny_models.batch(rows=1, tokens=22))
    assert not any(kept(model))


def test_two_forwards_of_one_step_count_together():
    full, layer = measured(attn_implementation="sdpa")
    model = llama(attn_implementation="sdpa")
    lt.checkpoint(model, full + LAYERS * layer)
    for _ in range(3):
        tiny_models.step(model, **tiny_models.batch())
    assert sum(kept(model)) == MOST
    first = model(**tiny_models.batch()).loss
    second = model(**tiny_models.batch()).loss
    assert not any(kept(model)) and planners(model)[0].longest == [44]
    (first + second).backward()


def test_the_largest_row_of_layers():
    model = tiny("gemma3")
    lt.checkpoint(model, PLENTY)
    (planner,) = planners(model)
    assert {type(layer).__name__ for layer in planner.layers} == {"Gemma3DecoderLayer"}


# --- layers that are none of transformers -------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return x + self.second(torch.relu(self.first(x)))


class Blocks(torch.nn.Module):
    """Checkpoints the calls of its layers itself, as older models do."""

    gradient_checkpointing = False

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                x = self._gradient_checkpointing_func(layer.__call__, x)
            else:
                x = layer(x)
        return x

    def step(self):
        self.zero_grad()
        self(torch.ones(2, 5, 8)).sum().backward()


def test_a_model_that_checkpoints_its_layers_itself():
    model = Blocks()
    lt.checkpoint(model, PLENTY)
    for _ in range(3):
        model.step()
    calls = [layer.calls for layer in model.layers]
    model.step()
    assert [layer.calls - before for layer, before in zip(model.layers, calls, strict=True)] == [1] * 4
    lt.checkpoint(model, None)
    assert "gradient_checkpointing" not in vars(model)


def test_a_forward_of_the_instance_runs_and_returns():
    model, seen = Blocks(), []
    for layer in model.layers:
        layer.forward = lambda x, forward=layer.forward: (seen.append(1), forward(x))[1]
    forwards = [vars(layer)["forward"] for layer in model.layers]
    lt.checkpoint(model, PLENTY)
    for _ in range(3):
        model.step()
    seen.clear()
    model.step()
    assert len(seen) == 4
    lt.checkpoint(model, None)
    assert [vars(layer)["forward"] for layer in model.layers] == forwards
