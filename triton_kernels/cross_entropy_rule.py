"""The row rule of cross entropy for Triton kernels: statistics of a row, what follows from them, and its gradient.

docs/cross_entropy.md defines every term.
"""

import triton
import triton.language as tl


@triton.jit
def capped(x, softcap):
    """softcap * tanh(x / softcap), or x without a softcap. The interpreter has no tanh, hence the exponential form."""
    if softcap is not None:
        u = x / softcap
        t = tl.exp(-2.0 * tl.abs(u))
        far = (1.0 - t) / (1.0 + t)
        # Near zero 1 - t cancels, so there it is the Taylor series, exact to float32 up to 0.2.
        square = u * u
        near = u * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
        x = softcap * tl.where(tl.abs(u) < 0.2, near, tl.where(u < 0, -far, far))
    return x


@triton.jit
def statistics(
    row_ptr, ce_weight_ptr, n_cols, softcap, shift,
    ARGMAX: tl.constexpr, ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(log-sum-exp, entropy, index of the largest logit, sum of w * (z - shift)) of a row."""
    # Finite, so that z - high is -inf rather than nan for z = -inf.
    high = tl.full([BLOCK], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    smooth = tl.zeros([BLOCK], tl.float32)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    top_col = tl.arange(0, BLOCK)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        x = tl.load(row_ptr + cols, mask=mask, other=float("-inf")).to(tl.float32)
        z = x
        if softcap is not None:
            z = tl.where(mask, capped(x, softcap), float("-inf"))
        # One exponential per logit: the smaller of z and the maximum so far, relative to the larger.
        step = z - high
        e = tl.exp(-tl.abs(step))
        larger = step > 0
        if ENTROPY:
            # sum of exp(z - high) * (z - high)
            moment = tl.where(larger, (moment - total * step) * e, moment + tl.where(e > 0, e * step, 0.0))
        total = tl.where(larger, total * e + 1.0, total + e)
        high = tl.maximum(high, z)
        if ARGMAX:
            # By the logits themselves: a softcap maps different large ones to one number.
            top_col = tl.where(x > top, cols, top_col)
            top = tl.maximum(top, x)
        if SMOOTHING:
            cost = tl.where(mask, z - shift, 0.0)
            if ce_weight_ptr is not None:
                cost *= tl.load(ce_weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
            smooth += cost

    row_high = tl.max(high, 0)
    scale = tl.exp(high - row_high)
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
def tile_statistics(
    x, z, cols, mask, ce_weight_ptr, n_cols, shift,
    ARGMAX: tl.constexpr, ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr,
):  # fmt: skip
    """What statistics gives for a row that is one tile, and its probabilities."""
    # Finite, so that z - high is -inf rather than nan for z = -inf.
    high = tl.maximum(tl.max(z, 0), -3.0e38)
    step = z - high
    e = tl.exp(step)
    total = tl.sum(e, 0)
    log_total = tl.log(total)
    entropy = 0.0
    if ENTROPY:
        entropy = log_total - tl.sum(tl.where(e > 0, e * step, 0.0), 0) / total
    best = 0
    if ARGMAX:
        # By the logits themselves, as above; a row of nan has no largest one.
        best = tl.min(tl.where(x == tl.max(x, 0), cols, n_cols), 0) % n_cols
    smooth = 0.0
    if SMOOTHING:
        cost = tl.where(mask, z - shift, 0.0)
        if ce_weight_ptr is not None:
            cost *= tl.load(ce_weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        smooth = tl.sum(cost, 0)
    return high + log_total, entropy, best, smooth, e / total


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
    """(of the probabilities, of the target) in the gradient of a row."""
    hard = (1.0 - label_smoothing) * weight
    of_p = hard + tl.where(lse_square_scale == 0.0, 0.0, 2.0 * lse_square_scale * weight * lse)
    if SMOOTHING:
        if ce_weight_ptr is None:
            of_p += label_smoothing
        else:
            of_p += label_smoothing / n_cols * tl.load(class_weight_sum_ptr)
    return of_p, hard


@triton.jit
def store_gradient(
    out_ptr, p, z, cols, mask, ce_weight_ptr, of_p, hard, upstream, target, n_cols, label_smoothing, softcap,
    SMOOTHING: tl.constexpr,
):  # fmt: skip
    grad = of_p * p
    if SMOOTHING:
        per_class = label_smoothing / n_cols
        if ce_weight_ptr is None:
            grad -= per_class
        else:
            grad -= per_class * tl.load(ce_weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    grad -= tl.where(cols == target, hard, 0.0)
    if softcap is not None:
        tanh = z / softcap
        grad *= 1.0 - tanh * tanh
    tl.store(out_ptr + cols, (grad * upstream).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def write_gradient(
    row_ptr, out_ptr, ce_weight_ptr, class_weight_sum_ptr, upstream, target, weight, lse, n_cols,
    label_smoothing, lse_square_scale, softcap, SMOOTHING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    of_p, hard = coefficients(
        ce_weight_ptr, class_weight_sum_ptr, weight, lse, n_cols, label_smoothing, lse_square_scale, SMOOTHING
    )
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        z = capped(tl.load(row_ptr + cols, mask=mask, other=0.0).to(tl.float32), softcap)
        store_gradient(
            out_ptr, tl.exp(z - lse), z, cols, mask, ce_weight_ptr, of_p, hard, upstream, target, n_cols,
            label_smoothing, softcap, SMOOTHING,
        )  # fmt: skip
