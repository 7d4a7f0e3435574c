# SPDX-License-Identifier: BSD-3-Clause
"""Shared pieces of the op tests: dtypes, the tolerance rule, and gradients of a function."""

import math
from contextlib import contextmanager

import pytest
import torch

import liger
from liger._core.runtime.environment import triton_interpreted

# Triton's interpreter computes bfloat16 dots wrongly, so it is tested in the two dtypes that it has right.
DTYPES = (
    [torch.float32, torch.float16] if triton_interpreted() else [torch.float32, torch.float16, torch.bfloat16]
)
# More rows than the persistent blocks of a GPU, or the programs of the interpreter, take at a time.
MANY_ROWS = 2000 if triton_interpreted() else 140000


def of_cuda(*shapes):
    """Sizes that select another kernel of CUDA, but not of Triton: Triton's interpreter leaves them out."""
    return () if triton_interpreted() else shapes


@contextmanager
def compiled():
    """The device, with the compiled kernels in use; where they cannot run, the test is skipped."""
    possible, why = liger._core.op.backend.supported("cuda")
    if not possible:
        pytest.skip(why)
    with liger.use_backend("cuda"):
        yield torch.device("cuda")


def poison_memory():
    """Leaves not-a-numbers in the memory of the device that comes next: what is read before it is written
    shows."""
    for mib in (1, 4, 32, 128):
        torch.full((mib << 18,), torch.nan, device="cuda")


def error(actual, exact):
    """Largest absolute error, relative to the largest magnitude of the exact value."""
    exact = exact.double()
    if exact.numel() == 0:
        return 0.0
    scale = exact.abs().max().clamp_min(1e-30)
    return ((actual.double() - exact).abs().max() / scale).item()


def assert_as_exact_as_torch(actual, plain, exact, name="", intermediate=0.0):
    """The error against the exact (float64) value is at most twice the error of plain torch in the same
    dtype, plus the rounding of the dtype itself: no tolerance is tuned by hand. Where the result depends on a
    float32 intermediate whose absolute error becomes a relative one, such as the argument of an exponential,
    ``intermediate`` is its size."""
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    assert torch.isfinite(actual).all() or not torch.isfinite(exact).all(), f"{name}: not finite"
    floor = 2 * torch.finfo(actual.dtype).eps + intermediate * torch.finfo(torch.float32).eps
    ours, theirs = error(actual, exact), error(plain, exact)
    # Where plain torch overflows (the derivative of rsqrt in float16), the floor alone counts.
    allowed = (0.0 if math.isnan(theirs) else 2 * theirs) + floor
    assert ours <= allowed, f"{name}: error {ours:.3g}, plain torch {theirs:.3g}, floor {floor:.3g}"


def forward_backward(function, inputs, grad_outputs=None):
    """(outputs, gradients) of ``function(*inputs)`` for random or given upstream gradients; leaves are made
    anew."""
    leaves = [
        t.detach().clone().requires_grad_(t.is_floating_point()) if t is not None else None for t in inputs
    ]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if grad_outputs is None:
        grad_outputs = [torch.randn_like(o) for o in outputs]
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    grads = torch.autograd.grad(
        outputs, wanted, [g.to(o.dtype) for g, o in zip(grad_outputs, outputs, strict=True)]
    )
    return outputs, grads


def check_op(function, plain, inputs, intermediate=0.0):
    """Outputs and gradients of ``function`` against ``plain`` in the same dtype and in float64."""
    check_draws(function, plain, [inputs], intermediate)


def check_draws(function, plain, draws, intermediate=0.0):
    """:func:`check_op` of the results of several draws of the inputs, stacked.

    For a result of one number: its error may be any multiple of the error of plain torch, which is zero by
    chance, and relative to itself it has no bound where its terms cancel.
    """
    runs = []
    for inputs in draws:
        upstream = [torch.randn_like(o) for o in forward_backward(function, inputs)[0]]
        exact_inputs = [t.double() if t is not None else None for t in inputs]
        calls = [(function, inputs), (plain, inputs), (plain, exact_inputs)]
        runs.append([forward_backward(f, arguments, upstream) for f, arguments in calls])
    for index, kind in enumerate(("output", "gradient")):
        # One list of results per draw, each of (ours, plain, exact), then one stack of draws per result.
        of_draws = [list(zip(*(results[index] for results in run), strict=True)) for run in runs]
        for i, draws_of_result in enumerate(zip(*of_draws, strict=True)):
            values = [torch.stack(of_call) for of_call in zip(*draws_of_result, strict=True)]
            assert_as_exact_as_torch(*values, f"{kind} {i}", intermediate)


def far_apart(tensor):
    """The same values, 2^30 elements apart in the last dimension: 32-bit offsets overflow from the third one
    on.

    A CPU maps the pages that are written alone; a GPU needs the memory, and where it is not free the test is
    skipped.
    """
    step, columns = 1 << 30, tensor.shape[-1]
    size = columns * step * tensor.element_size()
    if tensor.is_cuda and torch.cuda.mem_get_info(tensor.device)[0] < 1.1 * size:
        pytest.skip(f"needs {size >> 30} GiB of device memory")
    rows = tensor.numel() // columns
    wide = torch.empty(columns, step, dtype=tensor.dtype, device=tensor.device)
    wide[:, :rows] = tensor.reshape(rows, columns).T
    return wide[:, :rows].T.view_as(tensor)


def strided_like(tensor):
    """The same values in a tensor that is not contiguous: every second element of a wider last dimension."""
    wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] * 2)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def padded(tensor):
    """The same values in rows that lie differently to the vectors of the hardware, from row to row."""
    return torch.nn.functional.pad(tensor, (3, 2))[:, 3:-2]


def ignored_in_patterns(target, ignore_index, blocks):
    """Ignored rows first, last, alone, in pairs, and all that one of so many blocks would take."""
    row = torch.arange(target.numel(), device=target.device)
    ignored = (row == 0) | (row == target.numel() - 1) | (row % 7 > 4) | (row % 5 == 1) | (row % blocks == 9)
    return torch.where(ignored, ignore_index, target)


def made_in_forward(dtype, reduction):
    """Where docs/guides/cross_entropy.md says that the forward makes the gradient."""
    return reduction != "none" and dtype != torch.float16
