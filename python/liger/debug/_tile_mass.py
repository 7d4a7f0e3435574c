"""The probability mass of tiles of the gradient of the logits: a counter in the wgmma engine, and the same in torch.

docs/performance/fused_linear_ce_sm90.md defines it, and has the bound on the error of skipped tiles.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .._core import load
from .._core.build_info import build_info
from .._core.environment import wgmma_engine_allowed
from .._core.sm90_plan import TILE_CLASSES
from ..backend import FAMILIES

# Rows of a tile: csrc/linear_ce/sm90/tile.h. Thresholds: csrc/linear_ce/sm90/tile_mass.cuh.
TILE_ROWS = 128
THRESHOLDS = (2.0**-12, 2.0**-16, 2.0**-20)
_NUMBERS = 2 + 2 * len(THRESHOLDS)


@dataclass(frozen=True)
class TileMassCounts:
    """Numbers of tiles of 128 rows x 192 classes: those of the engine's logits GEMM.

    The mass of a row in a tile is the sum of its probabilities over the classes of the tile; a tile is below a
    threshold if the mass of each of its rows is.

    Attributes:
        tiles: all tiles.
        tiles_without_target: those that have the target of none of their rows.
        below: for each of ``thresholds`` the tiles below it.
        below_without_target: the same, of ``tiles_without_target``.
        thresholds: of the mass of a row; its total is 1.
    """

    tiles: int
    tiles_without_target: int
    below: tuple[int, ...]
    below_without_target: tuple[int, ...]
    thresholds: tuple[float, ...] = THRESHOLDS

    @property
    def shares(self) -> tuple[float, ...]:
        """``below`` as shares of ``tiles``; nan without tiles."""
        return tuple(_share(count, self.tiles) for count in self.below)

    @property
    def shares_without_target(self) -> tuple[float, ...]:
        """``below_without_target`` as shares of ``tiles_without_target``; nan without such tiles."""
        return tuple(_share(count, self.tiles_without_target) for count in self.below_without_target)

    @classmethod
    def _of_numbers(cls, numbers: Sequence[int], thresholds: Sequence[float] = THRESHOLDS) -> TileMassCounts:
        """From the numbers in the order of ``TileMassCounts`` in csrc/linear_ce/sm90/tile_mass.cuh."""
        count = len(thresholds)
        below = tuple(numbers[2:])
        return cls(numbers[0], numbers[1], below[:count], below[count:], tuple(thresholds))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


class TileMass:
    """The counter that :func:`tile_mass` yields."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    def counts(self) -> TileMassCounts:
        """The counts so far; those of the ``with`` block after its end.

        Synchronises with the stream that is current in this thread, which the counted calls must have run on or be
        ordered before.

        Raises:
            RuntimeError: no gradient was computed by the engine, so there are no tiles.
        """
        counts = TileMassCounts._of_numbers(self._memory.tolist())
        if counts.tiles == 0:
            raise RuntimeError(
                "tile_mass: the wgmma engine has computed no gradient since the start of the with block. It takes "
                "bfloat16 or float16, at least 256 rows and hidden sizes that are multiples of 16; LIGER_LOG=plan "
                "prints its plans"
            )
        return counts


# One for each device, which is never freed: a CUDA graph that was captured while the counter was on contains its
# address.
_memory: dict[int, torch.Tensor] = {}
_active: set[int] = set()
_lock = threading.Lock()


def _why_unavailable(index: int) -> str | None:
    """Why the engine does not run on this device, or None."""
    if not load.CUDA_LOADED:
        return load.CUDA_REASON
    if index >= torch.cuda.device_count():
        return f"there is no device cuda:{index}"
    capability = torch.cuda.get_device_capability(index)
    if capability != (9, 0):
        return f"cuda:{index} has compute capability {capability[0]}.{capability[1]}, the engine needs 9.0"
    if "90a" not in build_info()["cuda_archs"].split():
        return f"this build has no kernels for 90a, only for {build_info()['cuda_archs']}"
    family = FAMILIES["fused_linear_ce"]
    if family.choice != "cuda":
        return f"fused_linear_ce runs on the {family.choice} backend ({family.reason})"
    if not wgmma_engine_allowed():
        return "LIGER_WGMMA=0 selects the generic engine"
    return None


@contextlib.contextmanager
def tile_mass(device: torch.device | str | int | None = None) -> Iterator[TileMass]:
    """Counts the tiles of the gradient of the logits by probability mass, in the ``with`` block, on one GPU.

    It counts every chunk for which the wgmma engine computes gradients: of ``fused_linear_ce``, of
    ``fused_linear_logprobs`` (where exponentials are kept, in the forward) and of the losses over log-probabilities.
    Other engines and backends count nothing. Each chunk has one more kernel, which reads the sums of exponentials per
    row and tile; no other kernel changes, and outside of the block there is no cost.

    The counter is one per device and process: it counts the calls of all threads, but only one block may be active
    for a device at a time. It is zeroed at the start of the block, and copied at its end, on the stream that is
    current there; calls on other streams must be ordered with them. Compiled code counts without recompilation, if
    the block surrounds the call and is not itself compiled. A CUDA graph contains the counter if it was on during the
    capture: its replays count in any later block for that device, too.

    Args:
        device: a CUDA device, or its index; default: the current one.

    Returns:
        A context manager, which yields a :class:`TileMass`.

    Raises:
        ValueError: not a CUDA device.
        RuntimeError: the engine does not run on this device, or another block counts on it.
    """
    # torch.device(index) needs a device.
    chosen = torch.device(f"cuda:{device}" if isinstance(device, int) else device or "cuda")
    if chosen.type != "cuda":
        raise ValueError(f"tile_mass: device is {chosen}, expected a CUDA device")
    index = chosen.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    reason = _why_unavailable(index)
    if reason is not None:
        raise RuntimeError(f"tile_mass: the wgmma engine, which counts, does not run here: {reason}")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "tile_mass: the with block begins during the capture of a CUDA graph, expected around it"
        )
    with _lock:
        if index in _active:
            raise RuntimeError(f"tile_mass: another with block already counts on cuda:{index}")
        _active.add(index)
    try:
        if index not in _memory:
            _memory[index] = torch.zeros(_NUMBERS, dtype=torch.int64, device=f"cuda:{index}")
        counter = TileMass(_memory[index].zero_())
        torch.ops.liger_sm90.count_tile_mass(index, _memory[index])
        try:
            yield counter
        finally:
            torch.ops.liger_sm90.count_tile_mass(index, None)
            counter._memory = _memory[index].clone()
    finally:
        with _lock:
            _active.remove(index)


@torch.no_grad()
def tile_mass_of_logits(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    thresholds: Sequence[float] = THRESHOLDS,
    tile_classes: int = TILE_CLASSES,
) -> TileMassCounts:
    """The same counts from logits, in float64, on any device: the reference of :func:`tile_mass`.

    A tile has 128 consecutive rows, of those whose target is not ``ignore_index``, and ``tile_classes`` consecutive
    classes; the last ones may have fewer. The wgmma engine cuts its rows so, because its chunks begin at multiples of
    128 rows (except for losses over pairs or groups).

    Args:
        logits: (..., V), after a softcap and a temperature.
        target: (...), integers; a class out of range is the target of no tile.
        ignore_index: the target of rows that do not count.
        thresholds: of the mass of a row; its total is 1.
        tile_classes: classes of a tile.

    Returns:
        The counts of these rows, a :class:`TileMassCounts`.

    Raises:
        RuntimeError: shapes that do not match.
    """
    if logits.dim() == 0 or target.shape != logits.shape[:-1]:
        raise RuntimeError(
            f"tile_mass_of_logits: target has shape {tuple(target.shape)}, expected that of logits "
            f"{tuple(logits.shape)} without the last dimension"
        )
    vocab = logits.shape[-1]
    logits, target = logits.reshape(-1, vocab), target.reshape(-1)
    tiles = -(-vocab // tile_classes)
    padding = tiles * tile_classes - vocab
    numbers = torch.zeros(2 + 2 * len(thresholds), dtype=torch.int64, device=logits.device)
    for rows in (target != ignore_index).nonzero().squeeze(1).split(TILE_ROWS):
        if rows.numel() == 0:
            continue
        probabilities = torch.nn.functional.pad(logits[rows].double().softmax(-1), (0, padding))
        mass = probabilities.unflatten(-1, (tiles, tile_classes)).sum(-1).amax(0)
        classes = target[rows]
        classes = classes[(classes >= 0) & (classes < vocab)]
        free = torch.ones(tiles, dtype=torch.bool, device=logits.device)
        free[classes // tile_classes] = False
        below = mass < torch.tensor(thresholds, dtype=torch.float64, device=logits.device).unsqueeze(1)
        numbers[0] += tiles
        numbers[1] += free.sum()
        numbers[2:] += torch.cat([below.sum(1), (below & free).sum(1)])
    return TileMassCounts._of_numbers(numbers.tolist(), thresholds)
