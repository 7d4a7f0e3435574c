# SPDX-License-Identifier: BSD-3-Clause
"""Base class of the losses over a chunked lm_head: options, the methods that a subclass defines, the call of
the op."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from .._core.dtensor.inputs import is_dtensor
from .._core.head.float16 import float16_factor
from .._core.head.lm_head import HeadOptions
from .._core.op.arguments import FLAG, HEAD, arguments
from .._core.op.autocast import autocast_operands
from .._core.op.autograd import recording_tracer, wants_grad
from .._core.op.loss_rows import refuse_gradients
from .._core.op.tensors import LayerNames, check_accum_dtype, check_layer, check_logits_dtype, wrong_shape
from .._core.runtime.memory_budget import check_budget_variable
from ..ops.fused_linear_ce.add_grad_weight import logprobs_adding_grad_weight, summed_weight
from ..ops.fused_linear_logprobs.op import logprobs_of_layer
from ._batch import Batch, gather_tokens, sequence_scores
from ._op import FACTOR, fused_linear_loss_forward, portable_name, register_function
from .results import TOKEN_METRICS, LossResult, TokenMetric, TokenMetrics

_instance_count = itertools.count()
UNITS = ("token", "sequence", "pair", "batch")
_T = TypeVar("_T")


def _compute(self, logprobs: Tensor, entropy: Tensor | None, **tensors: Tensor) -> Tensor:
    """The terms of the loss for some units of the batch; the loss is the sum of all terms.

    Args:
        logprobs: (tokens,), (sequences, L), (2, pairs, L) with the chosen sequences first, or (S, L) for
            ``"batch"``, according to ``unit``. Float32, or float64 for float64 inputs; 0 at ignored tokens.
        entropy: as ``logprobs``, or None.
        tensors: the tensors of ``given``, sliced as ``logprobs``, and the tensors of ``shared``, by name.

    Returns:
        A tensor of any shape. A divisor that depends on the whole batch must be passed in ``shared``.
    """
    raise NotImplementedError(f"{type(self).__name__} defines no compute")


class FusedLinearLoss(nn.Module):
    """A loss of the log-probabilities of the targets (and of the entropies) under
    ``input @ weight.T + bias``.

    A subclass defines ``compute`` in plain PyTorch and calls :meth:`run`. The forward differentiates
    ``compute`` chunk by chunk: the logits of the whole batch are never materialised, and ``torch.compile``
    sees one op.

    Class attributes:
        unit: the rows that one term of the loss depends on: ``"token"``, ``"sequence"``, ``"pair"`` or
            ``"batch"``. A chunk is as many units as fit the budget; its logits live from the forward GEMM
            through both backward GEMMs. If one unit exceeds the budget, its logits are computed twice.
        uses_entropy: whether ``compute`` reads the entropies.

    Args:
        ignore_index: the target of ignored tokens.
        metrics: names among ``"logprobs"``, ``"entropy"`` and ``"argmax"``: the metrics per token that
            ``forward`` returns, as :class:`TokenMetrics` defines them. They need no extra pass over the
            logits.
        accum_dtype: dtype in which the gradient of the weight is summed over chunks; None means float32.
            Change it only if a float32 buffer of the size of the weight does not fit.
        logits_dtype: ``torch.float32`` for logits as exact as IEEE float32 arithmetic makes them, as in
            :func:`liger.fused_linear_logprobs`; weight and bias may be float32 then. None: a backend may
            round them. Choose float32 if the log-probabilities are compared with the results of another
            program, such as a sampler.
        memory_budget: bytes for the logits of a chunk; None means ``LIGER_MEMORY_BUDGET``, by default 512
            MiB. Lower it if the loss runs out of memory.
        softcap: logits become ``softcap * tanh(logits / softcap)`` before the division by temperature; None:
            no cap.
        temperature: divisor of the logits, positive.
        accumulate_grad_weight: the backward adds the gradient of the weight to its float32 ``main_grad``, or
            to its ``grad``, without a temporary of its size, as in :func:`liger.fused_linear_logprobs`.

    Raises:
        TypeError: an option has a wrong type.
        ValueError: an option is out of range, or an unknown metric.

    Example::

        >>> class Likelihood(liger.losses.FusedLinearLoss):
        ...     def compute(self, logprobs, entropy):
        ...         return -logprobs
        ...     def forward(self, input, weight, target):
        ...         return self.run(self.batch(input, target), weight).loss
        >>> loss = Likelihood(temperature=0.9)(input, weight, target)

    Source: the gradient in the forward follows Hsu et al., "Liger Kernel", arXiv 2410.10989.
    """

    unit: Literal["token", "sequence", "pair", "batch"] = "token"
    uses_entropy: bool = False

    @arguments(metrics=TOKEN_METRICS, accumulate_grad_weight=FLAG, **HEAD)
    def __init__(
        self,
        *,
        ignore_index: int = -100,
        metrics: Sequence[TokenMetric] = (),
        accum_dtype: torch.dtype | None = None,
        logits_dtype: torch.dtype | None = None,
        memory_budget: int | None = None,
        softcap: float | None = None,
        temperature: float = 1.0,
        accumulate_grad_weight: bool = False,
    ) -> None:
        super().__init__()
        check_logits_dtype(type(self).__name__, None, None, logits_dtype)
        if self.unit not in UNITS:
            raise ValueError(
                f"{type(self).__name__}: unit is '{self.unit}', expected one of {', '.join(UNITS)}"
            )
        self.ignore_index, self.metrics = ignore_index, tuple(metrics)
        self.accum_dtype, self.logits_dtype, self.memory_budget = accum_dtype, logits_dtype, memory_budget
        self.softcap, self.temperature = softcap, float(temperature)
        self.accumulate_grad_weight = accumulate_grad_weight
        self._register()

    def _register(self) -> None:
        self._function = f"{type(self).__qualname__}.{next(_instance_count)}"
        register_function(self._function, self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy or an unpickled object needs a registration of its own.
        super().__setstate__(state)
        self._register()

    # An attribute, as nn.Module.forward: the keywords of a subclass differ from the keywords of the base.
    compute: Callable[..., Tensor] = _compute

    def evaluate(
        self,
        logprobs: Tensor,
        entropy: Tensor | None,
        given: Mapping[str, Tensor],
        shared: Mapping[str, Tensor],
    ) -> Tensor:
        """Calls :meth:`compute` with tensors of the op: their rows are (parts, groups, length)."""
        shared = dict(shared)
        token_index, is_token = shared.pop("token_index", None), shared.pop("is_token", None)

        def by_unit(tensor):
            if tensor is None or self.unit == "pair":
                return tensor
            return tensor.squeeze(1) if self.unit == "batch" else tensor.squeeze(0)

        def rows(tensor):
            if tensor is None:
                return None
            if token_index is not None:
                # Padding has the value of some token, which may be -inf, and must not send it a gradient.
                tokens = torch.where(is_token, gather_tokens(tensor, token_index), 0.0)
                return _split_pairs(self.unit, tokens)
            return tensor.reshape(-1) if self.unit == "token" else by_unit(tensor)

        given = {name: by_unit(tensor) for name, tensor in given.items()}
        return self.compute(rows(logprobs), rows(entropy), **given, **shared)

    def batch(
        self,
        input: Tensor,
        target: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_length: int | None = None,
    ) -> Batch:
        """The :class:`Batch` of a call.

        Args:
            input: (S, L, H) hidden states, or packed, (T, H) or (1, T, H).
            target: the shape of input without its last dimension, int64 or int32.
            mask: the shape of target, 0 at tokens to ignore; or None.
            cu_seqlens, max_length: of a packed batch: cumulative lengths (S + 1,), int32 or int64, and the
                longest length.

        Raises:
            RuntimeError: mismatched shapes, dtypes or devices; an odd number of sequences if ``unit`` is
                ``"pair"``.
        """
        op = type(self).__name__
        batch = Batch(op, input, target, mask, cu_seqlens, max_length, self.ignore_index)
        if self.unit == "pair" and batch.shape[0] % 2:
            raise RuntimeError(
                f"{batch.op}: the batch has {batch.shape[0]} sequences, expected an even number: the chosen ones, then "
                "as many rejected ones"
            )
        return batch

    def check_reference(
        self,
        batch: Batch,
        weight: Tensor,
        ref_input: Tensor | None,
        ref_weight: Tensor | None,
        ref_bias: Tensor | None = None,
    ) -> None:
        """Checks the tensors of a reference model, whether or not the loss uses them. Each may be None.

        The head of the reference may require grad, since it may be the head of the policy.

        Raises:
            RuntimeError: the shapes of ``ref_input`` and the batch differ, or the vocabularies of the two
                models; ``ref_input`` requires grad where gradients are computed.
            ValueError: ``ref_bias`` without ``ref_weight``.
        """
        if torch.is_grad_enabled():
            refuse_gradients(batch.op, ref_input=ref_input)
        if ref_input is not None and (ref_input.dim() == 0 or ref_input.shape[:-1] != batch.token_shape):
            expected = f"the shape of target, {tuple(batch.token_shape)}, and a last dimension"
            raise wrong_shape(batch.op, "ref_input", ref_input, expected)
        if ref_weight is None:
            if ref_bias is not None:
                raise ValueError(f"{batch.op}: ref_bias was given without ref_weight")
            return
        if ref_weight.dim() != 2:
            raise wrong_shape(batch.op, "ref_weight", ref_weight, "(vocab, hidden)")
        if weight.dim() == 2 and ref_weight.shape[0] != weight.shape[0]:
            raise RuntimeError(
                f"{batch.op}: ref_weight has {ref_weight.shape[0]} classes, expected {weight.shape[0]}, as "
                "weight has: both models must have the same vocabulary"
            )

    def reference(
        self,
        batch: Batch,
        weight: Tensor,
        ref_input: Tensor,
        ref_weight: Tensor | None,
        ref_bias: Tensor | None = None,
    ) -> Tensor:
        """Log-probabilities of the targets under a reference model, in the shape of the targets, without
        gradients.

        The cost is one GEMM of the reference's lm_head.
        """
        if ref_weight is None:
            raise ValueError(f"{batch.op}: ref_input was given without ref_weight")
        self.check_reference(batch, weight, ref_input, ref_weight)
        return self.scored(batch, _REFERENCE, ref_input, ref_weight, ref_bias)

    @torch.no_grad()
    def scored(
        self, batch: Batch, names: LayerNames, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Log-probabilities of the targets in their shape, without gradients. ``names``: argument
        names for error messages."""
        layer = input.flatten(0, -2), weight, batch.target, bias
        logprobs, *_ = logprobs_of_layer(batch.op, names, layer, self._head_options())
        return logprobs.view(batch.token_shape)

    def _head_options(self) -> HeadOptions:
        logits = self.temperature, self.ignore_index, self.softcap
        return HeadOptions(*logits, self.accum_dtype, self.memory_budget, self.logits_dtype)

    def reference_scores(
        self,
        batch: Batch,
        weight: Tensor,
        ref_input: Tensor | None,
        ref_weight: Tensor | None,
        ref_bias: Tensor | None,
        ref_logps: Tensor | None,
        use_ref_model: bool,
        average_log_prob: bool,
    ) -> Tensor:
        """(S,) log-probabilities of the sequences under the reference model, from its tensors or from
        ``ref_logps``.

        Zeros if ``use_ref_model`` is False.

        Raises:
            ValueError: no reference although ``use_ref_model`` is True, or a reference although it is False.
            RuntimeError: mismatched shapes or vocabularies.
        """
        if not use_ref_model:
            if any(t is not None for t in (ref_input, ref_weight, ref_bias, ref_logps)):
                names = "ref_input, ref_weight, ref_bias or ref_logps"
                raise ValueError(f"{batch.op}: a reference ({names}) was given, but use_ref_model is False")
            return batch.valid.new_zeros(batch.shape[0], dtype=batch.accumulate_dtype)
        if ref_logps is None:
            if ref_input is None:
                raise ValueError(
                    f"{batch.op}: no reference: pass ref_input and ref_weight, or ref_logps, or use_ref_model=False"
                )
            ref_logps = self.reference(batch, weight, ref_input, ref_weight, ref_bias)
        else:
            self.check_reference(batch, weight, ref_input, ref_weight, ref_bias)
            batch.check("ref_logps", ref_logps, batch.token_shape, batch.shape[:1])
        lengths = batch.lengths()
        if ref_logps.shape == batch.token_shape:
            return sequence_scores(batch.padded_valid(ref_logps), lengths, average_log_prob)
        # The sum of a sequence without valid tokens is ignored, even if it is NaN.
        ref_logps = torch.where(lengths > 0, batch.upcast(ref_logps), 0.0)
        return ref_logps / lengths.clamp_min(1) if average_log_prob else ref_logps

    def run(
        self,
        batch: Batch,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        given: Mapping[str, Tensor | None] | None = None,
        shared: Mapping[str, Tensor | None] | None = None,
        divisor: Callable[[], Tensor] | None = None,
    ) -> LossResult:
        """The loss of a batch.

        Args:
            batch: from :meth:`batch`.
            weight, bias: of the projection, (V, H), and (V,) or None.
            given: tensors by name, sliced as the logits: (N,) for ``"token"``, else (S, ...).
            shared: tensors by name that every call of ``compute`` gets whole. Entries that are None are
                omitted.
            divisor: returns what ``compute`` divides every term by, or the smallest of several, a float32
                scalar; only called for float16. The forward then stores gradients of the loss times a factor
                of up to 64, since they would lose bits before a loss scale is applied, and the backward
                divides by it. None: no factor.

        Returns:
            A :class:`LossResult`: (loss, log-probabilities (S, L), entropies (S, L) or None, requested
            metrics of the tokens). Only the loss has a gradient.

        Raises:
            RuntimeError: mismatched shapes, dtypes or devices.
        """
        sliced, whole = (
            {name: t for name, t in (tensors or {}).items() if t is not None} for tensors in (given, shared)
        )
        check_budget_variable(self.memory_budget)
        function = self._function
        if recording_tracer() is not None:
            function = portable_name(function)
        sequences = batch.shape[0]
        if self.unit == "token":
            parts, groups = 1, batch.target.shape[0]
            sliced = {name: t.unsqueeze(0) for name, t in sliced.items()}
        elif batch.token_index is not None:
            # The host does not know cu_seqlens, so it cannot slice by sequence: the batch is one group.
            parts, groups = 1, 1
            whole |= {name: _split_pairs(self.unit, t) for name, t in sliced.items()}
            whole |= {"token_index": batch.token_index, "is_token": batch.valid}
            sliced = {}
        elif self.unit == "pair":
            parts, groups = 2, sequences // 2
            sliced = {name: _split_pairs("pair", t) for name, t in sliced.items()}
        else:
            parts, groups = (1, sequences) if self.unit == "sequence" else (sequences, 1)
            sliced = {name: t.unsqueeze(0 if parts == 1 else 1) for name, t in sliced.items()}
        input, float32_logits = batch.input, self.logits_dtype is not None
        parameter = summed_weight(batch.op, NAMES_OF_HEAD.weight, weight, self.accumulate_grad_weight)
        if parameter is not None:
            weight = weight.detach()
        check_logits_dtype(batch.op, NAMES_OF_HEAD.input, input, self.logits_dtype)
        if not float32_logits:
            input, weight, bias = autocast_operands(input, weight, bias)
        check_accum_dtype(batch.op, NAMES_OF_HEAD.input, input, self.accum_dtype)
        check_layer(batch.op, NAMES_OF_HEAD, input, weight, bias, batch.target, float32_weight=float32_logits)
        needs_grad = wants_grad(input, weight, bias)
        factor = None
        differentiable = any(needs_grad) or parameter is not None
        if divisor is not None and differentiable and input.dtype == torch.float16 and not is_dtensor(input):
            factor = whole[FACTOR] = float16_factor(divisor(), input.shape[0])
        # One flag requests entropies and argmax; with uses_entropy there are entropies in any case.
        with_metrics = "argmax" in self.metrics or ("entropy" in self.metrics and not self.uses_entropy)
        # AOTInductor passes no empty list; a tensor without a name is not used.
        tensors = [*sliced.values(), *whole.values()] or [batch.target]
        names = f"{','.join(sliced)}|{','.join(whole)}"
        options = self._head_options()
        # Not of_logits: torch.compile of torch 2.10 traces no property of a named tuple.
        head = options.temperature, options.ignore_index, options.softcap, options.accum_dtype
        flags = self.uses_entropy, with_metrics, *needs_grad, options.logits_dtype, parameter is not None
        results = fused_linear_loss_forward(
            *(input, weight, batch.target, bias, tensors, function, names, parts, groups),
            *(*head, options.memory_budget, *flags),
        )
        # Gradients that have names here would be results of the graph at a graph break, and differentiated.
        loss, logprobs, entropy, argmax, *row_grads = results[:6]
        if parameter is not None:
            of_logprobs, of_entropy = row_grads
            row_grads = of_logprobs, of_entropy if self.uses_entropy else None
            (loss,) = logprobs_adding_grad_weight(
                batch.op, NAMES_OF_HEAD, parameter, (loss,), input, batch.target, bias, options, row_grads
            )
        if factor is not None:
            loss = loss / factor
        if batch.packing_factor is not None:
            loss = loss * batch.packing_factor
        found = {"logprobs": logprobs, "entropy": entropy, "argmax": argmax}
        tokens = TokenMetrics(**{name: found[name].view(batch.token_shape) for name in self.metrics})
        logprobs = batch.padded_valid(logprobs.view(batch.token_shape))
        entropy = batch.padded_valid(entropy.view(batch.token_shape)) if self.uses_entropy else None
        return LossResult(loss, logprobs, entropy, tokens)


# Argument names of a model and of its reference, for error messages; both have the same targets.
NAMES_OF_HEAD = LayerNames()
_REFERENCE = LayerNames("ref_input", "ref_weight", "target", "ref_bias")


def _split_pairs(unit, per_sequence):
    """(2, S / 2, ...) from (S, ...) if ``unit`` is ``"pair"``: chosen sequences, then rejected ones; else
    unchanged."""
    return per_sequence.unflatten(0, (2, per_sequence.shape[0] // 2)) if unit == "pair" else per_sequence


def check_choice(owner: object, name: str, value: _T, known: tuple[_T, ...]) -> _T:
    """Returns the value of an option; raises ValueError unless it is one of ``known``."""
    if value not in known:
        raise ValueError(
            f"{type(owner).__name__}: unknown {name} '{value}', expected one of {', '.join(map(str, known))}"
        )
    return value
