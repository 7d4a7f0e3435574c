# SPDX-License-Identifier: BSD-3-Clause
"""liger.transformers.checkpoint(offload=True) on a GPU: bits, peak memory, overlap of copies, a sanitizer
of streams."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("transformers")

import tiny_models
from combinations import lora
from planned_llama import PLENTY, SETTLING

import liger
import liger.transformers as lt
from liger.transformers.checkpointing import planner as planning
from liger.transformers.checkpointing.checkpoint import planners
from liger.transformers.checkpointing.copy_streams import Streams

pytestmark = pytest.mark.gpu


@pytest.fixture
def deterministic(monkeypatch):
    """Without it, or with warn_only, the backward of fused attention adds in any order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch asks for
    torch.use_deterministic_algorithms(True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield
    torch.use_deterministic_algorithms(False)


LAYERS, HIDDEN, TOKENS = 12, 1024, 4096
INPUT = TOKENS * HIDDEN * 2


def make(**settings):
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 2816, "head_dim": 64}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": TOKENS}
    settings = {**sizes, **heads, "attn_implementation": "sdpa", **settings}
    return liger.patch(tiny_models.make("llama", "cuda", torch.bfloat16, **settings))


def batch(tokens=TOKENS):
    given = tiny_models.batch("cuda", rows=1, tokens=tokens)
    return {name: given[name] for name in ("input_ids", "labels")}


def recomputing(model, **options):
    """Every layer is recomputed in every step."""
    lt.checkpoint(model, PLENTY * 1000, **options)
    (planner,) = planners(model)
    planner.allowed = 0
    return planner


def step(model, tokens=TOKENS):
    loss = model(**batch(tokens)).loss
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("bound", [True, 3 * 2**23, "some layers", "attention", "lora"])
def test_same_bits(bound, monkeypatch, deterministic):
    """Steps of several lengths, so that the pool is used again at other places."""
    # Narrow layers compute for less time than their copies take.
    monkeypatch.setattr(planning, "hides_copies", lambda microseconds, size: True)
    models = [make() for _ in range(2)]
    if bound == "lora":
        models = [lora(model, "q_proj", "down_proj", init_lora_weights=False) for model in models]
    planner = recomputing(models[0], offload=bound if isinstance(bound, int) else True)
    recomputing(models[1])
    level = {"some layers": 4, "attention": LAYERS}.get(bound, 0)
    planner.allowed = level
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    for tokens in (TOKENS, 1000, 2048, TOKENS, 3000, TOKENS):
        losses = [step(model, tokens) for model in models]
        assert torch.equal(*losses)
        for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) and (p.grad is None or torch.equal(p.grad, q.grad)), (
                name
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert planner.store.moved > 0 and (planner.store.refused > 0) == (bound == 3 * 2**23)
    assert planner.step.kept == level
    if bound == "attention":
        # Which layers keep attention at this level depends on measured times.
        assert planner.plan.counts(level)[1] > LAYERS // 2 and planner.store.moved > planner.store.inputs


def test_peak():
    """With gradients that exist before the step, all inputs but a few are missing in the peak."""
    peaks = []
    for choice in (False, True):
        model = make()
        planner = recomputing(model, offload=choice)
        for _ in range(4):
            model.zero_grad(set_to_none=False)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            step(model)
            peak = torch.cuda.max_memory_allocated() - start
        peaks.append(peak)
        assert planner.store.moved == (choice and (LAYERS - 1) * INPUT)
        del model, planner
    # One input stays, one is on its way back, and one or two are on their way out.
    assert (LAYERS - 4) * INPUT <= peaks[0] - peaks[1] <= LAYERS * INPUT


def test_copies_overlap():
    from torch.autograd import DeviceType

    # Layers of a real size, whose kernels take longer than the host needs to issue them.
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32}
    model, tokens = make(**sizes, max_position_embeddings=4 * TOKENS), 4 * TOKENS
    recomputing(model, offload=True)
    for _ in range(4):
        step(model, tokens)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(model, tokens)
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
    for direction in ("DtoH (Device -> Pinned)", "HtoD (Pinned -> Device)"):
        copies = [e.time_range for e in events if direction in e.name and e.time_range.elapsed_us() > 50]
        assert len(copies) >= LAYERS - 1, {e.name for e in events if "Memcpy" in e.name}
        others = [e.time_range for e in events if "Memcpy" not in e.name and "Memset" not in e.name]
        hidden = sum(
            max(0, min(copy.end, other.end) - max(copy.start, other.start))
            for copy in copies
            for other in others
        )
        assert hidden >= 0.6 * sum(copy.elapsed_us() for copy in copies), direction


PROGRAM = textwrap.dedent("""
    import sys
    import torch
    from liger.transformers.checkpointing import offload, planner as planning
    import liger.transformers as lt
    import tiny_models
    from liger.transformers.checkpointing.checkpoint import planners
    from planned_llama import MOST, attention_path, set_level

    broken, device = sys.argv[1:]
    offload.WORTH_MOVING = 1
    planning.path, planning.hides_copies = attention_path, lambda microseconds, size: True
    model = tiny_models.make("llama", device, num_hidden_layers=4, attn_implementation="sdpa")
    lt.checkpoint(model, 10**12, offload=True)
    (planner,) = planners(model)
    for part, level in (("inputs", 0), ("attention", MOST)):
        if part == broken:
            torch.cuda.Stream.wait_event = lambda stream, event: None
        for tokens in (11, 8, 11):
            set_level(model, level)
            tiny_models.step(model, **tiny_models.batch(device, tokens=tokens))
        if device == "cuda":
            torch.cuda.synchronize()
        store = planner.store
        assert store.inputs and (store.moved > store.inputs) == (part == "attention"), part
        assert planner.plan.counts(planner.step.kept)[1] == level, part
        print(part)
""")


def run_program(broken, device, **environment):
    """The program that moves the inputs of layers, then their attention, too; ``broken``: from which of them
    on no stream waits."""
    environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, broken, device]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("broken", ["", "inputs", "attention"])
def test_sanitizer_of_streams(broken):
    """torch's sanitizer finds no kernel without its wait, and finds some where no stream waits."""
    result = run_program(broken, "cuda", TORCH_CUDA_SANITIZER="1")
    found = "CSAN detected" in result.stdout + result.stderr
    assert found == bool(broken), result.stderr[-3000:]
    done = {"": ["inputs", "attention"], "inputs": [], "attention": ["inputs"]}
    assert result.stdout.split()[: len(done[broken])] == done[broken], result.stderr[-3000:]


def test_memory_of_the_host_that_cannot_be_pinned(monkeypatch):
    def refuse(self, size):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Streams, "block", refuse)
    model = make()
    planner = recomputing(model, offload=True)
    for _ in range(1 + SETTLING):
        step(model)
    assert planner.store.moved == 0 and planner.store.refused == (LAYERS - 1) * INPUT
    assert "more stay on the device for lack of host memory" in planner.summary


def test_a_capture_moves_nothing():
    model = make(num_hidden_layers=2)
    planner = recomputing(model, offload=True)
    for _ in range(2):
        step(model)
    with planner.store.layer():
        x = torch.ones(2**20, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            handle = planner.store.put(x)
    assert handle.get().data_ptr() == x.data_ptr()
