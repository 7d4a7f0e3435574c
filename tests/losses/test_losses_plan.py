"""What a loss holds on compute capability 9.0 beside its operands: allocations of the real code, without a device."""

import types

import pytest
import torch
from live_bytes import LiveBytes

from liger.losses import _chunks
from liger.ops._linear_chunks import Head

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
    ops = {name: lambda *_: None for name in ("logprobs", "gradients", "place_rows")} | {"dense": lambda t: t}
    stubs = {name: types.SimpleNamespace(default=function) for name, function in ops.items()}
    monkeypatch.setattr(torch.ops, "liger_sm90", types.SimpleNamespace(**stubs), raising=False)


def numbers_of(layout, hidden, vocab, budget):
    """As liger_sm90::plan gives them, with the most that the scratch of a chunk may be."""
    rows, group_rows = layout.parts * layout.groups * layout.length, layout.parts * layout.length
    first, counts, parts, hosted, panel_bytes, units_bytes, slack = torch.ops.liger.plan_chunks_sm90(
        rows, hidden, vocab, True, True, True, budget, group_rows=group_rows
    )
    numbers = [hosted, panel_bytes, units_bytes, slack, 0]
    for i, (start, count, split) in enumerate(zip(first, counts, parts, strict=True)):
        # The list, logits of targets, scales, one-hot parts, and sums of rows; one-hot parts of classes, readers.
        scratch = count * (4 + 8 + 8 + 4 * -(-vocab // 256)) + 8 * vocab + vocab // 32
        scratch += 4 * split * count * hidden if split > 1 else 0
        # Whole tiles, and every block of memory begins at a multiple of 1024.
        numbers += [start, count, split, int(i == 0), scratch + 16 * 1024]
    return numbers


def run(unit, sequences, length, hidden, vocab, budget=512 * MIB):
    """(the chunks, bytes at the peak) of one forward and its gradients."""
    layout = _chunks.Layout(*UNITS[unit](sequences, length))
    rows = sequences * length
    with torch.device("meta"):
        x, weight = (torch.empty(n, hidden, dtype=torch.bfloat16) for n in (rows, vocab))
        target, of_rows = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    head = Head(weight, None, 1.0, -100, None)
    call = _chunks.Call(x, target, head, layout, (True, True, False), True, budget, False, False)
    with LiveBytes(x, weight, target, of_rows) as memory:
        chunks = _chunks.Sm90Chunks(call, numbers_of(layout, hidden, vocab, budget))
        for groups in chunks.slices:
            chunks.read(groups, of_rows, of_rows[:0], target[:0])
            chunks.add(layout.cut(of_rows, groups), None)
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


def test_few_classes_leave_room_to_put_gradients_in_their_places():
    """By way of the memory of exponentials, or where that is next to nothing, of 64 bytes for each row."""
    chunks, peak = run("pair", 2048, 128, 256, 128, 512 << 10)
    assert len(chunks.slices) > 2
    assert chunks._extra.numel() == 64 * 2048 * 128
    _, peak_of_sequences = run("sequence", 1024, 256, 256, 128, 512 << 10)
    assert 0 < peak - peak_of_sequences < 64 * 2048 * 128
