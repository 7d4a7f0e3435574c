# SPDX-License-Identifier: BSD-3-Clause
"""The steps of fused_linear_logprobs on one device, which computes the shards of all ranks in turn."""

import contextlib
from itertools import pairwise
from typing import NamedTuple
from unittest.mock import patch

import torch
from cases import poison_memory
from sm90_engine import clusters

from liger.distributed.vocab import sm90 as engine
from liger.distributed.vocab import sm90_logprobs as shards


class Results(NamedTuple):
    """Of all ranks: the results of the rows from the first one, after a comparison; gradients of all
    classes."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    argmax: torch.Tensor
    grads: list


@contextlib.contextmanager
def group_of(ranks):
    """Plans are for a group of so many devices like this one."""

    def rank_classes(vocab_size, _):
        return -(-vocab_size // ranks)

    with (
        patch.object(engine, "clusters_for", lambda *_: clusters()),
        patch.object(engine, "rank_classes", rank_classes),
        patch.object(shards, "rank_classes", rank_classes),
    ):
        yield


def heads_of(shape, bounds, x, weight, target, temperature=1.0):
    vocab = weight.shape[0]
    return [
        shards.Head(
            x, weight[start:stop].clone(), target, temperature, -100, shape.budget, start, vocab, None
        )
        for start, stop in pairwise(bounds)
    ]


def plans_of(shape, ranks, entropy=False, keep=False):
    """(plan of the forward, plan of the backward) with metrics and, with ``entropy``, a gradient of
    entropies."""
    x, weight = torch.empty(shape.rows, shape.hidden), torch.empty(shape.vocab, 0)
    (head, *_) = heads_of(shape, [0, shape.vocab], x, weight, None)
    with group_of(ranks):
        return shards.forward_plan(head, keep), shards.backward_plan(head, (True, True), entropy, keep)


def _add(tensors):
    total = torch.stack(tensors).sum(0)
    for tensor in tensors:
        tensor.copy_(total)


def run_forward(heads, metrics=True, keep=False, compare=True):
    """[(results, kept, kept_rows) of each rank]. Collectives are sums and copies.

    ``compare``: asserts that all ranks have the same bits, which waits for the device.
    """
    with group_of(len(heads)):
        plan = shards.forward_plan(heads[0], keep)
    calls = [shards.Forward(head, plan, metrics, metrics, keep) for head in heads]
    for call in calls:
        call.begin()
    _add([call.target_logit for call in calls])
    for index in range(len(plan.chunks)):
        gathered = torch.stack([call.exponentials(index) for call in calls])
        for call in calls:
            call.write_results(index, gathered)
    first, *others = (call.results for call in calls)
    for other in others if compare else ():
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), "ranks differ"
    return [(call.results, call.kept, call.kept_rows) for call in calls]


def run_backward(heads, found, grads, trained=(True, True), compare=True):
    """Gradients of the trained ones among input and weight. ``found``: of :func:`run_forward`."""
    grads = (*grads, None)[:2]
    keeps = found[0][2].numel() > 0
    with group_of(len(heads)):
        plan = shards.backward_plan(heads[0], trained, grads[1] is not None, keeps)
    calls = [
        shards.Backward(head, plan, trained, results.stats, results.entropy, kept, kept_rows, grads)
        for head, (results, kept, kept_rows) in zip(heads, found, strict=True)
    ]
    for call in calls:
        call.begin()
    if not keeps:
        _add([call.target_logit for call in calls])
    sums = [call.new_sum() for call in calls]
    for index, chunk in enumerate(plan.chunks):
        parts = [memory[: chunk.rows] for memory in sums]
        for call, part in zip(calls, parts, strict=True):
            call.input_gradient(index, part)
            call.add_grad_weight(index)
        if trained[0]:
            for call in calls:
                call.rows[chunk.first : chunk.first + chunk.rows].copy_(sum(parts))
    gradients = [call.gradients() for call in calls]
    if trained[0] and compare:
        for other, _ in gradients[1:]:
            assert torch.equal(other.nan_to_num(7.0), gradients[0][0].nan_to_num(7.0))
    both = gradients[0][0], torch.cat([weight for _, weight in gradients])
    return [gradient for gradient, wanted in zip(both, trained, strict=True) if wanted]


def run_ranks(
    shape, bounds, x, weight, target, grads, trained=(True, True), temperature=1.0, metrics=True, keep=False,
    compare=True,
):  # fmt: skip
    """The :class:`Results` of the shards ``weight[bounds[i] : bounds[i + 1]]``."""
    heads = heads_of(shape, bounds, x, weight, target, temperature)
    found = run_forward(heads, metrics, keep, compare)
    if x.is_cuda and compare:
        poison_memory()
    gradients = run_backward(heads, found, grads, trained, compare)
    results = found[0][0]
    return Results(results.logprobs, results.entropy, results.argmax, gradients)
