"""The base of every loss: what a new one has to say, and how it reaches the op."""

import itertools
from typing import NamedTuple

import torch
from torch import nn

from .._core.arguments import FUNCTION, HEAD, LayerNames, arguments, check_layer, wrong_shape
from .._core.autocast import autocast_operands
from .._core.autograd import wants_grad
from .._core.memory_budget import check_budget_variable
from ..ops.fused_linear_logprobs import logprobs_of_layer
from ._batch import Batch, at_places, sequence_scores
from ._op import fused_linear_loss_forward, register_function

_numbers = itertools.count()
UNITS = ("token", "sequence", "pair", "batch")


class TokenStatistics(NamedTuple):
    """Of the tokens of a batch, each shaped as its targets, without gradients; 0, 0 and -1 where nothing counts."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    argmax: torch.Tensor


class FusedLinearLoss(nn.Module):
    """A loss that sees ``hidden @ weight.T + bias`` through the log-probabilities of the targets (and the entropies).

    A subclass defines ``compute``, in plain PyTorch, and calls :meth:`run`. The gradient of ``compute`` is taken inside
    the forward; logits never exist for more than the memory budget, and ``torch.compile`` sees one op.

    Class attributes:
        unit: what a term of the loss depends on, ``"token"``, ``"sequence"``, ``"pair"`` or ``"batch"``. Logits of as
            many units as fit the budget are kept from the forward product to the two of the backward; where one unit
            does not fit, its logits are computed twice.
        uses_entropy: whether ``compute`` wants the entropies.
        names: what ``forward`` calls the tensors of the projection, for errors.

    Args:
        ignore_index: the target of tokens that do not count.
        temperature: logits are divided by it.
        softcap: logits become ``softcap * tanh(logits / softcap)`` first.
        accum_dtype: in which dtype the gradient of the weight is summed over chunks; None means float32.
        memory_budget: bytes of logits at a time; None for ``LIGER_MEMORY_BUDGET``, else 512 MiB.
        observe: None, or a function that every call hands the :class:`TokenStatistics` of its batch, for metrics.

    Raises:
        TypeError: an option of another type.
        ValueError: an option out of range.
    """

    unit = "token"
    uses_entropy = False
    names = LayerNames("hidden")

    @arguments(error=ValueError, observe=FUNCTION, **HEAD)
    def __init__(
        self, *, ignore_index=-100, temperature=1.0, softcap=None, accum_dtype=None, memory_budget=None, observe=None
    ):  # fmt: skip
        super().__init__()
        if self.unit not in UNITS:
            raise ValueError(
                f"{type(self).__name__}: unit is '{self.unit}', expected one of {', '.join(UNITS)}"
            )
        self.ignore_index, self.temperature, self.softcap = ignore_index, float(temperature), softcap
        self.accum_dtype, self.memory_budget, self.observe = accum_dtype, memory_budget, observe
        self._register()

    def _register(self):
        self._function = f"{type(self).__qualname__}.{next(_numbers)}"
        register_function(self._function, self)

    def __setstate__(self, state):
        # A copy is a function of its own.
        super().__setstate__(state)
        self._register()

    def compute(self, logprobs, entropy, **tensors):
        """The terms of the loss; the loss is their sum.

        Args:
            logprobs: (tokens,), (sequences, L), (2, pairs, L) with the chosen first, or for ``"batch"`` (S, L): of some
                units of the batch. Float32; 0 where the target is ignored.
            entropy: the same, or None.
            tensors: those of ``given``, cut as ``logprobs`` are, and those of ``shared``, by name.

        Any batch-wide divisor has to come in ``shared``.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no compute")

    def evaluate(self, logprobs, entropy, given, shared):
        """:meth:`compute` of what the op has: rows as (parts, groups, length)."""
        shared = dict(shared)
        places = shared.pop("places", None)

        def shaped(tensor):
            if tensor is None or self.unit == "pair":
                return tensor
            return tensor.squeeze(1) if self.unit == "batch" else tensor.squeeze(0)

        def rows(tensor):
            if tensor is None:
                return None
            if places is not None:
                return _by_unit(self.unit, at_places(tensor, places))
            return tensor.reshape(-1) if self.unit == "token" else shaped(tensor)

        given = {name: shaped(tensor) for name, tensor in given.items()}
        return self.compute(rows(logprobs), rows(entropy), **given, **shared)

    def batch(self, hidden, target, **how):
        """The :class:`Batch` of a call; raises RuntimeError where shapes do not fit."""
        batch = Batch(
            type(self).__name__, hidden, target, ignore_index=self.ignore_index, names=self.names, **how
        )
        if self.unit == "pair" and batch.shape[0] % 2:
            raise RuntimeError(
                f"{batch.op}: the batch has {batch.shape[0]} sequences, expected an even number: the chosen ones, then "
                "as many rejected ones"
            )
        return batch

    def check_reference(self, batch, weight, ref_input, ref_weight, ref_bias=None):
        """Raises RuntimeError for a reference model, in use or not, that is none of this batch; either may be None."""
        if ref_input is not None and (ref_input.dim() == 0 or ref_input.shape[:-1] != batch.token_shape):
            expected = f"that of {self.names.target}, {tuple(batch.token_shape)}, and a last dimension"
            raise wrong_shape(batch.op, "ref_input", ref_input, expected)
        if ref_weight is None:
            if ref_bias is not None:
                raise ValueError(f"{batch.op}: ref_bias was given without ref_weight")
            return
        if ref_weight.dim() != 2:
            raise wrong_shape(batch.op, "ref_weight", ref_weight, "(vocab, hidden)")
        if weight.dim() == 2 and ref_weight.shape[0] != weight.shape[0]:
            raise RuntimeError(
                f"{batch.op}: ref_weight has {ref_weight.shape[0]} classes, expected {weight.shape[0]}, those of "
                f"{self.names.weight}: both models must have the same vocabulary"
            )

    def reference(self, batch, weight, ref_input, ref_weight, ref_bias=None):
        """(..., as the targets) log-probabilities of a reference model, without gradients: one product."""
        if ref_weight is None:
            raise ValueError(f"{batch.op}: ref_input was given without ref_weight")
        self.check_reference(batch, weight, ref_input, ref_weight)
        with torch.no_grad():
            logprobs, _, _ = logprobs_of_layer(
                batch.op, _REFERENCE, ref_input.flatten(0, -2), ref_weight, batch.target, ref_bias, self.temperature,
                self.ignore_index, self.softcap, self.memory_budget,
            )  # fmt: skip
        return logprobs.view(batch.token_shape)

    def reference_scores(
        self, batch, weight, ref_input, ref_weight, ref_bias, ref_logps, use_ref_model, average_log_prob
    ):  # fmt: skip
        """(S,) what a reference, model or log-probabilities, gives the sequences; zeros where none is wanted."""
        if not use_ref_model:
            if any(t is not None for t in (ref_input, ref_weight, ref_bias, ref_logps)):
                names = "ref_input, ref_weight, ref_bias or ref_logps"
                raise ValueError(f"{batch.op}: a reference ({names}) was given, but use_ref_model is False")
            return batch.live.new_zeros(batch.shape[0], dtype=batch.wide)
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
            return sequence_scores(batch.sequences(ref_logps), lengths, average_log_prob)
        # Those of a sequence without a token that counts are ignored, too.
        ref_logps = torch.where(lengths > 0, batch.floats(ref_logps), 0.0)
        return ref_logps / lengths.clamp_min(1) if average_log_prob else ref_logps

    def run(self, batch, weight, bias=None, *, given=None, shared=None):
        """The loss of a batch.

        Args:
            batch: from :meth:`batch`.
            weight, bias: of the projection, (V, H) and (V,).
            given: tensors by name, cut with the logits: (N,) for ``"token"``, else (S, ...).
            shared: tensors by name that ``compute`` sees whole. None among either is left out.

        Returns:
            (the loss, log-probabilities (S, L), entropies (S, L) or None); the last two without gradient.
        """
        given, shared = (
            {name: t for name, t in (tensors or {}).items() if t is not None} for tensors in (given, shared)
        )
        check_budget_variable(self.memory_budget)
        sequences = batch.shape[0]
        if self.unit == "token":
            parts, groups = 1, batch.target.shape[0]
            given = {name: t.unsqueeze(0) for name, t in given.items()}
        elif batch.packed:
            # Where sequences end is known to the device alone: the batch is one group.
            parts, groups = 1, 1
            shared |= {name: _by_unit(self.unit, t) for name, t in given.items()} | {"places": batch.places}
            given = {}
        elif self.unit == "pair":
            parts, groups = 2, sequences // 2
            given = {name: _by_unit("pair", t) for name, t in given.items()}
        else:
            parts, groups = (1, sequences) if self.unit == "sequence" else (sequences, 1)
            given = {name: t.unsqueeze(0 if parts == 1 else 1) for name, t in given.items()}
        hidden, weight, bias = autocast_operands(batch.hidden, weight, bias)
        check_layer(batch.op, self.names, hidden, weight, bias, batch.target)
        with_metrics = self.observe is not None
        loss, logprobs, entropy, argmax, *_ = fused_linear_loss_forward(
            hidden, weight, batch.target, bias, list(given.values()), list(shared.values()), self._function,
            [*given, *shared], parts, groups, self.temperature, self.ignore_index, self.softcap, self.accum_dtype,
            self.memory_budget, self.uses_entropy, with_metrics, *wants_grad(hidden, weight, bias),
        )  # fmt: skip
        if batch.fits is not None:
            loss = loss * batch.fits
        if with_metrics:
            self.observe(TokenStatistics(*(t.view(batch.token_shape) for t in (logprobs, entropy, argmax))))
        logprobs = batch.sequences(logprobs.view(batch.token_shape))
        entropy = batch.sequences(entropy.view(batch.token_shape)) if self.uses_entropy else None
        return loss, logprobs, entropy


# What the tensors of a reference model are called; its targets are those of the policy.
_REFERENCE = LayerNames("ref_input", "ref_weight", "target", "ref_bias")


def _by_unit(unit, per_sequence):
    """(S, ...) as ``compute`` sees it: pairs have the chosen sequences first, then the rejected ones."""
    return per_sequence.unflatten(0, (2, per_sequence.shape[0] // 2)) if unit == "pair" else per_sequence


def choice(owner, name, value, known):
    """The value; raises ValueError where it is none of the known ones."""
    if value not in known:
        raise ValueError(
            f"{type(owner).__name__}: unknown {name} '{value}', expected one of {', '.join(known)}"
        )
    return value
