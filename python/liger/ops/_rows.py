"""Walking over a tensor in blocks of rows, so that float32 temporaries stay small."""

# Elements of a float32 temporary: 16 MiB keeps CPU caches busy, 128 MiB keeps a GPU busy.
_CPU_BLOCK = 1 << 22
_GPU_BLOCK = 1 << 25


def row_blocks(x, start=0, stop=None):
    """Slices that cover rows ``start`` to ``stop`` of x, each of a bounded number of elements (at least one row)."""
    stop = x.shape[0] if stop is None else stop
    row = x[:1].numel()
    step = max(1, (_CPU_BLOCK if x.device.type == "cpu" else _GPU_BLOCK) // max(1, row))
    return (slice(begin, min(begin + step, stop)) for begin in range(start, stop, step))
