"""Inputs for the tests of liger.debug.tile_mass, whose tiles have masses on both sides of the thresholds, and the
comparison of the engine's counts with those in float64."""

import torch
from cross_entropy_reference import random_layer

from liger._core.sm90_plan import TILE_CLASSES
from liger.debug import tile_mass_of_logits

# log(2^-26): beyond the last threshold.
RANGE = 18.0


def put_slopes(x, weight):
    """Lowers the logits of the classes of each tile by another amount up to RANGE, in place, in random order: that of
    the result, the ranks of the tiles."""
    tiles = -(-weight.shape[0] // TILE_CLASSES)
    ranks = torch.randperm(tiles, device=x.device)
    lowered = torch.linspace(0, RANGE, tiles, device=x.device)[ranks]
    x[..., 0] = 1
    weight[:, 0] = -lowered.repeat_interleave(TILE_CLASSES)[: weight.shape[0]].to(weight.dtype)
    return ranks


def sloped_layer(rows, hidden, vocab, device, ignored=0.25, dtype=torch.bfloat16):
    """input, weight and target; the first classes of every second tile, by their masses, are targets."""
    x, weight, _, _ = random_layer(rows, hidden, vocab, device)
    x, weight = x.to(dtype), weight.to(dtype)
    chosen = (put_slopes(x, weight) % 2 == 0).nonzero().squeeze(1) * TILE_CLASSES
    target = chosen[torch.randint(len(chosen), (rows,), device=device)]
    target[torch.randperm(rows, device=device)[: round(ignored * rows)]] = -100
    return x, weight, target


def assert_counts(counts, logits, target, margin=1e-3, calls=1, ignore_index=-100):
    """The counts of ``calls`` calls against float64: between those of thresholds that are less and more by ``margin``,
    the relative error of a mass by logits in float32. Returns the exact counts of one call."""

    def reference(factor):
        thresholds = [t * factor for t in counts.thresholds]
        return tile_mass_of_logits(logits, target, ignore_index, thresholds)

    exact = reference(1)
    assert counts.tiles == calls * exact.tiles
    assert counts.tiles_without_target == calls * exact.tiles_without_target
    low, high = reference(1 - margin), reference(1 + margin)
    for name in ("below", "below_without_target"):
        for least, found, most in zip(*(getattr(c, name) for c in (low, counts, high)), strict=True):
            assert calls * least <= found <= calls * most, name
    return exact
