# SPDX-License-Identifier: BSD-3-Clause
"""Layers that are recomputed without their attention: the bits of full checkpointing, and one kernel call."""

import contextlib
import copy
import functools
import gc
import weakref
from collections import Counter

import pytest
import torch

pytest.importorskip("transformers")

import tiny_models
from combinations import inputs_of, lora, seeded_step
from planned_llama import (
    FEWEST,
    LAYERS,
    MOST,
    PLENTY,
    Kernels,
    assert_bits,
    attention_first,
    counts,
    planned,
    result_of,
    sdpa_llama,
    set_level,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

import liger
import liger.transformers as lt
from liger.transformers.checkpointing import attention_calls, decoder_layers, kept_attention
from liger.transformers.checkpointing.checkpoint import planners
from liger.transformers.checkpointing.memory_plan import State

pytestmark = pytest.mark.usefixtures(attention_first.__name__)


def kernels_of(model, given):
    with Kernels() as kernels:
        result = seeded_step(model, given)
    return result, (kernels.forwards, kernels.backwards)


# --- bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [11, 16])
def test_masks(length, packed):
    """A padded batch, and several sequences in a row: masks of booleans, which SDPA converts."""
    given = tiny_models.batch(tokens=length)
    if packed:
        del given["attention_mask"]
        given["position_ids"] = torch.cat([torch.arange(5), torch.arange(length - 5)])[None].expand(2, -1)
    # With a cache, transformers does not look for several sequences; with checkpointing there is no cache.
    models = [sdpa_llama(use_cache=False) for _ in range(2)]
    expected = seeded_step(models[1], given)
    planned(models[0], given, MOST)
    assert_bits(seeded_step(models[0], given), expected)
    assert counts(models[0]) == (FEWEST, MOST, 0)


def test_the_kernel_runs_once_per_step():
    given = inputs_of("llama")
    model = planned(sdpa_llama(), given).model
    assert kernels_of(model, given)[1] == (2 * LAYERS, LAYERS)
    for level in (1, MOST):
        set_level(model, level)
        assert kernels_of(model, given)[1] == (2 * LAYERS - level, LAYERS)


def test_the_math_kernel_is_recomputed():
    """Dropout on the CPU: the kernel that SDPA takes saves all weights, which are no small tensors."""
    given = inputs_of("llama")
    models = [sdpa_llama(attention_dropout=0.2) for _ in range(2)]
    expected = seeded_step(models[1], given)
    planned(models[0], given, MOST)
    assert_bits(seeded_step(models[0], given), expected)
    assert counts(models[0])[State.ATTENTION] == 0
    set_level(models[0], 0)
    assert_bits(seeded_step(models[0], given), expected)
    assert (
        "4 cannot keep attention alone: SDPA takes its math kernel"
        in lt.patch_report(models[0]).checkpointing
    )


def test_a_kernel_that_changes_between_steps():
    """Counted without dropout, then with it: the layer recomputes a call that it cannot keep."""
    given = inputs_of("llama")
    models = [planned(sdpa_llama(), given, MOST).model, sdpa_llama()]
    for model in models:
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.2
    assert_bits(*(seeded_step(model, given) for model in models))
    assert counts(models[0])[State.ATTENTION] == MOST


@pytest.mark.parametrize("family", ["llama", "Gemma2"])
def test_eager_attention_is_recomputed(family):
    """Gemma 2 with a soft cap of the scores, which SDPA does not have."""
    given = inputs_of("llama")
    models = [tiny_models.make(family, num_hidden_layers=LAYERS) for _ in range(2)]
    expected = seeded_step(models[1], given)
    planned(models[0], given)
    assert_bits(seeded_step(models[0], given), expected)
    assert planners(models[0])[0].plan.layers[1] == [0] * len(planners(models[0])[0].layers)
    assert (
        "cannot keep attention alone: its attention is neither called"
        in lt.patch_report(models[0]).checkpointing
    )


def in_autocast(model, given):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16), Kernels() as kernels:
        loss = model(**given).loss
    with kernels:
        loss.backward()
    return result_of(model, loss.detach()), kernels.forwards


@pytest.mark.parametrize("case", ["unpatched", "patched", "all in float32"])
def test_autocast(case):
    """SDPA gets queries and keys in float32, and casts them before it takes a kernel."""
    given = inputs_of("llama")
    models = [
        tiny_models.make("qwen3", num_hidden_layers=LAYERS, attn_implementation="sdpa") for _ in range(2)
    ]
    for model in models:
        if case != "unpatched":
            liger.patch(model, verbose=False)
        for layer in model.model.layers if case == "all in float32" else []:
            layer.self_attn.v_proj.register_forward_hook(lambda module, args, output: output.float())
    expected, _ = in_autocast(models[1], given)
    lt.checkpoint(models[0], PLENTY)
    for level in (0, 0, MOST):
        set_level(models[0], level)
        result, forwards = in_autocast(models[0], given)
        assert_bits(result, expected)
    (planner,) = planners(models[0])
    assert counts(models[0]) == (FEWEST, MOST, 0) and forwards == LAYERS + FEWEST
    # The output in bfloat16, and a float32 per row and head.
    rows = given["input_ids"].numel()
    assert planner.plan.layers[1] == [rows * 4 * (16 * 2 + 4)] * LAYERS


# --- memory -------------------------------------------------------------------------------------------------


def test_bytes():
    """The output and a float32 per row and head."""
    given = inputs_of("llama")
    model = planned(sdpa_llama(), given, MOST).model
    seeded_step(model, given)
    (planner,) = planners(model)
    rows = given["input_ids"].numel()
    assert planner.plan.layers[1][0] == planner.plan.attention_cost(1) == rows * 4 * (16 + 1) * 4
    report = lt.patch_report(model).checkpointing
    assert f"{FEWEST} of 4 LlamaDecoderLayer recompute all, {MOST} keep attention (SDPA, 0.0" in report
    assert " each), 0 keep all, at 24 tokens" in report and "cannot keep" not in report


def test_a_report_of_three_kinds():
    """One layer of another kind, with eager attention."""
    given, model = inputs_of("llama"), sdpa_llama()
    layer = liger.patch(model.model.layers[1], verbose=False)
    layer.self_attn.config = copy.copy(model.config)
    layer.self_attn.config._attn_implementation_internal = "eager"
    planned(model, given, MOST)
    seeded_step(model, given)
    report = lt.patch_report(model).checkpointing
    assert report.startswith(
        f"{FEWEST + 1} of 4 LlamaDecoderLayer recompute all, {MOST - 2} keep attention (SDPA, 0.01 MiB each), "
        "1 keep all (0."
    )
    assert "; 1 cannot keep attention alone: its attention is neither called through" in report


class Store(kept_attention.OnDevice):
    """Counts what is put into it and what is taken out, and knows what is still alive."""

    def __init__(self):
        self.seen, self.alive = Counter(), weakref.WeakSet()

    def put(self, tensor):
        handle = Handle(tensor.clone(), self)
        self.seen["put"] += 1
        self.alive.add(handle)
        return handle


class Handle:
    def __init__(self, tensor, store):
        self.tensor, self.store = tensor, store

    def get(self):
        self.store.seen["got"] += 1
        return self.tensor


def with_store(model, store):
    base = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    tiny_models.enable_checkpointing(model)
    for layer in model.model.layers:
        attention_calls.intercept(layer)
        vars(layer)[decoder_layers.FUNCTION] = kept_attention.KeptAttention(base, store)
    return model


def test_a_store_of_its_own():
    """Each kept tensor is put once, taken once, and freed by the backward of its layer."""
    store, given = Store(), inputs_of("llama")
    models = [with_store(sdpa_llama(), store), sdpa_llama()]
    expected = seeded_step(models[1], given)
    output = models[0](**given)
    assert store.seen == {"put": 2 * LAYERS} and len(store.alive) == 2 * LAYERS
    output.loss.backward()
    assert store.seen == {"put": 2 * LAYERS, "got": 2 * LAYERS} and not store.alive
    assert_bits(({"loss": output.loss}, {n: p.grad for n, p in models[0].named_parameters()}), expected)


def test_a_graph_that_is_kept():
    """Two backwards of one graph recompute twice, and read the kept tensors twice."""
    store, given = Store(), inputs_of("llama")
    model = with_store(sdpa_llama(), store)
    loss = model(**given).loss
    weights = [p for p in model.parameters() if p.requires_grad]
    with Kernels() as kernels:
        first = torch.autograd.grad(loss, weights, retain_graph=True)
        second = torch.autograd.grad(loss, weights)
    assert all(map(torch.equal, first, second))
    assert (kernels.forwards, kernels.backwards) == (0, 2 * LAYERS) and not store.alive


def test_a_forward_without_a_backward_frees_all():
    store = Store()
    model = with_store(sdpa_llama(), store)
    loss = model(**inputs_of("llama")).loss
    assert store.alive
    del loss
    gc.collect()
    assert not store.alive
    with torch.no_grad():
        model(**inputs_of("llama"))
    assert store.seen["put"] == 2 * LAYERS


# --- with other code ----------------------------------------------------------------------------------------


def test_adapters():
    """Only adapters are trained; the first layer's input has no gradient."""
    given = inputs_of("llama")
    models = [
        lora(sdpa_llama(), "q_proj", "down_proj", init_lora_weights=False, lora_dropout=0.2) for _ in range(2)
    ]
    expected = seeded_step(models[1], given)
    planned(models[0], given, MOST)
    result, (forwards, _) = kernels_of(models[0], given)
    assert_bits(result, expected)
    assert counts(models[0])[State.ATTENTION] == MOST and forwards == LAYERS + FEWEST


def test_attention_without_gradients():
    """Frozen up to the MLP of the first layer: its attention has nothing to keep."""
    given = inputs_of("llama")
    models = [sdpa_llama(), sdpa_llama()]
    for model in models:
        model.requires_grad_(False)
        model.model.layers[0].mlp.requires_grad_(True)
        model.model.layers[2].requires_grad_(True)
    expected = seeded_step(models[1], given)
    planned(models[0], given, MOST)
    assert_bits(seeded_step(models[0], given), expected)


def test_a_reentrant_checkpoint_keeps_no_attention():
    given = inputs_of("llama")
    model = sdpa_llama()
    tiny_models.enable_checkpointing(model, reentrant=True)
    planned(model, given, MOST)
    result, _ = kernels_of(model, given)
    assert_bits(result, seeded_step(sdpa_llama(), given))
    if not decoder_layers.READS_BEFORE_HOOKS:
        assert counts(model)[State.ATTENTION] == 0
        assert (
            planners(model)[0]
            .refusals[0]
            .startswith("another function than torch's non-reentrant checkpoint")
        )


def test_compiled():
    """Compiled code keeps the outputs of the same kernels."""
    given = inputs_of("llama")
    model = planned(sdpa_llama(), given, MOST).model
    expected = seeded_step(model, given)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    kernels_of(compiled, given)
    result, (forwards, _) = kernels_of(compiled, given)
    torch.testing.assert_close(result[0]["loss"], expected[0]["loss"])
    # Some versions of torch recompute the layer that keeps nothing as eager code does.
    assert forwards in (LAYERS, LAYERS + FEWEST)


# --- kernels of a GPU ---------------------------------------------------------------------------------------

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("length", [64, 61])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_of_a_gpu(kernel, length, dropout):
    """The loss of full checkpointing, and its gradients as far as the kernel gives the same ones twice."""
    models = [
        liger.patch(
            tiny_models.make(
                "llama",
                "cuda",
                torch.bfloat16,
                num_hidden_layers=LAYERS,
                attn_implementation="sdpa",
                head_dim=64,
                attention_dropout=dropout,
                max_position_embeddings=128,
            )
        )
        for _ in range(2)
    ]
    given = tiny_models.batch("cuda", tokens=length)
    if kernel == "flash" or (kernel == "cudnn" and not attention_calls._CONVERTS_ALIKE):
        del given["attention_mask"]
    tiny_models.enable_checkpointing(models[1])
    with sdpa_kernel(KERNELS[kernel]), deterministic():
        expected, again = (seeded_step(models[1], given) for _ in range(2))
        lt.checkpoint(models[0], PLENTY * 100)
        for level in (0, 0, MOST, MOST):
            set_level(models[0], level)
            result, (forwards, backwards) = kernels_of(models[0], given)
    assert counts(models[0]) == (FEWEST, MOST, 0), lt.patch_report(models[0]).checkpointing
    assert (forwards, backwards) == (2 * LAYERS - MOST, LAYERS)
    assert torch.equal(result[0]["loss"], expected[0]["loss"])
    for name, gradient in expected[1].items():
        if torch.equal(again[1][name], gradient):
            assert torch.equal(result[1][name], gradient), name
        else:
            torch.testing.assert_close(result[1][name], gradient, msg=name)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("implementation", ["flex_attention", "flash_attention_2", "flash_attention_3"])
def test_other_implementations_of_a_gpu(implementation):
    package = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}.get(
        implementation
    )
    if package is not None:
        pytest.importorskip(package)
    models = [
        tiny_models.make(
            "llama", "cuda", torch.bfloat16, num_hidden_layers=LAYERS, attn_implementation=implementation,
            head_dim=64, max_position_embeddings=128,
        )
        for _ in range(2)
    ]  # fmt: skip
    given = tiny_models.batch("cuda", tokens=64)
    tiny_models.enable_checkpointing(models[1])
    expected = seeded_step(models[1], given)
    lt.checkpoint(models[0], PLENTY * 100)
    for level in (0, 0, MOST, MOST):
        set_level(models[0], level)
        result = seeded_step(models[0], given)
    assert counts(models[0]) == (FEWEST, MOST, 0), lt.patch_report(models[0]).checkpointing
    assert torch.equal(result[0]["loss"], expected[0]["loss"])
    for name, gradient in expected[1].items():
        torch.testing.assert_close(result[1][name], gradient, msg=name)


@pytest.mark.gpu
def test_times_decide_on_a_gpu(monkeypatch):
    """Long sequences of narrow layers: attention is most of the time, and the plan keeps it first."""
    monkeypatch.undo()
    model = liger.patch(
        tiny_models.make(
            "llama", "cuda", torch.bfloat16, num_hidden_layers=LAYERS, attn_implementation="sdpa", head_dim=64,
            max_position_embeddings=16384,
        )
    )  # fmt: skip
    lt.checkpoint(model, PLENTY * 100)
    ids = torch.randint(3, tiny_models.VOCAB, (1, 16384), device="cuda")
    for _ in range(2):
        tiny_models.step(model, input_ids=ids, labels=ids)
    (planner,) = planners(model)
    assert all(saving.time > 0 and saving.attention_time > 0 for saving in planner.savings)
    assert [state for _, state in planner.plan.upgrades[:MOST]] == [State.ATTENTION] * MOST
