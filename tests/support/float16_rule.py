"""The float16 rule of the wgmma engine in torch, in float64 but for the numbers that the engine stores in float16.

docs/performance/fused_linear_ce_sm90.md, "float16", has the analysis; csrc/linear_ce/sm90 the kernels. The constants
are those of csrc/linear_ce/sm90/element.cuh, tile.h and range_rows.cuh.
"""

from dataclasses import dataclass

import torch

OFFSET, LARGEST_SUM_EXPONENT, MOST_SHIFT = 2, 15, 120
SAMPLES, TILE, PANEL = 16, 256, 128
MAX_ROW_SUM = 2.0**60


def half(x):
    return x.to(torch.float16).double()


def exponent(x):
    """e with 2^e <= |x| < 2^(e + 1)."""
    return torch.where(x == 0, -127, torch.frexp(x)[1] - 1).double()


@dataclass
class Result:
    grad_input: torch.Tensor  # float16
    grad_weight: torch.Tensor  # float16
    log_sum: torch.Tensor  # per row, float64
    shifted: float  # share of the rows whose exponentials take one more pass
    largest: float  # absolute value that was rounded to float16, exponentials and scaled rows


def sampled(classes):
    return (2 * torch.arange(SAMPLES) + 1) * classes // (2 * SAMPLES)


def references(z, target):
    """Per row the largest of the target's logit and of a few logits of classes at equal distances."""
    classes = z.shape[1]
    return torch.maximum(z.gather(1, target[:, None]), z[:, sampled(classes)].amax(1, keepdim=True))


def row_sums(z, reference):
    """Exponentials times 2^OFFSET, padded to whole tiles, and for each panel its sum with those before in its tile."""
    rows, classes = z.shape
    e = z.new_zeros(rows, -(-classes // TILE) * TILE)
    e[:, :classes] = (z - reference).exp() * 2.0**OFFSET
    return e, e.view(rows, -1, TILE // PANEL, PANEL).sum(-1).cumsum(-1).flatten(1)


def exponentials(z, target, is_element):
    """The exponentials of a chunk as both gradient GEMMs read them.

    Returns:
        exponentials; per row its reference, its sum, the number as which an exponential of 1 is stored, whether it has
        the one-hot term as an element (that of ``is_element``, or its target has most of the probability), and whether
        a pass shifts it; and the largest number before rounding.
    """
    reference = references(z, target)
    e, totals = row_sums(z, reference)
    overflow = (totals / 2.0**OFFSET >= MAX_ROW_SUM).any(1, keepdim=True)
    reference = torch.where(overflow, z.amax(1, keepdim=True), reference)
    e, totals = row_sums(z, reference)
    first = LARGEST_SUM_EXPONENT - 1
    shifts = torch.where(totals < 2.0**LARGEST_SUM_EXPONENT, 0, exponent(totals) - first)
    scaled = e * 2.0 ** -shifts.repeat_interleave(PANEL, 1)
    largest = scaled.max()
    stored = half(scaled)

    sums = e.sum(1) / 2.0**OFFSET
    chosen = (z - reference).exp().gather(1, target[:, None]).squeeze(1)
    is_element = is_element | (chosen > 0.5 * sums)
    of_element = torch.where(is_element, exponent(sums) + OFFSET - first, 0)
    shift = torch.maximum(shifts.amax(1), of_element).clamp(0, MOST_SHIFT)
    stored = half(stored * 2.0 ** (shifts.repeat_interleave(PANEL, 1) - shift[:, None]))
    one = 2.0 ** (OFFSET - shift)
    rows = is_element.nonzero().squeeze(1)
    elements = ((chosen - sums) * one)[rows]
    stored[rows, target[rows]] = half(elements)
    largest = max(largest, elements.abs().max() if len(rows) else 0)
    return stored[:, : z.shape[1]], reference.squeeze(1), sums, one, is_element, shift > 0, largest


def block_scaled(sums):
    """Float16 with one power of two for 256 elements of a row, as the sum over chunks is stored."""
    parts = []
    for part in sums.split(TILE, 1):
        squares = exponent(part.square().sum(1, keepdim=True).clamp_min(1e-30))
        scale = 2.0 ** (((squares + 2) / 2).floor() - 15)
        parts.append(half(part / scale) * scale)
    return torch.cat(parts, 1)


def gradients(x, weight, target, upstream, chunk_rows):
    """The gradients of ``sum(upstream * loss per row)``.

    Args:
        x, weight: (rows, hidden), (classes, hidden), float16.
        target: (rows,) classes.
        upstream: (rows,), float64.
        chunk_rows: rows of a chunk.

    Returns:
        :class:`Result`.
    """
    rows = x.shape[0]
    x, weight = x.double(), weight.double()
    grad_input, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
    log_sum, shifted, largest = x.new_empty(rows), 0, 0.0
    for start in range(0, rows, chunk_rows):
        here = slice(start, min(start + chunk_rows, rows))
        a, y, u = x[here], target[here], upstream[here]
        index = torch.arange(len(y))
        first_row = torch.full((weight.shape[0],), len(y)).scatter_reduce(0, y, index, "amin")
        is_element = first_row[y] != index
        stored, reference, sums, one, is_element, passed, most = exponentials(a @ weight.T, y, is_element)
        log_sum[here] = reference + sums.log()
        shifted += int(passed.sum())
        scale = u / sums / one
        most_scaled = (scale.abs() * a.abs().amax(1)).max()
        unit = 2.0 ** (LARGEST_SUM_EXPONENT - 1 - exponent(most_scaled)).clamp(-113, 100)
        scaled = a * (scale * unit)[:, None]
        largest = max(largest, float(most), float(scaled.abs().max()))
        one_hot = torch.where(is_element, 0.0, u)[:, None]
        grad_input[here] = scale[:, None] * (stored @ weight) - one_hot * weight[y]
        grad_weight += stored.T @ half(scaled) / unit
        grad_weight.index_add_(0, y, -one_hot * a)
        if here.stop < rows:
            grad_weight = block_scaled(grad_weight)
    return Result(
        grad_input.to(torch.float16), grad_weight.to(torch.float16), log_sum, shifted / rows, float(largest)
    )


def exact_gradients(x, weight, target, upstream):
    """The same in float64."""
    x, weight = x.double(), weight.double()
    z = x @ weight.T
    d = (z.softmax(1) - torch.nn.functional.one_hot(target, weight.shape[0])) * upstream[:, None]
    return d @ weight, d.T @ x, z.logsumexp(1)
