# SPDX-License-Identifier: BSD-3-Clause
"""GroupNorm. ``liger/ops/group_norm.py`` has the formulas.

The channels of a group of one sample are contiguous. Forward grid: one program per group, which reads it
once. For a group that is larger than a tile, one program per tile: a first kernel computes the mean and
squared deviations of each tile, and a second one merges them and normalises. Backward: channel_sums_kernel
computes sum(grad_y * xhat) and sum(grad_y) for every channel of every sample, which are also the partials of
the parameter gradients; grad_x_kernel has one program per tile. xhat is never materialised.
"""

import torch
import triton
import triton.language as tl

from .common import dense_vector, on_device_of, require_dtype, warps_for, write_back
from .norm_rows import parameter_grads, sum_partials

# Elements of a tile: at most, if it is a whole group; and for larger groups.
_GROUP_TILE, _PARTIAL_TILE = 16384, 8192

# --- kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _load_tile(ptr, start, size, BLOCK: tl.constexpr):
    """(values, mask, offsets) of the tile at offset ``start`` of ``size`` contiguous elements."""
    offsets = start + tl.arange(0, BLOCK)
    mask = offsets < size
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32), mask, offsets


@triton.jit
def _moments(x, mask, count):
    mean = tl.sum(x, 0) / count
    deviation = tl.where(mask, x - mean, 0.0)
    return mean, tl.sum(deviation * deviation, 0)


@triton.jit
def tile_moments_kernel(x_ptr, moments_ptr, size, tiles, BLOCK: tl.constexpr):
    """moments (tiles, 2): the mean of each tile, and the sum of squared deviations from it."""
    program = tl.program_id(0).to(tl.int64)
    row, tile = program // tiles, program % tiles
    x, mask, _ = _load_tile(x_ptr + row * size, tile * BLOCK, size, BLOCK)
    mean, squares = _moments(x, mask, tl.minimum(size - tile * BLOCK, BLOCK).to(tl.float32))
    tl.store(moments_ptr + program * 2, mean)
    tl.store(moments_ptr + program * 2 + 1, squares)


@triton.jit
def _merge_moments(moments_ptr, size, tiles, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """(mean, sum of squared deviations) of a group, merged from its tiles (Chan et al.), TILES at a time."""
    means = tl.zeros([TILES], tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        count = tl.minimum(tl.maximum(size - tile.to(tl.int64) * BLOCK, 0), BLOCK).to(tl.float32)
        means += tl.load(moments_ptr + tile * 2, mask=tile < tiles, other=0.0) * (count / size)
    mean = tl.sum(means, 0)
    squares = tl.zeros([TILES], tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        count = tl.minimum(tl.maximum(size - tile.to(tl.int64) * BLOCK, 0), BLOCK).to(tl.float32)
        deviation = tl.load(moments_ptr + tile * 2, mask=tile < tiles, other=0.0) - mean
        squares += count * deviation * deviation + tl.load(
            moments_ptr + tile * 2 + 1, mask=tile < tiles, other=0.0
        )
    return mean, tl.sum(squares, 0)


@triton.jit
def _load_channels(ptr, channels, mask):
    return tl.load(ptr + channels, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def forward_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, moments_ptr, mean_ptr, rstd_ptr, size, spatial, groups, tiles, eps,
    BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row, tile = program // tiles, program % tiles
    x, mask, offsets = _load_tile(x_ptr + row * size, tile * BLOCK, size, BLOCK)
    if moments_ptr is None:
        mean, squares = _moments(x, mask, size)  # no .to(): size is a constexpr int if it is 1
    else:
        mean, squares = _merge_moments(moments_ptr + row * tiles * 2, size, tiles, BLOCK, TILES)
    rstd = tl.rsqrt(squares / size + eps)
    y = (x - mean) * rstd
    channels = row % groups * (size // spatial) + offsets // spatial
    if weight_ptr is not None:
        y *= _load_channels(weight_ptr, channels, mask)
    if bias_ptr is not None:
        y += _load_channels(bias_ptr, channels, mask)
    tl.store(y_ptr + row * size + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
    if tile == 0:
        tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)


@triton.jit(do_not_specialize=["n"])
def channel_sums_kernel(
    grad_y_ptr, x_ptr, mean_ptr, rstd_ptr, sums_ptr, n, channels, per_group, spatial,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """sums (samples, 2, channels): sum(grad_y * xhat), sum(grad_y); ``n`` is samples * channels."""
    channel = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = channel < n
    mean = tl.load(mean_ptr + channel // per_group, mask=row_mask, other=0.0)[:, None]
    rstd = tl.load(rstd_ptr + channel // per_group, mask=row_mask, other=0.0)[:, None]
    dot_sums = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    grad_sums = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
    for start in range(0, spatial, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        mask = row_mask[:, None] & (cols < spatial)[None, :]
        offsets = channel[:, None] * spatial + cols[None, :]
        g = tl.load(grad_y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        dot_sums += g * ((x - mean) * rstd)
        grad_sums += g
    out = sums_ptr + channel // channels * channels + channel
    tl.store(out, tl.sum(dot_sums, 1), mask=row_mask)
    tl.store(out + channels, tl.sum(grad_sums, 1), mask=row_mask)


@triton.jit
def grad_x_kernel(
    grad_y_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, sums_ptr, grad_x_ptr, size, spatial, channels, per_group, tiles,
    BLOCK: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
):  # fmt: skip
    # Reverse order: the tiles that the previous kernel read last are the most likely ones in the L2 cache.
    program = tl.num_programs(0).to(tl.int64) - 1 - tl.program_id(0)
    row, tile = program // tiles, program % tiles
    groups = channels // per_group
    first = row % groups * per_group
    sums = sums_ptr + row // groups * 2 * channels + first
    dot_sums = tl.zeros([BLOCK_CHANNELS], tl.float32)
    grad_sums = tl.zeros([BLOCK_CHANNELS], tl.float32)
    for start in range(0, per_group, BLOCK_CHANNELS):
        inner = start + tl.arange(0, BLOCK_CHANNELS)
        mask = inner < per_group
        dot = tl.load(sums + inner, mask=mask, other=0.0)
        grad_sum = tl.load(sums + channels + inner, mask=mask, other=0.0)
        if weight_ptr is not None:
            weight = _load_channels(weight_ptr, first + inner, mask)
            dot *= weight
            grad_sum *= weight
        dot_sums += dot
        grad_sums += grad_sum
    a = tl.sum(grad_sums, 0) / size
    c = tl.sum(dot_sums, 0) / size

    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    x, mask, offsets = _load_tile(x_ptr + row * size, tile * BLOCK, size, BLOCK)
    g, _, _ = _load_tile(grad_y_ptr + row * size, tile * BLOCK, size, BLOCK)
    if weight_ptr is not None:
        g *= _load_channels(weight_ptr, first + offsets // spatial, mask)
    grad_x = rstd * (g - a - (x - mean) * rstd * c)
    tl.store(grad_x_ptr + row * size + offsets, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)


# --- launchers ----------------------------------------------------------------------------------------------


def _contiguous_output(out):
    return out if out.is_contiguous() else out.new_empty(out.shape)


def _tile(size, largest):
    """(elements of a tile, tiles of a group)."""
    block = triton.next_power_of_2(size) if size <= largest else _PARTIAL_TILE
    return block, triton.cdiv(size, block)


def group_norm(x, num_groups, weight=None, bias=None, eps=1e-5):
    require_dtype("group_norm", "x", x)
    samples, channels = x.shape[:2]
    y = torch.empty_like(x)
    mean, rstd = (torch.empty(samples, num_groups, dtype=torch.float32, device=x.device) for _ in range(2))
    if x.numel() == 0:
        return y, mean.fill_(float("nan")), rstd.fill_(float("nan"))
    spatial, x, y_out = x.shape[2:].numel(), x.contiguous(), _contiguous_output(y)
    size = channels // num_groups * spatial
    block, tiles = _tile(size, _GROUP_TILE)
    moments = None
    with on_device_of(x):
        grid = (samples * num_groups * tiles,)
        if tiles > 1:
            moments = torch.empty(*grid, 2, dtype=torch.float32, device=x.device)
            tile_moments_kernel[grid](x, moments, size, tiles, block, num_warps=warps_for(block))
        forward_kernel[grid](
            x, dense_vector(weight), dense_vector(bias), y_out, moments, mean, rstd, size, spatial, num_groups, tiles,
            eps, block, 128, num_warps=warps_for(block),
        )  # fmt: skip
    write_back(y, y_out)
    return y, mean, rstd


def group_norm_backward(
    grad_y, x, num_groups, weight, bias, mean, rstd, need_grad_x, need_grad_weight, need_grad_bias
):
    op = "group_norm_backward"
    require_dtype(op, "x", x)
    need_grad_weight = need_grad_weight and weight is not None
    need_grad_bias = need_grad_bias and bias is not None
    grad_x = torch.empty_like(x) if need_grad_x else x.new_empty(0)
    grad_weight, grad_bias, needed_grads = parameter_grads(x, weight, bias, need_grad_weight, need_grad_bias)
    if x.numel() == 0 or not (need_grad_x or needed_grads):
        return grad_x, grad_weight.zero_(), grad_bias.zero_()
    samples, channels = x.shape[:2]
    per_group, spatial = channels // num_groups, x.shape[2:].numel()
    grad_y, x, mean, rstd, weight = (
        None if t is None else t.contiguous() for t in (grad_y, x, mean, rstd, weight)
    )
    sums = torch.empty(samples, 2, channels, dtype=torch.float32, device=x.device)
    block_cols = min(triton.next_power_of_2(spatial), 2048)
    block_rows = max(1, 2048 // block_cols)
    with on_device_of(x):
        channel_sums_kernel[(triton.cdiv(samples * channels, block_rows),)](
            grad_y, x, mean, rstd, sums, samples * channels, channels, per_group, spatial, block_rows, block_cols,
            num_warps=4,
        )  # fmt: skip
        if needed_grads:
            # The partials are per sample. Both gradients have partials, even if only one is needed.
            both = (
                (grad_weight, grad_bias)
                if len(needed_grads) == 2
                else (needed_grads[0], torch.empty_like(needed_grads[0]))
            )
            sum_partials(sums, both if need_grad_weight else both[::-1])
        if need_grad_x:
            grad_x_out = _contiguous_output(grad_x)
            size = per_group * spatial
            block, tiles = _tile(size, _PARTIAL_TILE)
            grad_x_kernel[(samples * num_groups * tiles,)](
                grad_y, x, weight, mean, rstd, sums, grad_x_out, size, spatial, channels, per_group, tiles, block,
                min(triton.next_power_of_2(per_group), 1024), num_warps=warps_for(block),
            )  # fmt: skip
            write_back(grad_x, grad_x_out)
    return grad_x, grad_weight, grad_bias
