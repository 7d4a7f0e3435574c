# SPDX-License-Identifier: BSD-3-Clause
"""Losses of DTensors that are sharded along the classes, by the vocabulary-parallel ops.

The public functions of whole vocabularies come here. Each function returns None for a call that the
vocabulary-parallel ops do not take: the rules of the ops then redistribute, and warn of a weight that they
gather.
"""

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ..._core.dtensor.placements import where_sharded, wrapped
from ..._core.dtensor.rows import align, follow
from ..._core.head.cross_entropy import read_targets
from ..._core.head.results import CrossEntropyOutput
from ..._core.math.dtypes import accumulate_dtype
from . import functions
from .agreement import told_to_all
from .shards import vocab_dimension, whole_tensor


def _replicated_along(dimension, placements):
    return tuple(Replicate() if i == dimension else p for i, p in enumerate(placements))


class _Rows(NamedTuple):
    """The rows of a call: DTensors that each process of a vocabulary has completely."""

    x: torch.Tensor
    target: torch.Tensor
    token_weight: torch.Tensor | None
    mesh: DeviceMesh
    placements: tuple  # of a tensor with one value per row
    tokens: tuple  # the placements that such results get

    @classmethod
    def of_layer(cls, op, x, target, token_weight, dimension, names):
        """The rows of hidden states x, which are gathered along the dimension of the mesh that shards the
        classes."""
        x, target, token_weight = align(op, x, target, token_weight, names)
        tokens = tuple(x.placements)
        rows = _replicated_along(dimension, tokens)
        x, target, token_weight = (
            t if t is None else t.redistribute(placements=rows) for t in (x, target, token_weight)
        )
        return cls(x, target, token_weight, x.device_mesh, rows, tokens)

    @classmethod
    def of_logits(cls, op, logits, target, token_weight, dimension):
        rows = _replicated_along(dimension, logits.placements)
        others = follow(op, logits, rows, target, token_weight, ("logits", "target"))
        return cls(logits, *others, logits.device_mesh, rows, rows)

    def denominator(self, options, vocab):
        """The denominator of a mean over the rows of all processes, where some have rows of their own; None:
        not needed."""
        if options.reduction != "mean" or options.denominator is not None:
            return options.denominator
        partial = where_sharded(self.placements, Partial())
        if not any(p.is_partial() for p in partial):
            return None
        wide = accumulate_dtype(self.x.dtype)
        class_weight = whole_tensor(options.ce_weight)
        weights = read_targets(self.target.to_local(), vocab, options.ignore_index, class_weight, wide).weight
        total = DTensor.from_local(weights.sum(), self.mesh, partial, run_check=False)
        return total.redistribute(placements=(Replicate(),) * self.mesh.ndim).to_local()

    def sum(self, local):
        """A sum over the rows as a DTensor."""
        placements = where_sharded(self.placements, Partial())
        return DTensor.from_local(local, self.mesh, placements, run_check=False)

    def per_row(self, local):
        """One value per row as a DTensor."""
        rows = wrapped(local, self.mesh, self.placements, self.target.shape)
        return rows.redistribute(placements=self.tokens)


def _losses(rows, reduction, found):
    """The results of a cross entropy as DTensors."""
    scalar = rows.per_row if reduction == "none" else rows.sum
    if isinstance(found, torch.Tensor):
        return scalar(found)
    z_loss = None if found.z_loss is None else scalar(found.z_loss)
    logprobs = None if found.logprobs is None else rows.per_row(found.logprobs)
    return CrossEntropyOutput(scalar(found.loss), z_loss, None, None, logprobs, None)


def _options(options, rows, vocab):
    return options._replace(token_weight=rows.token_weight, denominator=rows.denominator(options, vocab))


def _takes_layer(input, weight, bias):
    """True if the classes of weight and bias are sharded alike, over processes that have the rows of the
    input."""
    if not isinstance(weight, DTensor) or vocab_dimension(weight, 0, False) is None or input.dim() < 2:
        return False
    others = [t for t in (input, bias) if isinstance(t, DTensor)]
    return all(t.device_mesh == weight.device_mesh for t in others)


def _bias_like(weight, bias):
    if not isinstance(bias, DTensor) or bias.placements == weight.placements:
        return bias
    return bias.redistribute(placements=weight.placements)


def fused_linear_ce(op, input, weight, target, bias, options, metrics, shards=None):
    """:func:`liger.fused_linear_ce` of a weight that is sharded along its rows, the classes; None for other
    weights.

    ``shards``: group, vocab_start and vocab_size, if the caller gave one of them.
    """
    if shards is not None:
        return functions.fused_linear_ce(input, weight, target, bias, options, metrics, *shards)
    if not _takes_layer(input, weight, bias) or functions.needs_whole_rows(metrics):
        return None
    bias = _bias_like(weight, bias)
    with told_to_all(op, weight, 0, None, (input, weight, target)):
        if not isinstance(input, DTensor):
            return functions.fused_linear_ce(input, weight, target, bias, options, metrics)
        dimension = vocab_dimension(weight, 0, False)
        rows = _Rows.of_layer(op, input, target, options.token_weight, dimension, ("input", "target"))
        options = _options(options, rows, weight.shape[0])
        found = functions.fused_linear_ce(rows.x, weight, rows.target, bias, options, metrics)
    return _losses(rows, options.reduction, found)


def cross_entropy(op, logits, target, options, metrics, shards=None):
    """:func:`liger.cross_entropy` of logits that are sharded along the classes; None for other logits."""
    if shards is not None:
        return functions.cross_entropy(logits, target, options, metrics, *shards)
    if logits.dim() < 2 or functions.needs_whole_rows(metrics):
        return None
    dimension = vocab_dimension(logits, -1, True)
    if dimension is None:
        return None
    with told_to_all(op, logits, -1, None, (logits, target)):
        rows = _Rows.of_logits(op, logits, target, options.token_weight, dimension)
        options = _options(options, rows, logits.shape[-1])
        found = functions.cross_entropy(logits, rows.target, options, metrics)
    return _losses(rows, options.reduction, found)


def fused_linear_logprobs(op, names, input, weight, target, bias, options, metrics, shards=None):
    """The fields of :class:`liger.LogProbs` of a weight that is sharded along its rows; None for other
    weights."""
    if shards is not None:
        return functions.fused_linear_logprobs(names, input, weight, target, bias, options, metrics, *shards)
    if not _takes_layer(input, weight, bias):
        return None
    bias = _bias_like(weight, bias)
    with told_to_all(op, weight, 0, None, (input, weight, target)):
        rows = None
        if isinstance(input, DTensor):
            dimension = vocab_dimension(weight, 0, False)
            rows = _Rows.of_layer(op, input, target, None, dimension, (names.input, names.target))
            input, target = rows.x, rows.target
        found = functions.fused_linear_logprobs(names, input, weight, target, bias, options, metrics)
    return found if rows is None else tuple(t if t is None else rows.per_row(t) for t in found)
