# SPDX-License-Identifier: BSD-3-Clause
"""What a loss holds on compute capability 9.0 beside its operands: allocations of the real code, without a
device."""

import types

import pytest
import torch
from live_bytes import LiveBytes

from liger._core.head.lm_head import LMHead
from liger._core.head.sm90_plan import ENGINE, LinearCePlan, plan_chunks_sm90
from liger.losses import _chunks

MIB = 1 << 20
# Sequences, length, hidden size, classes.
FULL = 8, 1024, 4096, 128256
UNITS = {
    "token": lambda s, n: (1, s * n, 1),
    "sequence": lambda s, n: (1, s, n),
    "pair": lambda s, n: (2, s // 2, n),
}


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    """The engine's ops do nothing here: what they allocate is nothing on a device either."""
    ops = {name: lambda *_: None for name in ("logprobs", "gradients", "permute_rows")} | {
        "dense": lambda t: t
    }
    stubs = {name: types.SimpleNamespace(default=function) for name, function in ops.items()}
    monkeypatch.setattr(torch.ops, "liger_sm90", types.SimpleNamespace(**stubs), raising=False)


def plan_of(layout, hidden, vocab, budget):
    """As Sm90Chunks has it from liger_sm90::plan, with the most that the workspace of a chunk may be."""
    rows, group_rows = layout.parts * layout.groups * layout.length, layout.parts * layout.length
    plan = plan_chunks_sm90(rows, hidden, vocab, True, True, True, budget, group_rows=group_rows)
    workspaces = []
    for _, count, k_splits in plan.chunks:
        # Index, logits of targets, scales, one-hot terms, and sums of rows; one-hot terms of classes, read
        # counts.
        workspace = count * (4 + 8 + 8 + 4 * -(-vocab // ENGINE.logits_tile)) + 8 * vocab + vocab // 32
        workspace += 4 * count * hidden if k_splits > 1 else 0
        # Whole tiles, and every buffer is aligned to 1024 bytes.
        workspaces.append(workspace + 16 * 1024)
    return plan, [int(c.first == 0) for c in plan.chunks], workspaces


def run(unit, sequences, length, hidden, vocab, budget=512 * MIB):
    """(the chunks, bytes at the peak) of one forward and its gradients."""
    layout = _chunks.Layout(*UNITS[unit](sequences, length))
    rows = sequences * length
    with torch.device("meta"):
        x, weight = (torch.empty(n, hidden, dtype=torch.bfloat16) for n in (rows, vocab))
        target, of_rows = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    head = LMHead(weight, None, 1.0, -100, None)
    call = _chunks.ChunkArguments(x, target, head, layout, (True, True, False), True, budget, False, False)
    with LiveBytes(x, weight, target, of_rows) as memory:
        chunks = _chunks.Sm90Chunks(call, *plan_of(layout, hidden, vocab, budget))
        for groups in chunks.slices:
            chunks.read(groups, of_rows, of_rows[:0], target[:0])
            chunks.add(layout.view(of_rows, groups), None)
        grads = chunks.finish()
    assert [g.shape for g in grads] == [(rows, hidden), (vocab, hidden), (0,)]
    return chunks, memory.peak


@pytest.mark.parametrize("unit", UNITS)
def test_peak_memory(unit):
    """GRPO, KTO, and DPO, ORPO, CPO and SimPO: both gradients (1066 MiB), and the budget."""
    chunks, peak = run(unit, *FULL)
    rows = [(s.stop - s.start) * chunks._layout.parts * chunks._layout.length for s in chunks.slices]
    assert rows == [4096, 2048, 2048]
    assert 1570 * MIB < peak <= 1590 * MIB < 1600 * MIB


def test_pairs_need_what_sequences_need():
    sizes = [(10, 77, 256, 1408, 1100 << 10), (8, 203, 512, 2048, 3 * MIB), (32, 128, 256, 2048, 2 * MIB)]
    # The last: a first chunk for whose rows no later gradients have room.
    for sequences, length, hidden, vocab, budget in [*sizes, (*FULL, 700 * MIB)]:
        pairs, peak = run("pair", sequences, length, hidden, vocab, budget)
        # Sequences of twice the length: chunks of as many rows.
        other, peak_of_sequences = run("sequence", sequences // 2, 2 * length, hidden, vocab, budget)
        assert len(pairs.slices) > 1 and pairs.slices == other.slices
        assert peak == peak_of_sequences


def test_few_classes_leave_room_to_permute_gradients():
    """In the panel workspace, or if that is too small in 64 bytes per row."""
    chunks, peak = run("pair", 2048, 128, 256, 128, 512 << 10)
    assert len(chunks.slices) > 2
    assert chunks._panel_workspace.numel() == 64 * 2048 * 128
    _, peak_of_sequences = run("sequence", 1024, 256, 256, 128, 512 << 10)
    assert 0 < peak - peak_of_sequences < 64 * 2048 * 128


def test_plan_survives_its_encoding():
    plan = plan_of(_chunks.Layout(*UNITS["pair"](64, 512)), 4096, 128256, 512 * MIB)[0]
    assert len(plan.chunks) > 1
    assert LinearCePlan.decode(plan.encode()) == plan
