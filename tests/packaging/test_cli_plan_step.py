# SPDX-License-Identifier: BSD-3-Clause
"""``liger plan --model`` with a batch: what fits, and how peaks and speeds compare with measured ones."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
from planned_llama import LLAMA_1B

import liger
import liger_cli as cli
from liger.cli import _plan_model
from liger.cli._step_plan import Step, Way
from liger.cli.plan import head_memory
from liger.transformers.checkpointing.device_memory import MAX_HEADROOM
from liger_cli.devices import GPUS, OPTIMIZERS

LLAMA_8B = LLAMA_1B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
MEMORY, SPEED = 0.05, 0.1
# Elements of the embedding, and of the adapters of rank 1.
EMBEDDING = 128256 * 2048
ADAPTERS = 16 * ((2048 + 2048) * 2 + (2048 + 512) * 2 + (2048 + 8192) * 3)


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """Step of a configuration on an H200 or H100, with an optimizer and a rank; each model is built once."""
    path, models = tmp_path_factory.mktemp("step") / "config.json", {}

    def head_peak(*problem):
        *problem, is_trained = problem
        return head_memory(*problem, True, (9, 0), is_trained)["peak_liger"]

    def made(settings=LLAMA_1B, optimizer="adamw_torch_fused", rank=None):
        text = json.dumps(settings)
        if text not in models:
            path.write_text(text)
            models[text] = liger.patch(_plan_model._model(str(path)), verbose=False)
        return Step(models[text], torch.bfloat16, OPTIMIZERS[optimizer], rank, head_peak)

    return made


def full(count):
    return Way("full checkpointing", (count, 0, 0))


# --- measured steps -----------------------------------------------------------------------------------------


def measured(experiment):
    """The cells of liger on one GPU, each with its GPU: (cell, Gpu)."""
    path = Path(__file__).parents[2] / "benchmarks/results/experiments" / f"{experiment}.json"
    result = json.loads(path.read_text())
    for cell in result["cells"].values():
        if cell["status"] == "ok" and cell["gpus"] == 1 and cell["method"].split(",")[0] == "liger":
            device = result["environments"][cell["environment"]]["device"]
            yield cell, GPUS["h100" if "H100" in device else "h200"]


def shape(cell):
    """(tokens, length) of a cell."""
    batch, length = map(int, cell["size"].split("x"))
    return batch * length, length


def assert_as_measured(step, way, cell, gpu, tokens, length):
    """The peak, and the speed where the GPU, not the host, takes the time."""
    assert step.peak(way, tokens) == pytest.approx(cell["peak_bytes"], rel=MEMORY), cell
    if cell["host_ms"]["median"] > 0.8 * cell["ms"]["median"]:
        return 0
    speed = tokens / step.seconds(way, tokens, length, gpu)
    assert speed == pytest.approx(cell["tokens_per_second"], rel=SPEED), cell
    return 1


def test_plans_are_as_measured(step):
    """Every plan of E16, by what its layers keep, but those with tiled MLPs."""
    made, found = step(), dict.fromkeys(("plain", "offload", "released"), 0)
    for cell, gpu in measured("E16"):
        if "tiled MLP" in cell["method"]:
            continue
        way = Way(
            cell["method"],
            tuple(cell.get("layers", (16, 0, 0))),
            recompute=True,
            offload="offload" in cell["method"],
            released="released" in cell["method"],
        )
        tokens, length = shape(cell)
        assert_as_measured(made, way, cell, gpu, tokens, length)
        found["released" if way.released else "offload" if way.offload else "plain"] += 1
        if "moved_bytes" in cell:
            assert made.kept(way)[1] * tokens == pytest.approx(cell["moved_bytes"], rel=MEMORY), cell
    assert found["plain"] >= 6 and found["offload"] >= 4 and found["released"] >= 2


@pytest.mark.parametrize(
    ("experiment", "settings", "least"), [("E2", LLAMA_8B, 3), ("E3", LLAMA_1B, 3), ("E4", LLAMA_1B, 3)]
)
def test_steps_with_full_checkpointing_are_as_measured(experiment, settings, least, step):
    made = step(settings)
    speeds = [
        assert_as_measured(made, full(made.layers.count), cell, gpu, *shape(cell))
        for cell, gpu in measured(experiment)
    ]
    assert sum(speeds) >= least


def test_peaks_of_other_optimizers_and_of_adapters_are_as_measured(step):
    """E9: 4 x 1024 tokens. bitsandbytes alone has 8-bit states of the embedding, unlike the Trainer."""
    cells = {cell["size"]: cell["peak_bytes"] for cell, _ in measured("E9")}
    lora, eight_bits = step(rank=16), step(optimizer="adamw_bnb_8bit")
    difference = 2 * EMBEDDING * (4 - OPTIMIZERS["adamw_bnb_8bit"].size)
    for cell, predicted in {
        "LoRA": lora.peak(full(16), 4096),
        "LoRA, nothing recomputed": lora.peak(Way("", (0, 0, 16)), 4096),
        "8-bit AdamW": eight_bits.peak(full(16), 4096) - difference,
    }.items():
        assert predicted == pytest.approx(cells[cell], rel=MEMORY), cell


# --- arithmetic ---------------------------------------------------------------------------------------------


def test_bytes_whatever_the_batch(step):
    adamw, sgd, lion, lora = step(), step(optimizer="sgd"), step(optimizer="lion_8bit"), step(rank=8)
    layer = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048
    count = EMBEDDING + 16 * layer + 2048
    assert (adamw.weights, adamw.gradients, adamw.states) == (2 * count, 2 * count, 4 * count)
    assert sgd.states == 0
    assert lion.states == pytest.approx(1.0156 * (count - EMBEDDING) + 4 * EMBEDDING, rel=1e-4)
    # Float32 adapters, and two moments of them.
    trained = 8 * ADAPTERS
    assert (lora.weights, lora.gradients, lora.states) == (2 * count + 4 * trained, 4 * trained, 8 * trained)


def test_moments_of_a_step(step):
    """The start of the backward, the first recomputed layer, the end, the embedding alone."""
    made, tokens, width, lse, count = step(), 8192, 2 * 2048, 4 * 32, 16
    attention, offload = Way("", (0, count, 0)), Way("", (0, count, 0), offload=True)
    assert made.kept(full(count)) == (count * width, 0)
    assert made.kept(attention) == (count * (2 * width + lse), 0)
    assert made.kept(offload) == (5 * width + 2 * lse, (count - 1) * (2 * width + lse))
    fixed, head, layer = made.weights + made.states, 2 * EMBEDDING, made.layers.layer * tokens
    start = made.kept(attention)[0] * tokens + max(made.head_peak(tokens), head + layer)
    assert made.peak(attention, tokens) == fixed + max(start, made.gradients + layer)
    # The gradients of all weights outweigh inputs that have left.
    assert made.peak(offload, tokens) == fixed + made.gradients + layer
    released = Way("", (0, count, 0), offload=True, released=True)
    start = made.kept(offload)[0] * tokens + head + layer
    assert made.peak(released, tokens) == fixed + max(start, head + made.largest + layer)
    assert made.largest == 2 * 2048 * 8192
    # A gradient of the lm_head that is not tied has been used before the layers; the embedding's comes last.
    untied = step(LLAMA_1B | {"tie_word_embeddings": False})
    small = max(head, untied.head_peak(64) + 64 * untied.kept(released)[0])
    assert untied.peak(released, 64) == untied.weights + untied.states + small
    # Layers that keep everything have their gradients when the first layer is recomputed.
    mixed = Way("", (8, 0, 8), recompute=True)
    found = made.peak(mixed, 2**16) - fixed
    middle = (8 * width + made.layers.layer) * 2**16 + head + (made.gradients - head) // 2
    start = (8 * width + made.saved_recomputing // 2) * 2**16 + made.head_peak(2**16)
    assert found >= max(start, middle)


def test_flops_of_windows_and_of_chosen_experts(step):
    """Of a long sequence a window takes its share of the FLOPs; of experts those that are chosen count."""
    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "vocab_size": 256,
    }
    from liger.transformers.checkpointing.saved_bytes import forward_flops

    dense = step(small | {"model_type": "qwen3"})
    windows = small | {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 128}
    windowed = step(windows | {"layer_types": ["sliding_attention", "full_attention"]})
    gemms, kernels = forward_flops(dense.model, 1024)
    assert gemms == 2 * 2 * (4 * 64 * 64 + 3 * 64 * 128)
    # Queries and keys, weights and values; half of the pairs; at 0.65 of the speed of GEMMs.
    assert kernels == pytest.approx(2 * 2 * 2 * 64 * 512 / 0.65)
    share = (128 - 128**2 / 2048) / 512
    assert forward_flops(windowed.model, 1024)[1] == pytest.approx(kernels * (1 + share) / 2)
    experts = small | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    sparse = step(experts)
    assert forward_flops(sparse.model, 1024)[0] == 2 * 2 * (4 * 64 * 64 + 64 * 8 + 2 * 3 * 64 * 128)


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_1B | {"num_hidden_layers": 8}))
    return str(path)


def planned(capsys, *arguments):
    assert cli.main(["plan", "--json", "--model", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("of_run", [(), ("--lora", "8"), ("--optimizer", "sgd")], ids=lambda given: given[:1])
def test_the_next_batch_does_not_fit(of_run, config, capsys):
    memory = 12 * 2**30
    found = planned(capsys, config, "--length", "2K", "--memory", "12G", *of_run)
    assert found["memory"] == memory
    batches = {}
    for number, way in enumerate(found["ways"]):
        batches[way["way"]] = batch = way["batch"]
        assert way["peak"] <= memory
        for tokens, peak in ((batch * 2048, way["peak"]), ((batch + 1) * 2048, memory + 1)):
            (same,) = planned(capsys, config, "--tokens", str(tokens), *of_run)["ways"][number : number + 1]
            assert same["way"] == way["way"] and "batch" not in same
            assert same["peak"] == peak if peak <= memory else same["peak"] > memory
    # Each needs less than the one before it, and released gradients come last.
    *kept, last = list(batches.values())[:6] + list(batches.values())[-1:]
    assert kept == sorted(kept) and kept[-1] <= last
    assert ("offload, released gradients" in batches) == ("--lora" not in of_run)
    assert batches["nothing recomputed"] < batches["recompute=True"] < batches["full checkpointing"]


def test_table_of_what_fits(config, capsys):
    assert cli.main(["plan", "--model", config, "--length", "128K", "--gpu", "H100", "--lora", "8"]) == 0
    out = capsys.readouterr().out
    free = GPUS["h100"].memory * (1 - MAX_HEADROOM)
    assert f"llama, 8 layers, bfloat16, LoRA of rank 8: sequences of 131,072 tokens in {free:.1f} GiB" in out
    assert "states of adamw_torch_fused 21.5 MiB" in out
    (header,) = (line for line in out.splitlines() if "largest batch" in line)
    assert [word in header for word in ("peak", "in host memory", "about tokens/s")] == [True] * 3
    assert "does not fit" not in out
    assert cli.main(["plan", "--model", config, "--length", "128K", "--memory", "6G"]) == 0
    out = capsys.readouterr().out
    assert "about tokens/s" not in out
    assert "Where the largest batch is 0, the row is of a batch of 1, which does not fit." in out


def test_speeds_need_a_gpu_and_a_length(config, capsys):
    ways = planned(capsys, config, "--tokens", "64K", "--length", "8K", "--gpu", "h200")["ways"]
    speeds = {way["way"]: way["tokens_per_second"] for way in ways}
    assert speeds["nothing recomputed"] > speeds["checkpoint, attention kept"] > speeds["full checkpointing"]
    slower = planned(capsys, config, "--tokens", "64K", "--length", "8K", "--gpu", "a100")["ways"]
    assert all(a["tokens_per_second"] < b["tokens_per_second"] for a, b in zip(slower, ways, strict=True))
    longer = planned(capsys, config, "--tokens", "64K", "--length", "64K", "--gpu", "h200")["ways"]
    assert all(a["tokens_per_second"] < b["tokens_per_second"] for a, b in zip(longer, ways, strict=True))
    for others in (("--tokens", "64K"), ("--length", "8K", "--gpu", "h200", "--dtype", "fp32")):
        assert "tokens_per_second" not in planned(capsys, config, *others)["ways"][0]


def test_a_memory_that_the_weights_exceed(config, capsys):
    assert cli.main(["plan", "--model", config, "--length", "1K", "--memory", "1G"]) == 2
    captured = capsys.readouterr()
    message = "the weights and the states of adamw_torch_fused need 4.2 GiB, more than the memory, 1.0 GiB"
    assert not captured.out and captured.err == f"liger plan --model {config}: {message}\n"


@pytest.mark.parametrize(
    ("option", "given", "words"),
    [
        ("--memory", "0", "expected a number of bytes above 0"),
        ("--memory", "lots", "expected a number of bytes above 0"),
        ("--length", "0", "expected an integer above 0"),
        ("--lora", "0", "expected an integer above 0, got '0'"),
        ("--gpu", "h300", "invalid choice: 'h300' (choose from"),
        ("--optimizer", "adamw", "invalid choice: 'adamw' (choose from"),
    ],
)
def test_options_out_of_range(option, given, words, config, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", "--model", config, option, given])
    assert end.value.code == 2
    assert words in capsys.readouterr().err
