# SPDX-License-Identifier: BSD-3-Clause
"""The parts of the kernels of grouped_experts: routing, activations, and the sum of the experts of a
token."""

from typing import NamedTuple

import torch

from ..._core.math.dtypes import accumulate_dtype
from ..._core.math.row_blocks import row_blocks
from ..._core.op.by_name import options_among
from ..._core.op.registration import triton_module_beside
from ..gated import APPROXIMATIONS, op_of
from ..geglu import geglu, geglu_packed
from ..swiglu import swiglu, swiglu_packed
from . import counting_sort
from .grouped_mm import split

_TRITON_MODULE = "liger.triton_kernels.expert_gate"
_TRITON_ROWS = "liger.triton_kernels.expert_rows"


def weights_of(top_k_weights, top_k_index):
    """The routing weights, (T, K), with NaN for a negative index."""
    weights = top_k_weights.masked_fill(top_k_index < 0, float("nan"))
    return weights.reshape(-1, weights.shape[-1])


class Routing:
    """The slots of a call, sorted by expert. A slot is one of the K choices of a token.

    One more row, the pad, follows the S sorted slots. It belongs to no group of a GEMM. Slots of sentinels
    are sorted to the end, belong to no group either, and refer to the pad. No shape depends on the choices,
    and the host does not read them.

    Attributes:
        ends: (E,) int32, the end of the rows of each expert.
        order: (S,) the slot of each row.
        tokens: (S + 1,) the token of each row.
        experts: (S + 1,) an expert for each row: its own, or any for rows without one.
        inverse: (T, K) the row of each slot.
        weights: (S + 1, 1) the routing weight of each row, in the accumulation dtype: 0 of the pad, NaN where
            the index is negative. None without top_k_weights.
    """

    def __init__(self, top_k_index, num_experts, top_k_weights=None):
        if counting_sort.sorts(top_k_index, num_experts, top_k_weights):
            *sorted_slots, self.weights = counting_sort.route(top_k_index, num_experts, top_k_weights)
            self.ends, self.order, self.tokens, self.experts, self.inverse = sorted_slots
            return
        kernels = triton_module_beside("swiglu", _TRITON_ROWS, top_k_index)
        if kernels is not None and kernels.sorts(top_k_index, num_experts):
            sorted_slots = kernels.route(top_k_index, num_experts)
            self.ends, self.order, self.tokens, self.experts, self.inverse = sorted_slots
        else:
            self._sort(top_k_index, num_experts)
        self.weights = None
        if top_k_weights is not None:
            self.weights = self._weights(weights_of(top_k_weights, top_k_index))

    def _sort(self, top_k_index, num_experts):
        slots = top_k_index.numel()
        # A radix sort of short integers takes fewer passes. Negative indices are an error, not sentinels.
        dtype = torch.int16 if num_experts < 2**15 else torch.int32
        experts = top_k_index.reshape(-1).clamp(0, num_experts).to(dtype)
        experts, self.order = torch.sort(experts, stable=True)
        candidates = torch.arange(num_experts, dtype=dtype, device=experts.device)
        self.ends = torch.searchsorted(experts, candidates, right=True, out_int32=True)
        self.tokens = self.order.new_zeros(slots + 1)
        torch.div(self.order, top_k_index.shape[-1], rounding_mode="floor", out=self.tokens[:-1])
        self.experts = self.order.new_zeros(slots + 1)
        self.experts[:-1] = experts.clamp(max=num_experts - 1)
        row = torch.arange(slots, device=experts.device)
        row.masked_fill_(row >= self.ends[-1], slots)
        inverse = torch.empty_like(self.order).scatter_(0, self.order, row)
        self.inverse = inverse.view(top_k_index.shape)

    def rows(self, x):
        """(S + 1, H): the row of x of each slot."""
        return x.index_select(0, self.tokens)

    def _weights(self, top_k_weights):
        weights = top_k_weights.new_zeros(len(self.tokens), 1, dtype=accumulate_dtype(top_k_weights.dtype))
        weights[:-1, 0] = top_k_weights.reshape(-1).index_select(0, self.order)
        return weights

    def scatter(self, values):
        """Values of rows, (S + 1,), as values of slots, (T, K); zero for sentinels. Overwrites the value of
        the pad."""
        values[-1:].zero_()
        return values.index_select(0, self.inverse.view(-1)).view(self.inverse.shape)

    def add_bias_(self, rows, bias):
        """Adds to each row the bias of its expert, (E, N)."""
        if bias is None:
            return
        for block in row_blocks(rows):
            rows[block] += bias.index_select(0, self.experts[block])

    def combine(self, rows, top_k_weights=None):
        """The weighted sum over the K slots of each token, (T, N), in the accumulation dtype and rounded
        once.

        The order of each sum is fixed. The kernels skip the pad, so values of rows without an expert have no
        effect.
        """
        kernels = triton_module_beside("swiglu", _TRITON_ROWS, rows)
        if kernels is not None and kernels.takes(top_k_weights):
            return kernels.expert_sum(rows, self.inverse, top_k_weights)
        table, index, weights = rows, self.inverse, top_k_weights
        pad = len(rows) - 1
        if weights is not None:
            # On a GPU the kernel multiplies the pad, as zero, by its weight, which may be NaN.
            weights = weights.masked_fill(index == pad, 0)
        if weights is not None and weights.dtype != rows.dtype:
            if rows.dtype == torch.bfloat16 and weights.dtype == torch.float32:
                # torch's kernel needs weights of the dtype of the rows; both parts have the exponents of
                # float32.
                weights = torch.stack(split(weights, rows.dtype), -1).flatten(-2)
                index = index.repeat_interleave(2, -1)
            else:
                wide = torch.promote_types(rows.dtype, weights.dtype)
                table, weights = rows.to(wide), weights.to(wide)
        summed = torch.nn.functional.embedding_bag(
            index, table, per_sample_weights=weights, mode="sum", padding_idx=pad
        )
        return summed.to(rows.dtype)


def row_products(a, b, wide):
    """``(a * b).sum(-1)`` of each row, summed in the dtype ``wide``."""
    out = a.new_empty(a.shape[0], dtype=wide)
    # Products of bfloat16 are rounded, as a and b were: that is a third of the traffic, and they cannot
    # overflow.
    factors = a.dtype if a.dtype == torch.bfloat16 else wide
    for block in row_blocks(a):
        torch.sum(a[block].to(factors) * b[block].to(factors), -1, dtype=wide, out=out[block])
    return out


class Gate(NamedTuple):
    """The activation of gate and up, which are the columns of one tensor (rows, 2I).

    Attributes:
        activation: an :data:`ExpertActivation`.
        is_interleaved: gate in even columns and up in odd ones; else gate in the first half.
        alpha: of ``"gpt_oss"``.
        limit: gate is clamped from above and up on both sides; None: neither.
    """

    activation: str
    is_interleaved: bool
    alpha: float
    limit: float | None

    @classmethod
    def of_op(cls, arguments):
        return options_among(cls, arguments)

    def _halves(self, gate_up):
        if self.is_interleaved:
            return gate_up[:, ::2], gate_up[:, 1::2]
        return gate_up.chunk(2, -1)

    def kernels(self, tensor):
        """The module of Triton kernels, or None."""
        return triton_module_beside("swiglu", _TRITON_MODULE, tensor)

    @property
    def _has_op(self):
        return self.activation != "gpt_oss" and self.limit is None

    def _operands(self, gate_up):
        """The tensors of an op of swiglu or geglu: the packed form takes gate and up as they are in one
        tensor."""
        return self._halves(gate_up) if self.is_interleaved else (gate_up,)

    def product(self, gate_up):
        """(rows, I), contiguous."""
        if self._has_op:
            # Not the op, which would call its formula: a backward runs this outside of any op.
            forms = (swiglu, swiglu_packed) if self.activation == "silu" else (geglu, geglu_packed)
            options = () if self.activation == "silu" else (APPROXIMATIONS[self.activation],)
            return forms[not self.is_interleaved](*self._operands(gate_up), *options).contiguous()
        kernels = self.kernels(gate_up)
        if kernels is not None:
            return kernels.product(gate_up, self)
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        for block in row_blocks(out):
            gate, up, _, _ = self._clamped(gate_up[block])
            out[block] = self._value(gate).mul_(up)
        return out

    def backward_(self, grad, gate_up):
        """Overwrites gate_up with its gradient. ``grad``: of the product, overwritten as well."""
        if self._has_op:
            op, options = op_of(self.activation, "_backward_" if self.is_interleaved else "_packed_backward_")
            op(grad, *self._operands(gate_up), *options)
            return
        for block in row_blocks(grad):
            gate, up, gate_passes, up_passes = self._clamped(gate_up[block])
            wide = grad[block].to(gate.dtype)
            grad_gate, grad_up = self._halves(gate_up[block])
            grad_gate.copy_(self._derivative(wide * up, gate).masked_fill_(~gate_passes, 0))
            grad_up.copy_(wide.mul_(self._value(gate)).masked_fill_(~up_passes, 0))

    def _clamped(self, gate_up):
        """(gate, up with its offset, where gate has a gradient, where up has one), in the accumulation
        dtype."""
        gate, up = (half.to(accumulate_dtype(half.dtype)) for half in self._halves(gate_up))
        limit = float("inf") if self.limit is None else self.limit
        gate_passes, up_passes = ~(gate > limit), ~(up.abs() > limit)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate, up + 1 if self.activation == "gpt_oss" else up, gate_passes, up_passes

    def _value(self, gate):
        if self.activation in APPROXIMATIONS:
            return torch.nn.functional.gelu(gate, approximate=APPROXIMATIONS[self.activation])
        if self.activation == "silu":
            return torch.nn.functional.silu(gate)
        return torch.sigmoid(gate * self.alpha).mul_(gate)

    def _derivative(self, grad, gate):
        if self.activation in APPROXIMATIONS:
            approximate = APPROXIMATIONS[self.activation]
            return torch.ops.aten.gelu_backward(grad, gate, approximate=approximate)
        alpha = 1.0 if self.activation == "silu" else self.alpha
        return torch.ops.aten.silu_backward(grad, gate * alpha)
