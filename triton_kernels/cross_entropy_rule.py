# SPDX-License-Identifier: BSD-3-Clause
"""The row rule of cross entropy, shared by the Triton row kernels: online-softmax statistics of a row, the
coefficients computed from them, and the gradient. The twin of csrc/cross_entropy/rule.cuh.

Statistics: z_max; sum of exp(z - z_max); entropy_sum of exp(z - z_max) * (z - z_max); best, best_col: the
largest logit before the softcap and its column; weighted_sum of class_weight * (z - z_max), weight_total of
class_weight. The log-sum-exp is rounded where logits are large, so only the z-loss reads it. Probabilities
are never materialised. docs/guides/cross_entropy.md defines every term.
"""

import triton
import triton.language as tl


@triton.jit
def _exp(x):
    # tl.exp has three more instructions, for denormal results; here those are flushed to zero.
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def apply_softcap(x, softcap):
    """softcap * tanh(x / softcap), or x without a softcap. The interpreter has no tanh, hence the exponential
    form."""
    if softcap is not None:
        u = x / softcap
        t = _exp(-2.0 * tl.abs(u))
        far = (1.0 - t) / (1.0 + t)
        # 1 - t cancels near zero. There the Taylor series is used, exact in float32 up to 0.2.
        square = u * u
        near = u * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
        x = softcap * tl.where(tl.abs(u) < 0.2, near, tl.where(u < 0, -far, far))
    return x


@triton.jit
def target_logit(row_ptr, column, in_range, softcap):
    """The logit of the target after the softcap; 0 if the column is not in range."""
    return apply_softcap(tl.load(row_ptr + column, mask=in_range, other=0.0).to(tl.float32), softcap)


@triton.jit
def _columns(start, LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr):
    """Column offsets of a tile [LANES, REPEATS, VECTOR]: vectors of adjacent columns, LANES vectors apart per
    lane.

    With one lane per thread, a reduction over the last two dimensions needs no communication between threads.
    """
    lane = tl.arange(0, LANES)[:, None, None]
    repeat = tl.arange(0, REPEATS)[None, :, None]
    return start + (repeat * LANES + lane) * VECTOR + tl.arange(0, VECTOR)[None, None, :]


@triton.jit
def _lane_sum(x):
    return tl.sum(tl.sum(x, 2), 1)


@triton.jit
def _lane_max(x):
    return tl.max(tl.max(x, 2), 1)


@triton.jit
def _accumulate(
    x, cols, mask, ce_weight_ptr, n_cols, softcap, z_max, e_sum, entropy_sum, best_z, best_col, weighted_sum,
    weight_total, ARGMAX: tl.constexpr, ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr,
):  # fmt: skip
    """Adds a tile of logits to the running statistics of every lane (online softmax); masked x must be
    -inf."""
    z = x
    if softcap is not None:
        z = apply_softcap(x, softcap)
        if mask is not None:
            z = tl.where(mask, z, float("-inf"))
    new_max = tl.maximum(z_max, _lane_max(z))
    scale = _exp(z_max - new_max)
    step = z - new_max[:, None, None]
    e = _exp(step)
    if ENTROPY:
        # Where e_sum * scale underflows, e_sum * (z_max - new_max) may be -inf, and -inf * 0 is NaN.
        shifted = (entropy_sum + e_sum * (z_max - new_max)) * scale
        entropy_sum = tl.where(e_sum * scale == 0.0, 0.0, shifted) + _lane_sum(tl.where(e > 0, e * step, 0.0))
    e_sum = e_sum * scale + _lane_sum(e)
    if ARGMAX:
        # Compares logits before the softcap, which maps different large logits to one number.
        tile_best = _lane_max(x)
        tile_col = tl.where(x == tile_best[:, None, None], cols, n_cols)
        best_col = tl.where(tile_best > best_z, tl.min(tl.min(tile_col, 2), 1), best_col)
        best_z = tl.maximum(best_z, tile_best)
    if SMOOTHING:
        term = step
        if mask is not None:
            term = tl.where(mask, term, 0.0)
        weighted_sum = _rebased(weighted_sum, weight_total, z_max - new_max)
        if ce_weight_ptr is not None:
            weight = tl.load(ce_weight_ptr + cols, mask=mask).to(tl.float32)
            if mask is not None:
                weight = tl.where(mask, weight, 0.0)
            weighted_sum += _lane_sum(term * weight)
            weight_total += _lane_sum(weight)
        else:
            weighted_sum += _lane_sum(term)
            weight_total += _lane_sum((cols < n_cols).to(tl.float32))
    return new_max, e_sum, entropy_sum, best_z, best_col, weighted_sum, weight_total


@triton.jit
def _rebased(weighted_sum, weight_total, difference):
    """A sum of weight * (z - z_max) for a larger maximum. Before the first logit the difference may be
    -inf."""
    return weighted_sum + tl.where(weight_total == 0.0, 0.0, weight_total * difference)


@triton.jit
def _empty_stats(LANES: tl.constexpr):
    # Finite, so that z - z_max is -inf for z = -inf instead of NaN.
    z_max = tl.full([LANES], -3.4028234663852886e38, tl.float32)
    zeros = tl.zeros([LANES], tl.float32)
    best_z = tl.full([LANES], float("-inf"), tl.float32)
    return z_max, zeros, zeros, best_z, tl.zeros([LANES], tl.int32), zeros, zeros


@triton.jit
def _merge_lanes(
    z_max,
    e_sum,
    entropy_sum,
    best_z,
    best_col,
    weighted_sum,
    weight_total,
    n_cols,
    ARGMAX: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """(z_max, sum of exp(z - z_max), entropy, column of the largest logit, weighted_sum) of a row from the
    statistics of its lanes."""
    row_max = tl.max(z_max, 0)
    scale = _exp(z_max - row_max)
    row_sum = tl.sum(e_sum * scale, 0)
    entropy = 0.0
    if ENTROPY:
        shifted = (entropy_sum + e_sum * (z_max - row_max)) * scale
        entropy = tl.log(row_sum) - tl.sum(tl.where(e_sum * scale == 0.0, 0.0, shifted), 0) / row_sum
    best = 0
    if ARGMAX:
        best = tl.min(tl.where(best_z == tl.max(best_z, 0), best_col, n_cols), 0)
    return row_max, row_sum, entropy, best, tl.sum(_rebased(weighted_sum, weight_total, z_max - row_max), 0)


@triton.jit
def load_row(row_ptr, n_cols, LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr):
    """(logits in float32, column offsets, mask) of a row that fits a tile; masked logits are -inf."""
    cols = _columns(0, LANES, REPEATS, VECTOR)
    mask = cols < n_cols
    x = tl.load(row_ptr + cols, mask=mask, other=float("-inf"), eviction_policy="evict_first")
    return x.to(tl.float32), cols, mask


@triton.jit
def tile_statistics(
    x, cols, mask, ce_weight_ptr, n_cols, softcap,
    ARGMAX: tl.constexpr, ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The results of :func:`statistics` for a row from :func:`load_row`."""
    z_max, e_sum, entropy_sum, best_z, best_col, weighted_sum, weight_total = _empty_stats(LANES)
    z_max, e_sum, entropy_sum, best_z, best_col, weighted_sum, weight_total = _accumulate(
        x, cols, mask, ce_weight_ptr, n_cols, softcap, z_max, e_sum, entropy_sum, best_z, best_col, weighted_sum,
        weight_total, ARGMAX, ENTROPY, SMOOTHING,
    )  # fmt: skip
    return _merge_lanes(
        z_max, e_sum, entropy_sum, best_z, best_col, weighted_sum, weight_total, n_cols, ARGMAX, ENTROPY
    )


@triton.jit
def _accumulate_row(
    row_ptr, ce_weight_ptr, n_cols, softcap,
    ARGMAX: tl.constexpr, ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, READ_AGAIN: tl.constexpr,
    LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The running statistics of every lane after all tiles of a row."""
    policy: tl.constexpr = "evict_last" if READ_AGAIN else "evict_first"
    tile: tl.constexpr = LANES * REPEATS * VECTOR
    z_max, e_sum, entropy_sum, best_z, best_col, weighted_sum, weight_total = _empty_stats(LANES)
    full_tiles_end = n_cols // tile * tile
    for start in range(0, full_tiles_end, tile):
        cols = _columns(start, LANES, REPEATS, VECTOR)
        x = tl.load(row_ptr + cols, eviction_policy=policy).to(tl.float32)
        z_max, e_sum, entropy_sum, best_z, best_col, weighted_sum, weight_total = _accumulate(
            x, cols, None, ce_weight_ptr, n_cols, softcap, z_max, e_sum, entropy_sum, best_z, best_col,
            weighted_sum, weight_total, ARGMAX, ENTROPY, SMOOTHING,
        )  # fmt: skip
    if full_tiles_end < n_cols:
        cols = _columns(full_tiles_end, LANES, REPEATS, VECTOR)
        mask = cols < n_cols
        x = tl.load(row_ptr + cols, mask=mask, other=float("-inf"), eviction_policy=policy).to(tl.float32)
        z_max, e_sum, entropy_sum, best_z, best_col, weighted_sum, weight_total = _accumulate(
            x, cols, mask, ce_weight_ptr, n_cols, softcap, z_max, e_sum, entropy_sum, best_z, best_col,
            weighted_sum, weight_total, ARGMAX, ENTROPY, SMOOTHING,
        )  # fmt: skip
    return z_max, e_sum, entropy_sum, best_z, best_col, weighted_sum, weight_total


@triton.jit
def statistics(
    row_ptr, ce_weight_ptr, n_cols, softcap,
    ARGMAX: tl.constexpr, ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, READ_AGAIN: tl.constexpr,
    LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """(z_max, sum of exp(z - z_max), entropy, column of the largest logit, sum of class_weight * (z - z_max))
    of a row.

    READ_AGAIN: the row will be read again, from the last tile to the first, so its tiles should remain in L2.
    """
    z_max, e_sum, entropy_sum, best_z, best_col, weighted_sum, weight_total = _accumulate_row(
        row_ptr,
        ce_weight_ptr,
        n_cols,
        softcap,
        ARGMAX,
        ENTROPY,
        SMOOTHING,
        READ_AGAIN,
        LANES,
        REPEATS,
        VECTOR,
    )
    return _merge_lanes(
        z_max, e_sum, entropy_sum, best_z, best_col, weighted_sum, weight_total, n_cols, ARGMAX, ENTROPY
    )


@triton.jit
def partial_statistics(
    row_ptr, ce_weight_ptr, n_cols, softcap, SMOOTHING: tl.constexpr,
    LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """(z_max, sum of exp(z - z_max), sum of class_weight * (z - z_max)) of a row."""
    row_max, row_sum, _, _, weighted_sum = statistics(
        row_ptr, ce_weight_ptr, n_cols, softcap, False, False, SMOOTHING, True, LANES, REPEATS, VECTOR
    )
    # In a row of -inf the lanes still have the finite initial z_max.
    row_max = tl.where(row_sum == 0.0, float("-inf"), row_max)
    return row_max, row_sum, weighted_sum


@triton.jit
def square_sum(
    row_ptr, z_max, n_cols, softcap, LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr
):
    """The sum of exp(z - z_max)^2 of a row that partial_statistics has read."""
    tile: tl.constexpr = LANES * REPEATS * VECTOR
    reference = tl.where(z_max == float("-inf"), 0.0, z_max)
    total = tl.zeros([LANES], tl.float32)
    for start in range(0, n_cols, tile):
        cols = _columns(start, LANES, REPEATS, VECTOR)
        mask = cols < n_cols
        x = tl.load(row_ptr + cols, mask=mask, other=float("-inf"), eviction_policy="evict_first")
        z = apply_softcap(x.to(tl.float32), softcap)
        e = tl.where(mask, _exp(z - reference), 0.0)
        total += _lane_sum(e * e)
    return tl.sum(total, 0)


@triton.jit
def class_weight(ce_weight_ptr, target, in_range):
    """The weight of the target; 0 if the target is not a class."""
    if ce_weight_ptr is None:
        weight = tl.where(in_range, 1.0, 0.0)
    else:
        weight = tl.load(ce_weight_ptr + target, mask=in_range, other=0.0).to(tl.float32)
    return weight


@triton.jit
def fill_zeros(row_ptr, n_cols, BLOCK: tl.constexpr):
    zeros = tl.zeros([BLOCK], row_ptr.dtype.element_ty)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        tl.store(row_ptr + cols, zeros, mask=cols < n_cols)


@triton.jit
def coefficients(
    ce_weight_ptr, class_weight_sum_ptr, weight, z_max, e_sum, n_cols, label_smoothing, lse_square_scale,
    SMOOTHING: tl.constexpr,
):  # fmt: skip
    """(coef_exp, coef_target, coef_class): factors of exp(z - z_max), the one-hot target and the class
    weights."""
    lse = z_max + tl.log(e_sum)
    coef_target = (1.0 - label_smoothing) * weight
    coef_exp = coef_target + tl.where(lse_square_scale == 0.0, 0.0, 2.0 * lse_square_scale * weight * lse)
    if SMOOTHING:
        if ce_weight_ptr is None:
            coef_exp += label_smoothing
        else:
            coef_exp += label_smoothing / n_cols * tl.load(class_weight_sum_ptr)
    return coef_exp / e_sum, coef_target, label_smoothing / n_cols


@triton.jit
def _store(out_ptr, grad, z, cols, mask, softcap):
    if softcap is not None:
        tanh = z / softcap
        grad *= 1.0 - tanh * tanh
    tl.store(out_ptr + cols, grad.to(out_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def _add_log_term(coef_exp, coef_log, log):
    """coef_exp + coef_log * log, bounded below, because a class of exp(log) = 0 must add 0."""
    if coef_log is not None:
        coef_exp += coef_log * tl.maximum(log, -1e30)
    return coef_exp


@triton.jit
def store_gradient(
    out_ptr, x, cols, mask, reference, ce_weight_ptr, coef_exp, coef_class, upstream, softcap, SMOOTHING: tl.constexpr,
    coef_log=None,
):  # fmt: skip
    """Stores the gradient of a tile of logits x, without the one-hot term of the target."""
    z = apply_softcap(x, softcap)
    e = _exp(z - reference)
    coef_exp = _add_log_term(coef_exp, coef_log, z - reference)
    if SMOOTHING:
        if ce_weight_ptr is not None:
            coef_class *= tl.load(ce_weight_ptr + cols, mask=mask).to(tl.float32)
        grad = (coef_exp * e - coef_class) * upstream
    else:
        grad = (coef_exp * upstream) * e
    _store(out_ptr, grad, z, cols, mask, softcap)


@triton.jit
def store_target_gradient(
    out_ptr, target, in_range, z, reference, weight, coef_exp, coef_target, coef_class, upstream, softcap,
    SMOOTHING: tl.constexpr, coef_log=None,
):  # fmt: skip
    """Stores the element of the target again, with its one-hot term: cheaper than a comparison in every
    column."""
    # Another thread stored the element before.
    tl.debug_barrier()
    grad = _add_log_term(coef_exp, coef_log, z - reference) * _exp(z - reference)
    if SMOOTHING:
        grad -= coef_class * weight
    _store(out_ptr, (grad - coef_target) * upstream, z, target, in_range, softcap)


@triton.jit
def write_gradient(
    row_ptr, out_ptr, reference, ce_weight_ptr, coef_exp, coef_class, upstream, n_cols, softcap,
    SMOOTHING: tl.constexpr, LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr, coef_log=None,
):  # fmt: skip
    """Stores the gradient of a row from the last tile to the first: the tiles that were read last are still
    cached."""
    tile: tl.constexpr = LANES * REPEATS * VECTOR
    full_tiles_end = n_cols // tile * tile
    if full_tiles_end < n_cols:
        cols = _columns(full_tiles_end, LANES, REPEATS, VECTOR)
        mask = cols < n_cols
        x = tl.load(row_ptr + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
        store_gradient(
            out_ptr, x, cols, mask, reference, ce_weight_ptr, coef_exp, coef_class, upstream, softcap, SMOOTHING,
            coef_log,
        )  # fmt: skip
    for done in range(0, full_tiles_end, tile):
        cols = _columns(full_tiles_end - tile - done, LANES, REPEATS, VECTOR)
        x = tl.load(row_ptr + cols, eviction_policy="evict_first").to(tl.float32)
        store_gradient(
            out_ptr, x, cols, None, reference, ce_weight_ptr, coef_exp, coef_class, upstream, softcap, SMOOTHING,
            coef_log,
        )  # fmt: skip
