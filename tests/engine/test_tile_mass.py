"""liger.debug.tile_mass without a GPU: the reference in torch, the numbers that C++ and Python share, and refusals."""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from tile_mass_cases import sloped_layer

import liger
from liger._core.sm90_plan import TILE_CLASSES
from liger.debug import TileMassCounts, _tile_mass, tile_mass, tile_mass_of_logits

SOURCES = Path(__file__).parents[2] / "csrc" / "linear_ce" / "sm90"


def counted_one_by_one(logits, target, ignore_index=-100):
    """The definition, tile by tile and row by row."""
    rows = [i for i, t in enumerate(target.tolist()) if t != ignore_index]
    found = TileMassCounts(0, 0, (0, 0, 0), (0, 0, 0))
    for first, start in itertools.product(range(0, len(rows), 128), range(0, logits.shape[1], TILE_CLASSES)):
        tile = rows[first : first + 128]
        classes = range(start, min(start + TILE_CLASSES, logits.shape[1]))
        mass = max(math.fsum(logits[i].double().softmax(-1)[list(classes)].tolist()) for i in tile)
        free = not any(int(target[i]) in classes for i in tile)
        below = [mass < threshold for threshold in found.thresholds]
        found = TileMassCounts(
            found.tiles + 1,
            found.tiles_without_target + free,
            tuple(a + b for a, b in zip(found.below, below, strict=True)),
            tuple(a + (b and free) for a, b in zip(found.below_without_target, below, strict=True)),
        )
    return found


@pytest.mark.parametrize(
    ("rows", "vocab", "ignored"),
    [(256, 2048, 0.0), (300, 2049, 0.3), (129, 4097, 0.0), (140, 1000, 0.9), (1, 191, 0.0)],
)
def test_reference_follows_the_definition(rows, vocab, ignored):
    x, weight, target = sloped_layer(rows, 64, vocab, "cpu", ignored, torch.float32)
    logits = x @ weight.T
    found = tile_mass_of_logits(logits, target)
    assert found == counted_one_by_one(logits, target)
    assert found.tiles == -(-int((target >= 0).sum()) // 128) * -(-vocab // TILE_CLASSES)
    if vocab > 2000:
        assert 0 < found.below[2] < found.below[0] < found.tiles
        assert 0 < found.below_without_target[0] < found.below[0]


def test_largest_mass_of_the_rows_decides():
    """One row of 128 with half of its mass in a tile; below is strict; a target counts wherever its mass is."""
    probabilities = torch.zeros(130, 2 * TILE_CLASSES, dtype=torch.float64)
    probabilities[:, 0] = 1
    probabilities[:, TILE_CLASSES] = 2.0**-16
    probabilities[127, TILE_CLASSES] = 1
    target = torch.zeros(130, dtype=torch.int64)
    target[129] = 300
    found = tile_mass_of_logits(probabilities.log(), target)
    # The mass of the second tile of the last rows is 2^-16 / (1 + 2^-16).
    assert found == TileMassCounts(4, 1, (1, 1, 0), (0, 0, 0))
    assert found.shares == (0.25, 0.25, 0.0) and found.shares_without_target == (0.0, 0.0, 0.0)
    target[129] = 0
    assert tile_mass_of_logits(probabilities.log(), target).below_without_target == (1, 1, 0)
    probabilities[:, 0] = 1 - 2.0**-16
    assert tile_mass_of_logits(probabilities.log(), target, thresholds=[2.0**-16]).below == (0,)


def test_ignored_rows_are_left_out():
    x, weight, target = sloped_layer(700, 32, 3000, "cpu", 0.5, torch.float32)
    logits = x @ weight.T
    live = target >= 0
    assert tile_mass_of_logits(logits, target) == tile_mass_of_logits(logits[live], target[live])
    moved = torch.where(live, target, 7)
    assert tile_mass_of_logits(logits, moved, ignore_index=7) == tile_mass_of_logits(logits, target)
    none = tile_mass_of_logits(logits, torch.full_like(target, -100))
    assert none.tiles == 0 and all(math.isnan(share) for share in none.shares)


def test_leading_dimensions_and_targets_out_of_range():
    logits, target = torch.randn(2, 3, 300), torch.tensor([[0, 299, 300], [-1, 5, 6]])
    assert tile_mass_of_logits(logits, target).tiles_without_target == 0
    assert tile_mass_of_logits(logits, target.clamp(250, 255)).tiles_without_target == 1
    outside = torch.full((2, 3), 300)
    assert tile_mass_of_logits(logits, outside).tiles_without_target == 2


def test_not_a_number_is_below_no_threshold():
    logits = torch.zeros(2, 2 * TILE_CLASSES)
    logits[:, TILE_CLASSES:] = -50
    target = torch.zeros(2, dtype=torch.int64)
    assert tile_mass_of_logits(logits, target).below == (1, 1, 1)
    logits[1, 3] = torch.nan
    assert tile_mass_of_logits(logits, target).below == (0, 0, 0)


def test_shapes_that_do_not_match():
    with pytest.raises(RuntimeError, match=r"target has shape \(4,\), expected that of logits \(3, 5\)"):
        tile_mass_of_logits(torch.zeros(3, 5), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="tile_mass_of_logits: target has shape"):
        tile_mass_of_logits(torch.zeros(()), torch.zeros((), dtype=torch.int64))


def test_the_bound_of_the_documents():
    """Gradients without the tiles below a threshold differ by no more than docs/performance says."""
    x, weight, target = (
        t.double() if t.is_floating_point() else t
        for t in sloped_layer(256, 64, 16 * TILE_CLASSES, "cpu", 0.0)
    )
    probabilities = (x @ weight.T).softmax(-1)
    one_hot = torch.nn.functional.one_hot(target, weight.shape[0])
    upstream = torch.rand(len(x), 1, dtype=torch.float64)
    mass = probabilities.view(2, 128, 16, TILE_CLASSES).sum(-1)
    for threshold in _tile_mass.THRESHOLDS:
        skipped = mass.amax(1) < threshold  # (row tiles, class tiles)
        kept = (~skipped).repeat_interleave(128, 0).repeat_interleave(TILE_CLASSES, 1)
        assert 0 < skipped.sum() < skipped.numel()
        full, short = (upstream * (p - one_hot) for p in (probabilities, probabilities * kept))
        tiles_of_row = skipped.sum(1).repeat_interleave(128)
        allowed = upstream.squeeze(1) * tiles_of_row * threshold
        assert ((full - short).abs().sum(1) <= allowed).all()
        grad_input = ((full - short) @ weight).norm(dim=1)
        assert (grad_input <= allowed * weight.norm(dim=1).max()).all()
        grad_weight = ((full - short).T @ x).norm(dim=1)
        of_rows = (upstream.squeeze(1) * x.norm(dim=1)).view(2, 128).sum(1)
        by_class = (skipped * of_rows.unsqueeze(1)).sum(0).repeat_interleave(TILE_CLASSES)
        assert (grad_weight <= threshold * by_class).all()


# --- what C++ and Python share ------------------------------------------------------------------------------------


@pytest.mark.skipif(not SOURCES.is_dir(), reason="not a checkout")
def test_numbers_are_those_of_the_kernel():
    tile = (SOURCES / "tile.h").read_text()
    assert f"kTileM = {_tile_mass.TILE_ROWS}," in tile and f"kPingpongColumns = {TILE_CLASSES};" in tile
    header = (SOURCES / "tile_mass.cuh").read_text()
    (listed,) = re.findall(r"kTileMassThresholds\[\] = \{(.*?)\}", header)
    assert tuple(float.fromhex(t.strip().rstrip("f")) for t in listed.split(",")) == _tile_mass.THRESHOLDS
    (order,) = re.findall(r"struct TileMassCounts \{(.*?)\};", header, re.S)
    assert re.findall(r"\b(tiles\w*|below\w*)\b", order) == [
        "tiles", "tiles_without_target", "below", "below_without_target"
    ]  # fmt: skip
    counts = TileMassCounts._of_numbers(list(range(_tile_mass._NUMBERS)))
    assert counts == TileMassCounts(0, 1, (2, 3, 4), (5, 6, 7))


# --- refusals -----------------------------------------------------------------------------------------------------


def refused(match, kind=RuntimeError, device=None):
    with pytest.raises(kind, match=match), tile_mass(device):
        pytest.fail("the block must not run")
    assert not _tile_mass._active


def test_refused_on_the_cpu():
    refused("tile_mass: device is cpu, expected a CUDA device", ValueError, "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_refused_without_a_gpu():
    refused("tile_mass: the wgmma engine, which counts, does not run here: ")


@pytest.fixture
def hopper(monkeypatch):
    """A machine that would count, as the checks see it; a test takes one part away."""
    monkeypatch.setattr(_tile_mass.load, "CUDA_LOADED", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(_tile_mass, "build_info", lambda: {"cuda_archs": "80 90a"})
    monkeypatch.setattr(_tile_mass.FAMILIES["fused_linear_ce"], "choice", "cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("LIGER_WGMMA", raising=False)
    assert _tile_mass._why_unavailable(0) is None


@pytest.mark.usefixtures("hopper")
def test_refused_where_the_engine_does_not_run(monkeypatch):
    refused("there is no device cuda:1", device=1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
        refused("cuda:0 has compute capability 8.0, the engine needs 9.0", device="cuda:0")
    with monkeypatch.context() as patch:
        patch.setattr(_tile_mass, "build_info", lambda: {"cuda_archs": "80 80+PTX"})
        refused("this build has no kernels for 90a, only for 80 80", device=0)
    with monkeypatch.context() as patch:
        patch.setattr(_tile_mass.FAMILIES["fused_linear_ce"], "choice", "triton")
        refused("fused_linear_ce runs on the triton backend", device=0)
    with monkeypatch.context() as patch:
        patch.setenv("LIGER_WGMMA", "0")
        refused("LIGER_WGMMA=0 selects the generic engine", device=0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        refused("begins during the capture of a CUDA graph", device=0)
    with monkeypatch.context() as patch:
        patch.setattr(_tile_mass, "_active", {0})
        with pytest.raises(RuntimeError, match="another with block already counts on cuda:0"), tile_mass(0):
            pytest.fail("the block must not run")
        assert _tile_mass._active == {0}


def test_no_tiles_is_an_error():
    with pytest.raises(RuntimeError, match="the wgmma engine has computed no gradient"):
        liger.debug.TileMass(torch.zeros(8, dtype=torch.int64)).counts()
    counts = liger.debug.TileMass(torch.arange(1, 9)).counts()
    assert counts == TileMassCounts(1, 2, (3, 4, 5), (6, 7, 8))
