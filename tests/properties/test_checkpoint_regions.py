# SPDX-License-Identifier: BSD-3-Clause
"""Every public callable in torch's checkpoint: whole regions, and selective policies, which save some
results."""

import functools

import pytest
import torch
from public_callables import CASES, arguments, cases, differentiable_outputs, weighted_sum
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

GEMMS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
SAVED = {
    "nothing": None,
    "GEMMs": lambda op: op in GEMMS,
    "ops of liger": lambda op: op.namespace.startswith("liger"),
}


def _contexts(saved):
    def policy(_ctx, op, *_args, **_kwargs):
        return CheckpointPolicy.MUST_SAVE if saved(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize("name", cases(differentiable=True))
def test_gradients_and_number_of_runs(device, name):
    keys = CASES[name].differentiable
    given = arguments(name, device)
    runs = 0

    def region(*tensors):
        nonlocal runs
        runs += 1
        # Not the leaves themselves: in-place forms refuse them.
        return weighted_sum(differentiable_outputs(name, given | dict(zip(keys, tensors, strict=True))))

    leaves = [given[key] for key in keys]
    expected = torch.autograd.grad(region(*(t * 1 for t in leaves)), leaves)
    for saved in SAVED:
        print(saved)
        options = {"context_fn": functools.partial(_contexts, SAVED[saved])} if SAVED[saved] else {}
        runs = 0
        total = checkpoint(region, *(t * 1 for t in leaves), use_reentrant=False, **options)
        assert runs == 1, "a graph inside of the op was taken for one of the region"
        actual = torch.autograd.grad(total, leaves)
        assert runs == 2
        for key, a, b in zip(keys, actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")
