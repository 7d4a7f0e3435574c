"""The row rule of cross entropy for Triton kernels: statistics of a row, what follows from them, and its gradient.

docs/cross_entropy.md defines every term.
"""

import triton
import triton.language as tl


@triton.jit
def _exp(x):
    # On a GPU tl.exp takes three instructions more, for results that are denormal; here they become zero.
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def capped(x, softcap):
    """softcap * tanh(x / softcap), or x without a softcap. The interpreter has no tanh, hence the exponential form."""
    if softcap is not None:
        u = x / softcap
        t = _exp(-2.0 * tl.abs(u))
        far = (1.0 - t) / (1.0 + t)
        # Near zero 1 - t cancels, so there it is the Taylor series, exact to float32 up to 0.2.
        square = u * u
        near = u * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
        x = softcap * tl.where(tl.abs(u) < 0.2, near, tl.where(u < 0, -far, far))
    return x


@triton.jit
def _columns(start, LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr):
    """The columns of a tile (LANES, REPEATS, VECTOR): vectors of neighbours, those of one lane LANES vectors apart.

    With a thread for every lane, a sum over the last two dimensions stays within the thread.
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
def _include(
    x, cols, mask, ce_weight_ptr, n_cols, softcap, shift, high, total, moment, top, top_col, smooth,
    ARGMAX: tl.constexpr, ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr,
):  # fmt: skip
    """The running statistics of every lane with one more tile of logits; where mask is false, x is -inf."""
    z = x
    if softcap is not None:
        z = capped(x, softcap)
        if mask is not None:
            z = tl.where(mask, z, float("-inf"))
    new_high = tl.maximum(high, _lane_max(z))
    scale = _exp(high - new_high)
    step = z - new_high[:, None, None]
    e = _exp(step)
    if ENTROPY:
        # sum of exp(z - high) * (z - high)
        moment = (moment + total * (high - new_high)) * scale + _lane_sum(tl.where(e > 0, e * step, 0.0))
    total = total * scale + _lane_sum(e)
    if ARGMAX:
        # By the logits themselves: a softcap maps different large ones to one number.
        tile_top = _lane_max(x)
        tile_col = tl.where(x == tile_top[:, None, None], cols, n_cols)
        top_col = tl.where(tile_top > top, tl.min(tl.min(tile_col, 2), 1), top_col)
        top = tl.maximum(top, tile_top)
    if SMOOTHING:
        cost = z - shift
        if mask is not None:
            cost = tl.where(mask, cost, 0.0)
        if ce_weight_ptr is not None:
            cost *= tl.load(ce_weight_ptr + cols, mask=mask).to(tl.float32)
        smooth += _lane_sum(cost)
    return new_high, total, moment, top, top_col, smooth


@triton.jit
def _nothing_included(LANES: tl.constexpr):
    # Finite, so that z - high is -inf rather than nan for z = -inf.
    high = tl.full([LANES], -3.0e38, tl.float32)
    zeros = tl.zeros([LANES], tl.float32)
    top = tl.full([LANES], float("-inf"), tl.float32)
    return high, zeros, zeros, top, tl.zeros([LANES], tl.int32), zeros


@triton.jit
def _of_row(high, total, moment, top, top_col, smooth, n_cols, ARGMAX: tl.constexpr, ENTROPY: tl.constexpr):
    row_high = tl.max(high, 0)
    scale = _exp(high - row_high)
    row_total = tl.sum(total * scale, 0)
    log_total = tl.log(row_total)
    entropy = 0.0
    if ENTROPY:
        entropy = log_total - tl.sum((moment + total * (high - row_high)) * scale, 0) / row_total
    best = 0
    if ARGMAX:
        best = tl.min(tl.where(top == tl.max(top, 0), top_col, n_cols), 0)
    return row_high + log_total, entropy, best, tl.sum(smooth, 0)


@triton.jit
def load_row(row_ptr, n_cols, LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr):
    """(logits, columns, mask) of a row that is no longer than a tile."""
    cols = _columns(0, LANES, REPEATS, VECTOR)
    mask = cols < n_cols
    x = tl.load(row_ptr + cols, mask=mask, other=float("-inf"), eviction_policy="evict_first")
    return x.to(tl.float32), cols, mask


@triton.jit
def tile_statistics(
    x, cols, mask, ce_weight_ptr, n_cols, softcap, shift,
    ARGMAX: tl.constexpr, ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """What statistics gives, from load_row."""
    high, total, moment, top, top_col, smooth = _nothing_included(LANES)
    high, total, moment, top, top_col, smooth = _include(
        x, cols, mask, ce_weight_ptr, n_cols, softcap, shift, high, total, moment, top, top_col, smooth,
        ARGMAX, ENTROPY, SMOOTHING,
    )  # fmt: skip
    return _of_row(high, total, moment, top, top_col, smooth, n_cols, ARGMAX, ENTROPY)


@triton.jit
def _walk(
    row_ptr, ce_weight_ptr, n_cols, softcap, shift,
    ARGMAX: tl.constexpr, ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, KEEP: tl.constexpr,
    LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The running statistics of every lane at the end of a row."""
    policy: tl.constexpr = "evict_last" if KEEP else "evict_first"
    tile: tl.constexpr = LANES * REPEATS * VECTOR
    high, total, moment, top, top_col, smooth = _nothing_included(LANES)
    full_tiles_end = n_cols // tile * tile
    for start in range(0, full_tiles_end, tile):
        cols = _columns(start, LANES, REPEATS, VECTOR)
        x = tl.load(row_ptr + cols, eviction_policy=policy).to(tl.float32)
        high, total, moment, top, top_col, smooth = _include(
            x, cols, None, ce_weight_ptr, n_cols, softcap, shift, high, total, moment, top, top_col, smooth,
            ARGMAX, ENTROPY, SMOOTHING,
        )  # fmt: skip
    if full_tiles_end < n_cols:
        cols = _columns(full_tiles_end, LANES, REPEATS, VECTOR)
        mask = cols < n_cols
        x = tl.load(row_ptr + cols, mask=mask, other=float("-inf"), eviction_policy=policy).to(tl.float32)
        high, total, moment, top, top_col, smooth = _include(
            x, cols, mask, ce_weight_ptr, n_cols, softcap, shift, high, total, moment, top, top_col, smooth,
            ARGMAX, ENTROPY, SMOOTHING,
        )  # fmt: skip
    return high, total, moment, top, top_col, smooth


@triton.jit
def statistics(
    row_ptr, ce_weight_ptr, n_cols, softcap, shift,
    ARGMAX: tl.constexpr, ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, KEEP: tl.constexpr,
    LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """(log-sum-exp, entropy, index of the largest logit, sum of w * (z - shift)) of a row.

    KEEP: the row is read again, from the last tile to the first.
    """
    high, total, moment, top, top_col, smooth = _walk(
        row_ptr, ce_weight_ptr, n_cols, softcap, shift, ARGMAX, ENTROPY, SMOOTHING, KEEP, LANES, REPEATS, VECTOR
    )  # fmt: skip
    return _of_row(high, total, moment, top, top_col, smooth, n_cols, ARGMAX, ENTROPY)


@triton.jit
def partial_statistics(
    row_ptr, ce_weight_ptr, n_cols, softcap, SMOOTHING: tl.constexpr,
    LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """(largest z, sum of exp(z - largest), sum of w * z) of a row."""
    high, total, _, _, _, smooth = _walk(
        row_ptr, ce_weight_ptr, n_cols, softcap, 0.0, False, False, SMOOTHING, True, LANES, REPEATS, VECTOR
    )  # fmt: skip
    row_high = tl.max(high, 0)
    row_total = tl.sum(total * _exp(high - row_high), 0)
    # A row of -inf has left the lanes at what they began with.
    row_high = tl.where(row_total == 0.0, float("-inf"), row_high)
    return row_high, row_total, tl.sum(smooth, 0)


@triton.jit
def class_weight(ce_weight_ptr, target, valid):
    if ce_weight_ptr is None:
        weight = tl.where(valid, 1.0, 0.0)
    else:
        weight = tl.load(ce_weight_ptr + target, mask=valid, other=0.0).to(tl.float32)
    return weight


@triton.jit
def fill_zeros(row_ptr, n_cols, BLOCK: tl.constexpr):
    zeros = tl.zeros([BLOCK], row_ptr.dtype.element_ty)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        tl.store(row_ptr + cols, zeros, mask=cols < n_cols)


@triton.jit
def coefficients(
    ce_weight_ptr, class_weight_sum_ptr, weight, lse, n_cols, label_smoothing, lse_square_scale,
    SMOOTHING: tl.constexpr,
):  # fmt: skip
    """(of the probabilities, of the target, of the class weights) in the gradient of a row."""
    hard = (1.0 - label_smoothing) * weight
    coef_exp = hard + tl.where(lse_square_scale == 0.0, 0.0, 2.0 * lse_square_scale * weight * lse)
    if SMOOTHING:
        if ce_weight_ptr is None:
            coef_exp += label_smoothing
        else:
            coef_exp += label_smoothing / n_cols * tl.load(class_weight_sum_ptr)
    return coef_exp, hard, label_smoothing / n_cols


@triton.jit
def _store(out_ptr, grad, z, cols, mask, softcap):
    if softcap is not None:
        tanh = z / softcap
        grad *= 1.0 - tanh * tanh
    tl.store(out_ptr + cols, grad.to(out_ptr.dtype.element_ty), mask=mask, eviction_policy="evict_first")


@triton.jit
def _with_log(coef_exp, coef_log, log):
    """What a probability is multiplied by, with the share of its logarithm; one of 0 adds nothing."""
    if coef_log is not None:
        coef_exp += coef_log * tl.maximum(log, -1e30)
    return coef_exp


@triton.jit
def store_gradient(
    out_ptr, x, cols, mask, lse, ce_weight_ptr, coef_exp, coef_class, upstream, softcap, SMOOTHING: tl.constexpr,
    coef_log=None,
):  # fmt: skip
    """The gradient of a tile of logits x, without what only the target has."""
    z = capped(x, softcap)
    p = _exp(z - lse)
    coef_exp = _with_log(coef_exp, coef_log, z - lse)
    if SMOOTHING:
        if ce_weight_ptr is not None:
            coef_class *= tl.load(ce_weight_ptr + cols, mask=mask).to(tl.float32)
        grad = (coef_exp * p - coef_class) * upstream
    else:
        grad = (coef_exp * upstream) * p
    _store(out_ptr, grad, z, cols, mask, softcap)


@triton.jit
def store_target_gradient(
    out_ptr, target, valid, z, lse, weight, coef_exp, coef_target, coef_class, upstream, softcap,
    SMOOTHING: tl.constexpr, coef_log=None,
):  # fmt: skip
    """The one element of the target, after store_gradient of all: cheaper than to compare every column with it."""
    # The thread that stored the element is another one.
    tl.debug_barrier()
    grad = _with_log(coef_exp, coef_log, z - lse) * _exp(z - lse)
    if SMOOTHING:
        grad -= coef_class * weight
    _store(out_ptr, (grad - coef_target) * upstream, z, target, valid, softcap)


@triton.jit
def write_gradient(
    row_ptr, out_ptr, lse, ce_weight_ptr, coef_exp, coef_class, upstream, n_cols, softcap, SMOOTHING: tl.constexpr,
    LANES: tl.constexpr, REPEATS: tl.constexpr, VECTOR: tl.constexpr, coef_log=None,
):  # fmt: skip
    """store_gradient for a row, from the last tile to the first: what was read last is what the caches still have."""
    tile: tl.constexpr = LANES * REPEATS * VECTOR
    full_tiles_end = n_cols // tile * tile
    if full_tiles_end < n_cols:
        cols = _columns(full_tiles_end, LANES, REPEATS, VECTOR)
        mask = cols < n_cols
        x = tl.load(row_ptr + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
        store_gradient(
            out_ptr, x, cols, mask, lse, ce_weight_ptr, coef_exp, coef_class, upstream, softcap, SMOOTHING,
            coef_log,
        )  # fmt: skip
    for done in range(0, full_tiles_end, tile):
        cols = _columns(full_tiles_end - tile - done, LANES, REPEATS, VECTOR)
        x = tl.load(row_ptr + cols, eviction_policy="evict_first").to(tl.float32)
        store_gradient(
            out_ptr, x, cols, None, lse, ce_weight_ptr, coef_exp, coef_class, upstream, softcap, SMOOTHING,
            coef_log,
        )  # fmt: skip
