# SPDX-License-Identifier: BSD-3-Clause
"""The grouped GEMMs of compute capability 9.0 (csrc/experts/sm90): they gather the rows of x and of the
upstream gradient themselves, or load rows that are gathered; their epilogues activate and multiply by the
routing weight.

docs/lab/experts_sm90.md has their times.
"""

from typing import NamedTuple

import torch

from ..._core.head.sm90_plan import ENGINE
from ..._core.math.dtypes import accumulate_dtype
from ..._core.op.registration import FAMILIES
from .arguments import sizes_of

# Rows are counted in int32, with tiles that reach beyond the last row.
_MAX_SLOTS = 2**30
_VECTOR = 8
# The intermediate size from which a pass that gathers rows takes less time than GEMMs save by loading them
# with TMA.
GATHER_FIRST = 4096


def unsupported(a):
    """Why the kernels do not take the arguments of an op, in words; None if they take them."""
    experts, hidden, intermediate = sizes_of(a.down_proj, a.is_transposed)
    if a.x.dtype not in (torch.bfloat16, torch.float16):
        return f"x has dtype {a.x.dtype}, expected a 16-bit dtype"
    if accumulate_dtype(a.top_k_weights.dtype) != torch.float32:
        return f"top_k_weights has dtype {a.top_k_weights.dtype}"
    if a.activation == "gelu":
        return "activation is 'gelu'"
    if a.is_transposed != a.is_interleaved:
        return "is_transposed differs from is_interleaved"
    if hidden % _VECTOR or intermediate % _VECTOR:
        return f"hidden size {hidden} or intermediate size {intermediate} is no multiple of {_VECTOR}"
    if experts > ENGINE.max_experts:
        return f"{experts} experts are more than {ENGINE.max_experts}"
    if not 0 < a.top_k_index.numel() < _MAX_SLOTS:
        return f"top_k_index has {a.top_k_index.numel()} elements"
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(a, name)
        if not weight.is_contiguous() or weight.data_ptr() % 16:
            return f"{name} is not contiguous or not aligned to 16 bytes"
    if not has_kernels(a.x):
        return "the build or the device has no such kernels, LIGER_WGMMA is 0, or the backend is not cuda"
    return None


def has_kernels(x):
    """True if this build, the device of x, LIGER_WGMMA and the backend of swiglu have these kernels. Raises
    RuntimeError for a LIGER_WGMMA other than 0 and 1."""
    return (
        x.is_cuda
        and FAMILIES["swiglu"].choice == "cuda"
        and hasattr(torch.ops.liger_sm90, "takes_experts")
        and torch.ops.liger_sm90.takes_experts.default(x)
    )


def _options(a):
    return a.activation, a.is_interleaved, a.alpha, a.limit


def _dense(tensor):
    return None if tensor is None else aligned(tensor)


def aligned(rows):
    """Contiguous rows that begin at 16 bytes."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % 16 else rows


class Source(NamedTuple):
    """Rows of a GEMM: ``rows[tokens]``, or ``rows`` without tokens."""

    rows: torch.Tensor
    tokens: torch.Tensor | None


def source(x, routing, a):
    """The Source of the rows of all slots."""
    if sizes_of(a.down_proj, a.is_transposed)[2] >= GATHER_FIRST:
        return Source(routing.rows(x), None)
    return Source(x, routing.tokens)


def gate_up(x, routing, a, keep):
    """(product, gate and up): (S + 1, I), and (S + 1, 2I), or (0, 2I) unless ``keep``. The last row of gate
    and up is zero. x: a Source."""
    slots, intermediate = len(routing.tokens), sizes_of(a.down_proj, a.is_transposed)[2]
    product = x.rows.new_empty(slots, intermediate)
    kept = x.rows.new_empty(slots if keep else 0, 2 * intermediate)
    torch.ops.liger_sm90.experts_gate_up.default(
        *x, routing.ends, a.gate_up_proj, _dense(a.gate_up_proj_bias), *_options(a), kept, product
    )
    kept[-1:].zero_()
    return product, kept


def rows(inputs, routing, matrices, inputs_first, bias=None, weights=None):
    """(S + 1, N): ``(inputs @ matrix of the expert + bias) * weights``.

    Args:
        inputs: (S + 1, K).
        matrices: (E, K, N) with ``inputs_first``, else (E, N, K).
        bias: (E, N) or None.
        weights: (S + 1, 1) float32, or None for ones.
    """
    out = inputs.new_empty(inputs.shape[0], matrices.shape[2 if inputs_first else 1])
    torch.ops.liger_sm90.experts_rows.default(
        inputs, routing.ends, matrices, inputs_first, _dense(bias), weights, out
    )
    return out


def sum_choices(inputs, routing):
    """(T, N): the sum over the choices of each token, in float32 and in their order, rounded once."""
    out = inputs.new_empty(routing.inverse.shape[0], inputs.shape[1])
    torch.ops.liger_sm90.experts_sum.default(inputs, routing.inverse, out)
    return out


def grad_product_(grad_y, routing, a, weights, gate_up):
    """Overwrites gate and up with their gradients. Returns the product times the routing weight, (S + 1, I),
    and the sums over I of product times gradient of the product, (S + 1,) float32. grad_y: a Source."""
    slots, columns = gate_up.shape
    product = gate_up.new_empty(slots, columns // 2)
    tiles = -(-columns // (2 * ENGINE.expert_columns))
    sums = torch.empty(tiles, slots, dtype=torch.float32, device=gate_up.device)
    torch.ops.liger_sm90.experts_grad_product.default(
        *grad_y, routing.ends, a.down_proj, *_options(a), weights, gate_up, product, sums
    )
    return product, sums.sum(0)


def grad_matrix(a, inputs, routing, is_transposed):
    """(E, M, N): ``rows of a[group].T @ inputs[group]`` for each expert, or with ``is_transposed`` the
    transpose, (E, N, M); zero for an expert without rows. a: a Source."""
    sizes = a.rows.shape[1], inputs.shape[1]
    out = inputs.new_empty(len(routing.ends), *(reversed(sizes) if is_transposed else sizes))
    torch.ops.liger_sm90.experts_grad_matrix.default(*a, inputs, routing.ends, is_transposed, out)
    return out
