# SPDX-License-Identifier: BSD-3-Clause
"""The chunks and the memory of an lm_head that ``liger plan`` prints."""

import json
import re

import pytest
import torch
from live_bytes import LiveBytes

import liger
import liger_cli as cli
from liger._core.head.sm90_plan import plan_chunks_sm90
from liger.cli import plan as plan_command
from liger.cli.plan import head_memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "hidden", "vocab"), [(256, 32, 4096), (16, 512, 2048)])
def test_the_memory_without_liger_is_what_eager_needs(tokens, hidden, vocab, dtype):
    ForCausalLMLoss = pytest.importorskip("transformers.loss.loss_utils").ForCausalLMLoss
    weight = torch.randn(vocab, hidden, dtype=dtype, requires_grad=True)
    states = torch.randn(1, tokens, hidden, dtype=dtype, requires_grad=True)
    target = torch.randint(vocab, (1, tokens))
    with LiveBytes(states, weight, target) as memory:
        ForCausalLMLoss(torch.nn.functional.linear(states, weight), target, vocab).backward()
    planned = head_memory(tokens, hidden, vocab, dtype)["peak"]
    # What eager keeps besides are vectors of one number per token, and the two scalars of the loss.
    assert planned <= memory.peak <= planned + 64 * tokens


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [None, 32 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hidden", [1024, 1152])  # whole tiles, and padded sums of split-K
def test_the_memory_with_liger_is_what_the_kernels_need(monkeypatch, hidden, budget, dtype):
    tokens, vocab = 8192, 65536
    if budget is None:
        monkeypatch.delenv("LIGER_MEMORY_BUDGET", raising=False)
    else:
        monkeypatch.setenv("LIGER_MEMORY_BUDGET", str(budget))
    weight = torch.randn(vocab, hidden, dtype=dtype, device="cuda", requires_grad=True)
    states = torch.randn(tokens, hidden, dtype=dtype, device="cuda", requires_grad=True)
    target = torch.randint(vocab, (tokens,), device="cuda")
    with liger.use_backend("cuda"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        liger.fused_linear_ce(states, weight, target).backward()
        used = torch.cuda.max_memory_allocated() - before
    planned = head_memory(tokens, hidden, vocab, dtype, capability=torch.cuda.get_device_capability())
    # Beside the plan: the workspace of cuBLAS, and what the allocator rounds up.
    if planned["engine"] == "sm90":
        assert abs(used - planned["peak_liger"]) <= 4 << 20
    else:
        assert used <= planned["peak_liger"] + (64 << 20)


def test_plan_as_json_is_the_planner(capsys, monkeypatch):
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "1G")
    arguments = ["plan", "--tokens=8192", "--hidden=2048", "--vocab=128256", "--capability=8.0", "--json"]
    assert cli.main([*arguments, "--budget", "256M"]) == 0
    found = json.loads(capsys.readouterr().out)
    plan = torch.ops.liger.plan_chunks(8192, 2048, 128256, 2, True, True, 256 << 20)
    assert [found[key] for key in ("chunk_rows", "chunks", "logits_liger", "accumulator")] == list(plan)
    assert found["accumulator"] == 4 * 2048 * 128256
    assert found["peak_liger"] < found["peak"]
    assert cli.main([*arguments, "--accum", "same"]) == 0
    assert json.loads(capsys.readouterr().out)["accumulator"] == 0


SIZES_90 = {"tokens": 16384, "hidden": 4096, "vocab": 128256}
ARGUMENTS_90 = ["plan", *(f"--{name}={value}" for name, value in SIZES_90.items())]


@pytest.mark.parametrize("budget", ["64M", "512M", "8G"])
@pytest.mark.parametrize("accum", ["fp32", "same"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_plan_for_capability_9_0_is_its_planner(capsys, monkeypatch, budget, accum, dtype):
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "")
    chosen = [f"--accum={accum}", f"--budget={budget}", f"--dtype={dtype}"]
    assert cli.main([*ARGUMENTS_90, "--capability=9.0", "--json", *chosen]) == 0
    found = json.loads(capsys.readouterr().out)
    memory = {"64M": 64 << 20, "512M": 512 << 20, "8G": 8 << 30}[budget]
    plan = plan_chunks_sm90(
        *SIZES_90.values(), True, True, accum == "fp32", memory,
        clusters=plan_command._clusters(),
    )  # fmt: skip
    if not plan.chunks:
        assert (budget, accum) == ("64M", "same") and found["engine"] == "generic"
        return
    assert found["engine"] == "sm90"
    rows = [c.rows for c in plan.chunks]
    panels = 128256 // 128 + plan.panel_offset
    assert found["first_chunk_rows"] == rows[0] and found["chunks"] == len(rows)
    assert found["chunk_rows"] == (rows[1] if len(rows) > 1 else rows[0])
    workspace = panels * plan.workspace_panel_bytes
    assert found["logits_liger"] + found["accumulator"] == workspace
    assert found["accumulator"] == panels * plan.scale_bytes
    # The gradients, the panel workspace, and no more than a copy of a chunk's rows with its sums and splits.
    gradients = 2 * 4096 * (16384 + 128256)
    assert gradients + workspace < found["peak_liger"]
    of_row = 2 * 4096 + 4 * (668 + 4) + (668 + 12 if dtype == "fp16" else 0)
    splits = [4 * 4096 if c.k_splits > 1 else 0 for c in plan.chunks]
    most = (
        8 * 128256
        + 12 * 16384
        + max(c.rows * (of_row + of_splits) for c, of_splits in zip(plan.chunks, splits, strict=True))
    )
    assert found["peak_liger"] <= gradients + workspace + plan.panel_offset * 128 * 4096 * 2 + most
    assert plan.rows_in_grad_weight == 4096


@pytest.mark.parametrize(
    "changed",
    [["--capability=8.0"], ["--capability=10.0"], ["--dtype=fp32", "--budget=2G"], ["--hidden=4100"]],
)
def test_plan_of_the_generic_engine(capsys, monkeypatch, changed):
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "512M")
    assert cli.main([*ARGUMENTS_90, "--capability=9.0", *changed]) == 0
    assert re.search(r"\n[45] chunks of \d+ rows, by the generic engine\n", capsys.readouterr().out)


def test_plan_for_capability_9_0_as_text(capsys, monkeypatch):
    monkeypatch.setattr(plan_command, "_clusters", lambda: 66)
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "512M")
    for tokens, accum, chunks in (
        (4096, "fp32", "1 chunk of 4096 rows"),
        (16384, "same", "6 chunks: 6144 rows, then 2048 at a time"),
    ):
        assert cli.main([*ARGUMENTS_90, f"--tokens={tokens}", "--capability=9.0", f"--accum={accum}"]) == 0
        assert f"\n{chunks}, by the engine of compute capability 9.0\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "gemms", "kept", "words"),
    [
        ([], 4, 0, "4 GEMMs, 3 with a budget of 3.9 GiB"),
        (
            ["--budget=4G"],
            3,
            2 * 16384 * 128256,
            "3 GEMMs, with 3.9 GiB of exponentials kept for the backward",
        ),
        (["--tokens=2000"], 3, 2 * 2048 * 128256, "3 GEMMs, with 501.0 MiB of exponentials kept"),
        (["--tokens=255"], 4, 0, "4 GEMMs"),
        (["--budget=4G", "--capability=8.0"], 4, 0, "4 GEMMs"),
        (["--budget=4G", "--dtype=fp32"], 4, 0, "4 GEMMs"),
        (["--budget=4G", "--dtype=fp16"], 3, 2 * 16384 * 128256, "3 GEMMs"),
    ],
)
def test_plan_of_logprobs(capsys, monkeypatch, changed, gemms, kept, words):
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "512M")
    arguments = [*ARGUMENTS_90, "--capability=9.0", *changed]
    assert cli.main(arguments) == 0
    assert re.search(f"\nfused_linear_logprobs: {words}", capsys.readouterr().out)
    assert cli.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["logprobs_gemms"], found["logprobs_kept"]) == (gemms, kept)


def test_plan_is_for_the_device_at_hand(capsys, monkeypatch):
    for capability, engine in ((None, "generic"), ((8, 0), "generic"), ((9, 0), "sm90")):
        monkeypatch.setattr(plan_command, "_device_capability", lambda c=capability: c)
        monkeypatch.setattr(plan_command, "_clusters", lambda: 66)
        assert cli.main([*ARGUMENTS_90, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["engine"] == engine


def test_plan_as_text(capsys, monkeypatch):
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "")
    assert cli.main(["plan", "--tokens", "4096", "--hidden", "64", "--vocab", "1000", "--dtype", "fp32"]) == 0
    out = capsys.readouterr().out
    assert "4096 tokens, hidden 64, vocabulary 1000, float32, budget 512M\n1 chunk of 4096 rows" in out
    assert re.search(r"logits +46.9 MiB +15.6 MiB\n", out)  # 12 and 4 bytes per logit


SIZES = {"tokens": "8", "hidden": "64", "vocab": "1000"}
NO_SIZE = "expected an integer above 0, such as 8192 or 8K, got '{}'"
NO_BYTES = "expected a number of bytes above 0, such as 8192 or 8K, got '{}'"
CAPABILITIES = ("9", "90a", "9.x", "-9.0", "", "99.0", "9.1", "7.5")
REFUSED = [
    *(("capability", text, "expected a compute capability such as 9.0, ") for text in CAPABILITIES),
    *(("budget", text, NO_BYTES) for text in ("lots", "-1M", "", "0", "1.5G", "1T", " 1")),
    *((option, text, NO_SIZE) for option in SIZES for text in ("many", "-5", "0", "2.5K")),
    *((option, "9" * 20, "expected at most ") for option in SIZES),
]  # fmt: skip


@pytest.mark.parametrize(("option", "text", "words"), REFUSED)
def test_arguments_that_cannot_be_read(capsys, option, text, words):
    with pytest.raises(SystemExit):
        cli.main(["plan", *(f"--{name}={value}" for name, value in {**SIZES, option: text}.items())])
    assert f"argument --{option}: {words.format(text)}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tokens": str(2**40), "vocab": str(2**31)}, "need more than 2^63 bytes"),
        ({"budget": "1"}, "--budget is 1, expected at least the logits of one row, 2000 bytes"),
        ({"budget": "1K"}, "--budget is 1K, expected at least the logits of one row"),
    ],
)
def test_plan_with_bad_input(capsys, monkeypatch, changed, words):
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "512M")
    assert cli.main(["plan", *(f"--{name}={value}" for name, value in {**SIZES, **changed}.items())]) == 2
    assert words in capsys.readouterr().err


def test_plan_of_rounded_sizes(capsys):
    plans = []
    for sizes in (["8k", "2K", "1m"], ["8192", "2048", str(2**20)]):
        pairs = zip(("--tokens", "--hidden", "--vocab"), sizes, strict=True)
        assert cli.main(["plan", *(word for pair in pairs for word in pair)]) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1] and "8192 tokens, hidden 2048, vocabulary 1048576" in plans[0]


def test_plan_says_for_which_gpu(capsys, monkeypatch):
    monkeypatch.setattr(plan_command, "_clusters", lambda: 66)
    for chosen, found, words in (
        ([], None, "planned for any GPU but one of compute capability 9.0, since "),
        ([], (9, 0), "planned for the GPU of this machine, compute capability 9.0\n"),
        (["--capability=8.0"], (9, 0), "planned for compute capability 8.0\n"),
    ):
        monkeypatch.setattr(plan_command, "_device_capability", lambda c=found: c)
        assert cli.main([*ARGUMENTS_90, *chosen]) == 0
        assert words in capsys.readouterr().out


def test_plan_reads_the_variables(capsys, monkeypatch):
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "lots")
    assert cli.main(ARGUMENTS_90) == 2
    assert "LIGER_MEMORY_BUDGET: expected a positive number of bytes" in capsys.readouterr().err
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "4G")
    for text, engine, gemms in (("0", "generic", 4), ("1", "sm90", 3), ("", "sm90", 3)):
        monkeypatch.setenv("LIGER_WGMMA", text)
        assert cli.main([*ARGUMENTS_90, "--capability=9.0", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["engine"], found["logprobs_gemms"]) == (engine, gemms)
    monkeypatch.setenv("LIGER_WGMMA", "on")
    assert cli.main([*ARGUMENTS_90, "--capability=9.0"]) == 2
    assert "LIGER_WGMMA: expected 0 or 1, got 'on'" in capsys.readouterr().err
