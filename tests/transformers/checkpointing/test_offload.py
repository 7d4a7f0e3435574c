# SPDX-License-Identifier: BSD-3-Clause
"""liger.transformers.checkpoint(offload=...) on the CPU, where copies are plain: the same bits, what is
moved, other packages, bad arguments."""

import copy
import functools
import gc
import pickle

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

pytest.importorskip("transformers")

import tiny_models
from combinations import inputs_of, lora, seeded_step, tiny
from planned_llama import FEWEST, LAYERS, MOST, PLENTY, kept, llama
from trainer_runs import train

import liger
import liger.transformers as lt
from liger.transformers.checkpointing import device_memory, host_pool, methods, offload
from liger.transformers.checkpointing.checkpoint import planners

# Bytes of an input of a layer: 22 tokens of a tiny Llama.
INPUT = 22 * 64 * 4
PAGE = 4096


@pytest.fixture(autouse=True)
def small_tensors_move(monkeypatch):
    monkeypatch.setattr(offload, "WORTH_MOVING", 1)


def planned(model, offload=True, **settings):
    lt.checkpoint(model, PLENTY, offload=offload, **settings)
    (planner,) = planners(model)
    return planner


def allow(planner, number):
    planner.allowed = min(number, len(planner.layers) - FEWEST)
    planner.settled.clear()


def result_of(model, loss):
    return {"loss": loss}, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_bits(ours, theirs):
    assert torch.equal(ours[0]["loss"], theirs[0]["loss"])
    assert ours[1].keys() == theirs[1].keys() and ours[1]
    for name, expected in theirs[1].items():
        assert torch.equal(ours[1][name], expected), name


def free_bytes(store):
    store.pool.settle()
    return sum(length for free in store.pool._free for _, length in free)


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", [None, {}, {"recompute": True}], ids=["plain", "patched", "recompute"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "mixtral", "qwen3_moe", "gemma3"])
def test_same_bits(model_type, options):
    settings = {"num_hidden_layers": LAYERS} if model_type in ("llama", "mixtral", "qwen3_moe") else {}
    models = [tiny(model_type, attention_dropout=0.2, **settings) for _ in range(2)]
    if options is not None:
        [liger.patch(model, **options) for model in models]
    given = inputs_of(model_type)
    expected = seeded_step(models[1], given)
    planner = planned(models[0])
    count = len(planner.layers)
    for allowed in (0, 0, count // 2, PLENTY):
        allow(planner, allowed)
        assert_bits(seeded_step(models[0], given), expected)
        assert planner.store.moved > 0 or planner.step.kept >= count - 1
        # No handle has outlived the backward.
        assert planner.store.pool is None or free_bytes(planner.store) == planner.store.pool.size


def test_what_is_moved():
    """The input of every recomputed layer but the last one."""
    model = llama()
    planner = planned(model)
    for allowed in (0, 0, 1, 2, 3, 4):
        allow(planner, allowed)
        tiny_models.step(model, **tiny_models.batch())
        # The step that measures has a layer that is not recomputed.
        recomputed = LAYERS - planner.step.kept
        assert planner.store.moved == max(recomputed - 1, 0) * INPUT
        assert planner.store.refused == 0


def test_inputs_are_freed_in_the_forward():
    model = llama()
    planner = planned(model)
    for _ in range(2):
        allow(planner, 0)
        tiny_models.step(model, **tiny_models.batch())
    storages = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, given: storages.append(StorageWeakRef(given["hidden_states"].untyped_storage())),
            with_kwargs=True,
        )
        layer.register_forward_pre_hook(
            lambda _, args: storages.append(StorageWeakRef(args[0].untyped_storage()))
        )
    loss = model(**tiny_models.batch()).loss
    inputs = storages[: 2 * LAYERS : 2]
    assert [storage.expired() for storage in inputs] == [True] * (LAYERS - 1) + [False]
    loss.backward()


def test_lora():
    models = [
        lora(llama(), "q_proj", "down_proj", init_lora_weights=False, lora_dropout=0.2) for _ in range(2)
    ]
    for model in models:
        model.enable_input_require_grads()
    planner = planned(models[0])
    allow(planner, 1)
    given = inputs_of("llama")
    for _ in range(3):
        assert_bits(*(seeded_step(model, given) for model in models))
    assert planner.store.moved == (LAYERS - 2) * given["input_ids"].numel() * 64 * 4


def test_accumulation_and_evaluation():
    """Two forwards before each backward, forwards without gradients between the steps."""
    models = [llama(), llama()]
    planner = planned(models[0])
    for _ in range(3):
        results = []
        for model in models:
            model.zero_grad()
            model.eval()
            with torch.no_grad():
                model(**tiny_models.batch())
            model.train()
            for tokens in (11, 8):
                chosen = model(**tiny_models.batch(tokens=tokens)).loss
                loss = chosen - 0.5 * model(**tiny_models.batch(tokens=7)).loss
                loss.backward()
            results.append(result_of(model, loss))
        assert_bits(*results)
        allow(planner, 1)
    # The last step: 2 x 8 and 2 x 7 tokens.
    assert planner.store.moved == (LAYERS - 2) * (16 + 14) * 64 * 4
    assert free_bytes(planner.store) == planner.store.pool.size


def test_two_backwards_of_one_graph():
    models = [llama(), llama()]
    planner = planned(models[0])
    allow(planner, 0)
    for _ in range(2):
        results = []
        for model in models:
            model.zero_grad()
            loss = model(**tiny_models.batch()).loss
            loss.backward(retain_graph=True)
            loss.backward()
            results.append(result_of(model, loss))
        assert_bits(*results)
    assert free_bytes(planner.store) == planner.store.pool.size


def test_a_backward_that_ends_early():
    """The gradients of one layer alone: the layers before it have no backward."""
    models = [llama(), llama()]
    planner = planned(models[0])
    allow(planner, 0)
    for _ in range(3):
        gradients = []
        for model in models:
            weight = model.model.layers[2].mlp.down_proj.weight
            gradients += torch.autograd.grad(model(**tiny_models.batch()).loss, [weight])
        assert torch.equal(*gradients)
    assert_bits(*(tiny_models.step(model, **tiny_models.batch()) for model in models))
    assert free_bytes(planner.store) == planner.store.pool.size


def test_errors_and_forwards_without_a_backward():
    models = [llama(), llama()]
    planner = planned(models[0])
    allow(planner, 0)

    def fail(*_):
        raise RuntimeError("in a layer")

    for number in range(4):
        models[0](**tiny_models.batch())
        handle = models[0].model.layers[number].mlp.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="in a layer"):
            models[0](**tiny_models.batch())
        handle.remove()
        assert_bits(*(tiny_models.step(model, **tiny_models.batch()) for model in models))
        # The graph of a forward with an error is a cycle.
        gc.collect()
        assert free_bytes(planner.store) == planner.store.pool.size


def test_a_bound_for_two_inputs(capsys):
    models = [llama(), llama()]
    planner = planned(models[0], offload=4 * PAGE)
    for _ in range(2):
        allow(planner, 0)
        assert_bits(*(tiny_models.step(model, **tiny_models.batch()) for model in models))
    assert planner.store.moved == 2 * INPUT and planner.store.refused == INPUT
    assert planner.store.pool.size == 4 * PAGE
    text = "0.01 MiB offloaded to 0.02 MiB of host memory, 0.01 MiB more stay on the device for lack of host memory"
    assert lt.patch_report(models[0]).checkpointing.endswith(text) and text in capsys.readouterr().err


def test_longer_steps_need_memory_of_the_host():
    model = llama()
    planner = planned(model, offload=4 * 3 * PAGE)
    for _ in range(2):
        allow(planner, 0)
        tiny_models.step(model, **tiny_models.batch())
    store = planner.store
    store.begin()
    # Three inputs in blocks of eight and four pages.
    assert store.most == 3 * INPUT and store.pool.size == 8 * PAGE
    assert store.shortage(1.0) == store.shortage(2.0) == 0
    assert store.shortage(4.0) == 12 * INPUT - 12 * PAGE


def test_a_host_without_memory(monkeypatch):
    """A step does what it did without offload, and the report says so."""
    monkeypatch.setattr(host_pool, "available", lambda: 0)
    models = [llama(), llama()]
    planner = planned(models[0])
    for _ in range(2):
        allow(planner, 0)
        assert_bits(*(tiny_models.step(model, **tiny_models.batch()) for model in models))
    assert planner.store.moved == 0 and planner.store.refused == 3 * INPUT
    assert "0.00 MiB offloaded to 0.00 MiB of host memory, 0.02 MiB more stay" in planner.summary


def test_the_plan_counts_inputs():
    """Without offload the inputs are on the device in any plan, with it a kept layer adds its input."""
    costs, needs = [], []
    for choice in (False, True):
        model = llama()
        planner = planned(model, choice)
        for allowed in (0, 0, 2, 2):
            allow(planner, allowed)
            tiny_models.step(model, **tiny_models.batch())
        costs.append(planner.plan.cost(1))
        needs.append([planner.plan.need(False, kept, planner.longest) for kept in (0, 2)])
    assert costs[1] == costs[0] + INPUT
    assert needs[1][0] == needs[0][0] - 3 * INPUT
    assert needs[1][1] == needs[0][1] - INPUT


def test_small_and_shared_tensors_stay(monkeypatch):
    """A tensor that every layer reads is on the device anyway."""
    store = offload.HostStore(True)
    store.begin()
    shared, handles = torch.ones(8), []
    for _ in range(4):
        with store.layer():
            handles.append([store.put(shared), store.put(torch.ones(8)), store.put(torch.ones(4, 4)[:, :2])])
    store.flush()
    kinds = [[type(handle) for handle in of_layer] for of_layer in handles]
    assert kinds[0] == [offload.Moved, offload.Moved, offload.Kept]
    assert kinds[1:] == [[offload.Kept, offload.Moved, offload.Kept]] * 3
    assert all(handle.get().eq(1).all() for of_layer in handles for handle in of_layer)
    monkeypatch.setattr(offload, "WORTH_MOVING", INPUT + 1)
    model = llama()
    planner = planned(model)
    tiny_models.step(model, **tiny_models.batch())
    assert planner.store.moved == planner.store.refused == 0


@pytest.mark.parametrize("shape, order", [((3, 4, 5), (0, 1, 2)), ((3, 4, 5), (2, 0, 1)), ((1, 7), (1, 0))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_strides_and_dtypes_come_back(shape, order, dtype):
    store = offload.HostStore(True)
    x = torch.arange(60)[: torch.Size(shape).numel()].view(shape).permute(order).to(dtype)
    with store.layer():
        handle = store.put(x)
    back = handle.get()
    assert isinstance(handle, offload.Moved) and back is not x
    assert torch.equal(back, x) and back.dtype == dtype and back.stride() == x.stride()


def test_a_tensor_that_stays():
    x = torch.ones(2)
    handle = offload.Kept(x)
    assert handle.get().data_ptr() == x.data_ptr() and handle.get().is_leaf
    x.add_(1)
    with pytest.raises(RuntimeError, match="at version 1; expected version 0"):
        handle.get()
    # Outside a layer, and while it is off, a store keeps what it gets.
    for store in (offload.HostStore(True), offload.HostStore(None)):
        assert store.put(x).get().data_ptr() == x.data_ptr() and store.moved == 0


def test_an_input_that_is_changed_in_place():
    """Autograd refuses this for saved tensors, and so does the store."""
    model = llama()
    allow(planned(model), 0)
    tiny_models.step(model, **tiny_models.batch())
    seen = []

    def change(x):
        x.detach().add_(1)

    model.model.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.model.layers[2].register_forward_pre_hook(lambda *_: change(seen.pop()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(**tiny_models.batch())


@pytest.mark.skipif(not hasattr(torch.nn.Module, "compile"), reason="needs torch.compile")
@pytest.mark.parametrize("what", [pytest.param("model", marks=pytest.mark.slow), "layers"])
def test_compiled_code_recomputes_and_moves_nothing(what):
    model, expected = llama(), llama()
    planner = planned(model)
    allow(planner, 1)
    for _ in range(3):
        tiny_models.step(model, **tiny_models.batch())
    if what == "model":
        compiled = torch.compile(model, backend="aot_eager")
    else:
        compiled = model
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    before = planner.store.last
    ours, theirs = (tiny_models.step(m, **tiny_models.batch()) for m in (compiled, expected))
    tiny_models.assert_same_step(
        (ours[0], {n.removeprefix("_orig_mod."): g for n, g in ours[1].items()}), theirs
    )
    assert planner.store.last == before


has_offload = pytest.mark.skipif(
    not hasattr(tiny_models.transformers.PreTrainedModel, "activation_checkpointing_enable"),
    reason="activation_checkpointing_enable came with transformers 5.24",
)


@has_offload
@pytest.mark.parametrize("when", ["before", "after", "after a step"])
def test_offload_of_transformers_turns_it_on(when):
    model, expected = llama(), llama()

    def ask():
        model.activation_checkpointing_enable({"use_reentrant": False}, offload=True)

    if when == "before":
        ask()
    planner = planned(model, None)
    if when == "after a step":
        tiny_models.step(model, **tiny_models.batch())
        assert not planner.store.is_on and planner.store.moved == 0
    if when != "before":
        ask()
    for allowed in (0, 0, 1):
        allow(planner, allowed)
        ours, theirs = (tiny_models.step(m, **tiny_models.batch()) for m in (model, expected))
        assert_bits(ours, theirs)
    assert planner.store.moved == 2 * INPUT and "offloaded to" in planner.summary
    if when == "before":
        lt.checkpoint(model, None)
        found = vars(model.model.layers[0])["_gradient_checkpointing_func"]
        assert "checkpoint_func" in found.func.__qualname__


@has_offload
def test_offload_false_turns_it_off():
    model = llama()
    model.activation_checkpointing_enable(offload=True)
    planner = planned(model, False)
    tiny_models.step(model, **tiny_models.batch())
    assert planner.store.moved == 0 and not planner.store.is_on


@has_offload
def test_every_n_layers_is_in_the_report():
    model = llama()
    planned(model)
    model.activation_checkpointing_enable(every_n_layers=2)
    for _ in range(3):
        tiny_models.step(model, **tiny_models.batch())
    assert sum(kept(model)) == MOST
    assert lt.patch_report(model).checkpointing.endswith(
        "; instead of every_n_layers, 2 of 4 layers recomputed"
    )


@has_offload
def test_trainer_that_asks_for_it(tmp_path):
    expected = train(liger.patch(llama()), tmp_path)
    model = liger.patch(llama())
    planner = planned(model, None)
    settings = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}}
    allow(planner, 1)
    assert train(model, tmp_path, **settings) == expected
    assert planner.store.is_on and planner.store.most == 3 * planner.longest[0] * 64 * 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_function_of_the_user(reentrant):
    if reentrant and FEWEST:
        pytest.skip("this version replaces reentrant checkpoints")
    models = [llama(), llama()]
    methods.enable(models[0], use_reentrant=reentrant)
    planner = planned(models[0])
    allow(planner, 1)
    for _ in range(3):
        assert_bits(*(tiny_models.step(model, **tiny_models.batch()) for model in models))
    assert planner.store.moved == 2 * INPUT


def test_selective_checkpointing():
    """A policy of the user decides what a layer saves, and its inputs go to the host."""

    def policy(context, op, *args, **kwargs):
        is_saved = str(op).startswith(("aten.mm", "aten.addmm"))
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    models = [llama(), llama()]
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    methods.enable(models[0], context_fn=contexts)
    planner = planned(models[0])
    for _ in range(2):
        allow(planner, 0)
        assert_bits(*(tiny_models.step(model, **tiny_models.batch()) for model in models))
    assert planner.store.moved == 3 * INPUT


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_pools_of_their_own(copied):
    model = llama()
    planner = planned(model)
    for _ in range(3):
        allow(planner, 1)
        expected = tiny_models.step(model, **tiny_models.batch())
    other = copied(model)
    (theirs,) = planners(other)
    assert theirs.store is not planner.store and theirs.store.pool is None
    assert_bits(tiny_models.step(other, **tiny_models.batch()), expected)
    assert theirs.store.moved == 2 * INPUT and theirs.store.pool is not planner.store.pool
    functions = [vars(layer)["_gradient_checkpointing_func"] for layer in other.model.layers]
    assert all(function.store is theirs.store for function in functions[:3])


def test_the_end_restores_the_model():
    model = llama()
    before = [dict(vars(module)) for module in model.modules()]
    planned(model)
    tiny_models.step(model, **tiny_models.batch())
    lt.checkpoint(model, None)
    assert [dict(vars(module)) for module in model.modules()] == before


class Meter:
    """A device whose memory a test sets: 1000 bytes at the start of a step, 2000 at its peak."""

    exact, limit, allocated, retries, ooms = False, 10**9, 1000, 0, 0

    def __init__(self, *_):
        pass

    def read(self):
        return self.allocated, self.retries, self.ooms

    def start(self):
        pass

    note = start

    def peak(self, counted):
        return 2000


REASONS = {
    "out of memory": ({"ooms": 1}, "a step ran out of memory"),
    "retries": ({"retries": 1}, "a step needed memory of the allocator's cache"),
    "peak": ({"limit": 1999}, "a step of 22 tokens does not fit with full checkpointing"),
    "start": ({"allocated": 10**9}, "a step of 22 tokens does not fit with full checkpointing"),
}


@pytest.mark.parametrize("choice", [None, False])
@pytest.mark.parametrize("reason", REASONS)
def test_auto_turns_it_on_when_it_must(reason, choice, monkeypatch, capsys):
    """Under memory="auto", and without a choice of the user."""
    meter = Meter()
    monkeypatch.setattr(device_memory, "CountedMemory", lambda *_: meter)
    model, expected = llama(), llama()
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        lt.checkpoint(model, "auto", offload=choice)
    (planner,) = planners(model)
    allow(planner, 0)
    changes, words = REASONS[reason]
    for number in range(6):
        if number == 3:
            assert not planner.store.is_on and not planner.store.moved
            vars(meter).update(changes)
        assert_bits(*(tiny_models.step(m, **tiny_models.batch()) for m in (model, expected)))
    assert (planner.store.moved > 0) == planner.store.is_on == (choice is None)
    printed = capsys.readouterr().err
    assert (f"{words}: inputs of layers are offloaded from now on" in printed) == (choice is None)


def test_a_longer_step_turns_it_on_before_it_runs(monkeypatch):
    meter = Meter()
    monkeypatch.setattr(device_memory, "CountedMemory", lambda *_: meter)
    model = llama(attn_implementation="sdpa")
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        lt.checkpoint(model, "auto")
    meter.limit = 2200
    (planner,) = planners(model)
    for tokens, is_on in ((11, False), (11, False), (12, False), (24, True), (11, True)):
        tiny_models.step(model, **tiny_models.batch(tokens=tokens))
        assert planner.store.is_on == (planner.store.moved > 0) == is_on


@pytest.mark.parametrize("choice", [True, False])
def test_a_memory_that_is_too_small_for_any_plan(choice, capsys):
    model = llama()
    lt.checkpoint(model, 1000, offload=choice)
    for _ in range(3):
        tiny_models.step(model, **tiny_models.batch())
    words = "of 0.00 MiB; the memory is too small for full checkpointing"
    words += "" if choice else ", offload=True needs less"
    assert words in lt.patch_report(model).checkpointing and words in capsys.readouterr().err


@pytest.mark.parametrize(
    "choice, error, message",
    [
        (-1, ValueError, "offload in bytes must be positive, got -1"),
        (0, ValueError, "offload in bytes must be positive, got 0"),
        ("cpu", TypeError, r"offload must be a bool, an int \(bytes of host memory\) or None, not str"),
        (0.5, TypeError, "not float"),
        (2**60, ValueError, f"offload asks for {2**60} bytes of host memory, [0-9]+ are available"),
    ],
)
def test_bad_offload(choice, error, message):
    with pytest.raises(error, match=f"liger.transformers.checkpoint: .*{message}"):
        lt.checkpoint(llama(), PLENTY, offload=choice)
