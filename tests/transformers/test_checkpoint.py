"""liger.transformers.checkpoint on the CPU: equal gradients, layers for given bytes, lengths, other packages."""

import copy
import pickle
import re

import pytest
import torch

pytest.importorskip("transformers")

import saved_bytes
import tiny_models
from combinations import inputs_of, lora, seeded_step, tiny
from trainer_runs import train

import liger
import liger.transformers as lt
from liger.transformers import _checkpoint_layers
from liger.transformers._activation_bytes import Probe
from liger.transformers._checkpoint import planners

LAYERS = 4
# Where transformers checkpoints the call of a layer, the first one is always recomputed.
FEWEST = int(_checkpoint_layers.READS_BEFORE_HOOKS)
MOST = LAYERS - FEWEST
PLENTY = 10**9


def llama(**settings):
    return tiny_models.make("llama", num_hidden_layers=LAYERS, **settings)


def kept(model):
    """Whether each layer keeps its activations."""
    (planner,) = planners(model)
    return [
        vars(layer)["_gradient_checkpointing_func"] is _checkpoint_layers.keep for layer in planner.layers
    ]


def assert_bits(ours, theirs):
    assert torch.equal(ours[0]["loss"], theirs[0]["loss"])
    assert ours[1].keys() == theirs[1].keys()
    for name, expected in theirs[1].items():
        assert torch.equal(ours[1][name], expected), name


def calls_of_layers(model):
    """A list that gets the number of a layer each time its attention runs."""
    (planner,) = planners(model)
    calls = []
    for number, layer in enumerate(planner.layers):
        layer.self_attn.register_forward_hook(lambda *_, number=number: calls.append(number))
    return calls


@pytest.mark.parametrize("options", [None, {}, {"recompute": True}], ids=["plain", "patched", "recompute"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "mixtral", "qwen3_moe", "gemma3"])
def test_same_bits(model_type, options):
    """The step that counts, then one with half of the layers recomputed, then one with none."""
    # The types with a list of layer types have two layers.
    settings = {"num_hidden_layers": LAYERS} if model_type in ("llama", "mixtral", "qwen3_moe") else {}
    models = [tiny(model_type, attention_dropout=0.2, **settings) for _ in range(2)]
    if options is not None:
        [liger.patch(model, **options) for model in models]
    given = inputs_of(model_type)
    expected = seeded_step(models[1], given)
    lt.checkpoint(models[0], PLENTY)
    seen = []
    for allowed in (0, 0, len(planners(models[0])[0].layers) // 2, PLENTY):
        (planner,) = planners(models[0])
        planner.allowed = min(allowed, len(planner.layers) - FEWEST)
        planner.settled.clear()
        assert_bits(seeded_step(models[0], given), expected)
        seen.append(sum(kept(models[0])))
    assert seen == [0, 0, len(planner.layers) // 2, len(planner.layers) - FEWEST]


@pytest.mark.parametrize("order", ["adapters first", "adapters last"])
def test_lora(order):
    models = [liger.patch(tiny("llama", num_hidden_layers=LAYERS)) for _ in range(2)]
    if order == "adapters last":
        lt.checkpoint(models[0], PLENTY)
    models = [lora(m, "q_proj", "down_proj", init_lora_weights=False, lora_dropout=0.2) for m in models]
    if order == "adapters first":
        lt.checkpoint(models[0], PLENTY)
    given = inputs_of("llama")
    for _ in range(3):
        assert_bits(*(seeded_step(model, given) for model in models))
    assert sum(kept(models[0])) == MOST


def measured(**settings):
    """(bytes of a step with full checkpointing, bytes of a layer), for 22 tokens of a tiny Llama."""
    model = lt.checkpoint(llama(**settings), PLENTY)
    for _ in range(2):
        tiny_models.step(model, **tiny_models.batch())
    (planner,) = planners(model)
    return planner.last_start[False] + planner.plan.need(False, 0, planner.longest), planner.plan.cost(1)


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
    # The plan does not count the input of the layer, which a recomputed layer saves as well: 64 numbers of 2 bytes.
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


def test_patching_again_measures_again(capsys):
    """More layers fit the same memory when they save less, and fewer when they save more."""
    model = liger.patch(saved_bytes.build("llama", layers=LAYERS))
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
        liger.patch(model, **options)
        assert lt.patch_report(model).checkpointing.endswith("until a step has been measured")
        steps()
        counts.append(sum(kept(model)))
    assert counts == [2, 3, 2]
    assert capsys.readouterr().err.count("\n") == 4


def test_layers_with_other_patches_are_of_another_kind():
    model = liger.patch(llama(), recompute=True)
    liger.unpatch(model.model.layers[1])
    kinds = [_checkpoint_layers.kind(layer) for layer in model.model.layers]
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
    """Another rank could not count its first step: here, too, a layer is called by its probe once more."""
    model = lt.checkpoint(llama(), PLENTY)
    (planner,) = planners(model)
    tiny_models.step(model, **tiny_models.batch())
    planner.agreement.smallest = lambda numbers: [0, 0, 0]
    tiny_models.step(model, **tiny_models.batch())
    assert planner.plan is not None
    assert isinstance(vars(planner.layers[-1])["_gradient_checkpointing_func"], Probe)
    del planner.agreement.smallest
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
    assert "1 of 4 LlamaDecoderLayer recomputed, 3 keep" in capsys.readouterr().err
    calls = calls_of_layers(model)
    tiny_models.step(model, **tiny_models.batch(tokens=12))
    assert 0 < sum(kept(model)) < 3
    assert len(calls) == 2 * LAYERS - sum(kept(model))
    err = capsys.readouterr().err
    assert re.search("24 tokens are more than in any step before: . of 4 layers recomputed instead of 1", err)
    tiny_models.step(model, **tiny_models.batch(tokens=40))
    assert sum(kept(model)) == 0
    assert "80 tokens are more than in any step before: 4 of 4 layers recomputed" in capsys.readouterr().err
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


def test_accumulation_and_evaluation():
    """Micro-batches with gradients of earlier ones, and forwards without gradients between the steps."""
    models = [llama(), llama()]
    lt.checkpoint(models[0], PLENTY)
    for _ in range(3):
        results = []
        for model in models:
            model.zero_grad()
            model.eval()
            with torch.no_grad():
                model(**tiny_models.batch())
            model.train()
            for tokens in (11, 8, 11):
                loss = model(**tiny_models.batch(tokens=tokens)).loss
                loss.backward()
            results.append(({"loss": loss}, {n: p.grad for n, p in model.named_parameters()}))
        assert_bits(*results)
    (planner,) = planners(models[0])
    assert planner.kept == {False: MOST, True: MOST}


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


def test_forwards_without_a_backward():
    """Those whose result is gone do not count: after an error, or where the loss alone is asked for."""
    model = lt.checkpoint(llama(attn_implementation="sdpa"), PLENTY)

    def fail(*_):
        raise RuntimeError("in a layer")

    for number in range(5):
        model(**tiny_models.batch())
        handle = model.model.layers[number % 4].mlp.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="in a layer"):
            model(**tiny_models.batch())
        handle.remove()
        tiny_models.step(model, **tiny_models.batch())
        assert planners(model)[0].longest == [22]
    assert sum(kept(model)) == MOST


def test_none_restores_what_was_there():
    model = llama()
    before = [dict(vars(module)) for module in model.modules()]
    lt.checkpoint(model, PLENTY)
    tiny_models.step(model, **tiny_models.batch())
    assert model.is_gradient_checkpointing
    assert lt.checkpoint(model, None) is model
    assert planners(model) == [] and not model.is_gradient_checkpointing
    assert [dict(vars(module)) for module in model.modules()] == before
    calls = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    tiny_models.step(model, **tiny_models.batch())
    assert calls == [1]


def test_none_restores_checkpointing():
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    theirs = vars(model.model.layers[1])["_gradient_checkpointing_func"]
    lt.checkpoint(model, PLENTY)
    lt.checkpoint(model, PLENTY)
    assert len(planners(model)) == 1
    lt.checkpoint(model, None)
    assert vars(model.model.layers[1])["_gradient_checkpointing_func"] is theirs
    assert model.is_gradient_checkpointing


def test_unpatch_ends_it_and_patch_does_not():
    model = llama()
    lt.checkpoint(model, PLENTY)
    liger.patch(model)
    liger.patch(model, rope=False)
    assert len(planners(model)) == 1
    liger.unpatch(model)
    assert planners(model) == [] and not model.is_gradient_checkpointing


def test_report(capsys):
    model = llama()
    assert lt.patch_report(model).checkpointing == ""
    lt.checkpoint(model, PLENTY)
    start = "all 4 LlamaDecoderLayer recomputed until a step has been measured"
    assert str(lt.patch_report(model)) == f"checkpointing: {start}"
    liger.patch(model)
    for _ in range(2):
        tiny_models.step(model, **tiny_models.batch())
    report = lt.patch_report(model)
    printed = capsys.readouterr().err
    assert printed == f"liger: checkpoint: {report.checkpointing}\n"
    assert report.checkpointing.startswith(f"{FEWEST} of 4 LlamaDecoderLayer recomputed, {MOST} keep 0.")
    assert str(report).splitlines()[-1] == f"checkpointing: {report.checkpointing}"
    assert report.summary.endswith(f"; checkpointing: {report.checkpointing}")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_copies_have_plans_of_their_own(copied, steps):
    model = lt.checkpoint(llama(), PLENTY)
    for _ in range(steps):
        tiny_models.step(model, **tiny_models.batch())
    other = copied(model)
    (theirs,), (ours,) = planners(other), planners(model)
    assert theirs is not ours and theirs.layers[0] is other.model.layers[0]
    lt.checkpoint(model, None)
    for _ in range(3):
        tiny_models.step(other, **tiny_models.batch())
    assert sum(kept(other)) == MOST
    lt.checkpoint(other, None)
    assert not other.is_gradient_checkpointing


@pytest.mark.parametrize("theirs", [False, True])
def test_trainer(theirs, tmp_path):
    """With the Trainer's own checkpointing, which it turns on at the start of training, and without."""
    expected = train(liger.patch(llama()), tmp_path)
    model = liger.patch(llama())
    lt.checkpoint(model, PLENTY)
    assert train(model, tmp_path, gradient_checkpointing=theirs) == expected
    assert sum(kept(model)) == MOST


def test_other_code_that_changes_the_layers():
    """Checkpointing turned off, or on with another function, between two steps."""
    full, layer = measured()
    model = lt.checkpoint(llama(), full + 2 * layer)
    for _ in range(3):
        tiny_models.step(model, **tiny_models.batch())
    calls = calls_of_layers(model)
    model.gradient_checkpointing_disable()
    tiny_models.step(model, **tiny_models.batch())
    # A version that reads the flag before the planner sets it does not recompute the first layer.
    assert calls == [0, 1, 2, 3, 1, 0][: 6 - FEWEST]
    assert vars(model.model.layers[0])["_gradient_checkpointing_func"] is _checkpoint_layers.recompute
    calls.clear()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    theirs = vars(model.model.layers[0])["_gradient_checkpointing_func"]
    tiny_models.step(model, **tiny_models.batch())
    if FEWEST:
        calls.clear()
        theirs = _checkpoint_layers.recompute
        tiny_models.step(model, **tiny_models.batch())
    assert calls == [0, 1, 2, 3, 1, 0]
    assert (
        vars(model.model.layers[0])["_gradient_checkpointing_func"] is theirs
        and kept(model)[2:] == [True] * 2
    )


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.calls = 0

    def forward(self, x, *, scale):
        self.calls += 1
        return x + self.outer(torch.nn.functional.gelu(self.inner(x * scale)))


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=2.0)
        return x.sum()


def test_layers_that_are_none_of_transformers():
    model, x = Stack(), torch.randn(2, 5, 8)
    theirs, other = copy.deepcopy(model), copy.deepcopy(model)
    theirs(x).backward()
    lt.checkpoint(model, 1)
    model(x).backward()
    # The last of equal layers counts its activations in the first step and is not recomputed.
    assert [block.calls for block in model.blocks] == [2, 2, 1]
    model(x).backward()
    assert [block.calls for block in model.blocks] == [4, 4, 3]
    lt.checkpoint(model, PLENTY)
    for _ in range(3):
        model.zero_grad()
        model(x).backward()
        for ours, expected in zip(model.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(ours.grad, expected.grad)
    assert all(kept(model)) and all(kept(copy.deepcopy(model)))
    lt.checkpoint(model, None)
    assert "forward" not in vars(model.blocks[0])
    assert vars(model.blocks[0]).keys() == vars(other.blocks[0]).keys()


def test_the_largest_row_of_layers():
    model = tiny("gemma3")
    lt.checkpoint(model, PLENTY)
    (planner,) = planners(model)
    assert {type(layer).__name__ for layer in planner.layers} == {"Gemma3DecoderLayer"}


def test_a_compiled_model_has_the_plan_that_it_had_before():
    model = llama()
    lt.checkpoint(model, PLENTY)
    for _ in range(3):
        eager = tiny_models.step(model, **tiny_models.batch())
    counts = []

    def backend(graph, example):
        counts.append(1)
        return graph

    compiled = torch.compile(model, backend=backend)
    ours = tiny_models.step(compiled, **tiny_models.batch())
    torch.testing.assert_close(ours[0]["loss"], eager[0]["loss"])
    assert sum(kept(model)) == MOST and counts


@pytest.mark.parametrize(
    "memory, error, message",
    [
        (True, TypeError, "memory must be an int, a float, 'auto' or None, not bool"),
        ([1], TypeError, "not list"),
        ("all", ValueError, "memory must be bytes, a share or 'auto', got 'all'"),
        (0, ValueError, "in bytes must be positive, got 0"),
        (0.0, ValueError, r"a share of the device in \(0, 1\], got 0.0"),
        (60e9, ValueError, "bytes are an int"),
        (float("nan"), ValueError, "got nan"),
    ],
)
def test_bad_memory(memory, error, message):
    with pytest.raises(error, match=f"liger.transformers.checkpoint: .*{message}"):
        lt.checkpoint(llama(), memory)


@pytest.mark.parametrize("memory", ["auto", 0.5])
def test_a_cpu_needs_bytes(memory, monkeypatch):
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="memory must be in bytes without a CUDA device"):
            lt.checkpoint(llama(), memory)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = lt.checkpoint(llama(), memory)
    with pytest.raises(ValueError, match="memory must be in bytes for a model on the CPU"):
        model(**tiny_models.batch())


def test_other_bad_arguments():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not int"):
        lt.checkpoint(3, PLENTY)
    with pytest.raises(ValueError, match="Linear has no decoder layers; looked for"):
        lt.checkpoint(torch.nn.Linear(2, 2), PLENTY)
    for tokens, error in ((0, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"liger\.transformers\.checkpoint: tokens must be"):
            lt.checkpoint(llama(), PLENTY, tokens=tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [0, 2, 8])
def test_peak_on_a_device(layers):
    """Room for some layers beyond the peak of full checkpointing."""

    def make():
        return liger.patch(
            tiny_models.make("llama", "cuda", num_hidden_layers=8, hidden_size=512, intermediate_size=2048,
                             max_position_embeddings=4096, attn_implementation="sdpa")
        )  # fmt: skip

    given = tiny_models.batch("cuda", tokens=2048)

    def peak(model):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        tiny_models.step(model, **given)
        return torch.cuda.max_memory_allocated()

    model = make()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = seeded_step(model, given)
    peak(model)
    full = peak(model)
    lt.checkpoint(model, PLENTY * 1000)
    for _ in range(6):
        tiny_models.step(model, **given)
    (planner,) = planners(model)
    assert sum(kept(model)) == 8 - FEWEST
    limit = full + planner.plan.cost(layers)
    lt.checkpoint(model, limit)
    for _ in range(8):
        tiny_models.step(model, **given)
    # A step that counts activations may need a little more than one that recomputes every layer.
    assert sum(kept(model)) >= layers - 1
    assert peak(model) <= limit
    tiny_models.assert_same_step(seeded_step(model, given), expected)
