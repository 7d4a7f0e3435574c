# SPDX-License-Identifier: BSD-3-Clause
"""The float16 rule of the wgmma engine in torch, in float64 but for the numbers that the engine stores in
float16.

docs/lab/fused_linear_ce.md, "float16", has the analysis; csrc/lm_head/sm90 the kernels. The constants
are in csrc/lm_head/sm90/element.cuh, sizes.h and rows/float16_range.cuh.
"""

from dataclasses import dataclass

import torch

OFFSET, LARGEST_SUM_EXPONENT, MAX_SHIFT = 2, 15, 120
SAMPLES, TILE, SCALE_COLUMNS = 16, 192, 256
MAX_ROW_SUM = 2.0**60
# Of a probability near 1, in the bound of largest_beside_target().
BOUND_ERROR = 2.0**-6


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
    """Exponentials times 2^OFFSET, padded to whole tiles, and the sum of each tile."""
    rows, classes = z.shape
    e = z.new_zeros(rows, -(-classes // TILE) * TILE)
    e[:, :classes] = (z - reference).exp() * 2.0**OFFSET
    return e, e.view(rows, -1, TILE).sum(-1)


def exponentials(z, target, is_element):
    """The exponentials of a chunk as both gradient GEMMs read them.

    Returns:
        exponentials; per row its reference, its sum, the number as which an exponential of 1 is stored,
        whether it has the one-hot term as an element (the element of ``is_element``, or its target has most
        of the probability), and whether a pass shifts it; and the largest number before rounding.
    """
    reference = references(z, target)
    e, totals = row_sums(z, reference)
    overflow = (totals / 2.0**OFFSET >= MAX_ROW_SUM).any(1, keepdim=True)
    reference = torch.where(overflow, z.amax(1, keepdim=True), reference)
    e, totals = row_sums(z, reference)
    first = LARGEST_SUM_EXPONENT - 1
    shifts = torch.where(totals < 2.0**LARGEST_SUM_EXPONENT, 0, exponent(totals) - first)
    scaled = e * 2.0 ** -shifts.repeat_interleave(TILE, 1)
    largest = scaled.max()
    stored = half(scaled)

    sums = e.sum(1) / 2.0**OFFSET
    chosen = (z - reference).exp().gather(1, target[:, None]).squeeze(1)
    is_element = is_element | (chosen > 0.5 * sums)
    of_element = torch.where(is_element, exponent(sums) + OFFSET - first, 0)
    shift = torch.maximum(shifts.amax(1), of_element).clamp(0, MAX_SHIFT)
    stored = half(stored * 2.0 ** (shifts.repeat_interleave(TILE, 1) - shift[:, None]))
    one = 2.0 ** (OFFSET - shift)
    rows = is_element.nonzero().squeeze(1)
    elements = ((chosen - sums) * one)[rows]
    stored[rows, target[rows]] = half(elements)
    largest = max(largest, elements.abs().max() if len(rows) else 0)
    return stored[:, : z.shape[1]], reference.squeeze(1), sums, one, is_element, shift > 0, largest


def block_scaled(sums):
    """Float16 with one power of two for 256 elements of a row, as the sum over chunks is stored."""
    parts = []
    for part in sums.split(SCALE_COLUMNS, 1):
        squares = exponent(part.square().sum(1, keepdim=True).clamp_min(1e-30))
        scale = 2.0 ** (((squares + 2) / 2).floor() - 15)
        parts.append(half(part / scale) * scale)
    return torch.cat(parts, 1)


def unit_exponent(largest):
    """The exponent of the power of two that makes this number 2^14 to 2^15."""
    return (LARGEST_SUM_EXPONENT - 1 - exponent(largest)).clamp(-113, 100)


def largest_beside_target(u, w, logprob, entropy):
    """A bound of ``|u * p + w * p * (log p + entropy)|`` for the probabilities of the classes other than the
    target."""
    most = (BOUND_ERROR - logprob.expm1()).clamp_max(1.0)
    end, turn = most * (most.log() + entropy).abs(), (-1 - entropy).exp()
    return u.abs() * most + w.abs() * torch.where(most > turn, torch.maximum(end, turn), end)


def entropy_gradient(stored, sums, z, target, is_element, u, w, with_unit=True):
    """The second matrix, with a gradient of entropies: from the exponentials as they are stored, and their
    sums.

    Returns:
        the matrix, the power of two per row by which it is multiplied, and its largest number before
        rounding.
    """
    logp = z.log_softmax(1)
    entropy = -(logp.exp() * logp).sum(1)
    logprob = logp.gather(1, target[:, None]).squeeze(1)
    at_target = sums * (logprob.exp() * (u + w * (entropy + logprob)) - is_element * u)
    largest = torch.maximum(largest_beside_target(u, w, logprob, entropy) * sums, at_target.abs())
    unit = 2.0 ** unit_exponent(largest) if with_unit else torch.ones_like(sums)
    constant, slope = u + w * (entropy - sums.log()), w
    positive = stored.clamp_min(0)  # the element of a target with its one-hot term is replaced
    matrix = positive * (constant[:, None] + slope[:, None] * positive.clamp_min(2.0**-126).log())
    matrix.scatter_(1, target[:, None], at_target[:, None])
    matrix *= unit[:, None]
    return half(matrix), unit, matrix.abs().max()


def gradients(
    x, weight, target, upstream, chunk_rows, temperature=1.0, entropy_upstream=None, with_unit=True
):  # fmt: skip
    """The gradients of ``sum(upstream * loss per row - entropy_upstream * entropy per row)``.

    With all rows in one chunk they come from exponentials that are kept from the forward.

    Args:
        x, weight: (rows, hidden), (classes, hidden), float16.
        target: (rows,) classes.
        upstream: (rows,), float64.
        chunk_rows: rows of a chunk.
        temperature: by which logits are divided.
        entropy_upstream: (rows,), float64; None without a gradient of entropies.
        with_unit: False: what the second matrix would be without a power of two per row.

    Returns:
        :class:`Result`.
    """
    rows = x.shape[0]
    x, weight = x.double(), weight.double()
    grad_input, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
    log_sum, shifted, largest = x.new_empty(rows), 0, 0.0
    for start in range(0, rows, chunk_rows):
        here = slice(start, min(start + chunk_rows, rows))
        a, y, u = x[here], target[here], upstream[here] / temperature
        index = torch.arange(len(y))
        first_row = torch.full((weight.shape[0],), len(y)).scatter_reduce(0, y, index, "amin")
        is_element = first_row[y] != index
        z = a @ weight.T / temperature
        stored, reference, sums, one, is_element, passed, most = exponentials(z, y, is_element)
        log_sum[here] = reference + sums.log()
        shifted += int(passed.sum())
        scale = u / sums / one
        if entropy_upstream is not None:
            w = entropy_upstream[here] / temperature
            stored, row_unit, of_matrix = entropy_gradient(
                stored, sums * one, z, y, is_element, u, w, with_unit
            )
            scale, most = 1 / (sums * one) / row_unit, max(most, of_matrix)
        most_scaled = (scale.abs() * a.abs().amax(1)).max()
        unit = 2.0 ** unit_exponent(most_scaled)
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


def exact_gradients(x, weight, target, upstream, temperature=1.0, entropy_upstream=None):
    """The same in float64."""
    x, weight = x.double(), weight.double()
    z = x @ weight.T / temperature
    logp = z.log_softmax(1)
    d = (logp.exp() - torch.nn.functional.one_hot(target, weight.shape[0])) * upstream[:, None]
    if entropy_upstream is not None:
        entropy = -(logp.exp() * logp).sum(1, keepdim=True)
        d += entropy_upstream[:, None] * logp.exp() * (logp + entropy)
    d /= temperature
    return d @ weight, d.T @ x, z.logsumexp(1)
