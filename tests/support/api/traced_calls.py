# SPDX-License-Identifier: BSD-3-Clause
"""Results of a traced call and of the eager one; as a program, also of programs that another process has
saved."""

import sys

import pytest
import torch
from torch.utils._pytree import tree_leaves


def skip_if_graph_breaks_lose_fields():
    if torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 loses the fields of a named tuple at a graph break, and raises an error")


def copies(inputs):
    return tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in inputs)


def parameters_of(module):
    """By name, without the prefixes of wrappers."""
    return {name.replace("module.", ""): parameter for name, parameter in module.named_parameters()}


def results(call, parameters, inputs):
    """(tensors, gradients by the name of a parameter or the number of an input) of a call."""
    leaves = copies(inputs)
    outputs = [t for t in tree_leaves(call(*leaves)) if isinstance(t, torch.Tensor)]
    # A gradient that differs from element to element.
    weights = [
        torch.linspace(1, 2, t.numel(), dtype=t.dtype).view(t.shape) for t in outputs if t.requires_grad
    ]
    torch.autograd.backward([t for t in outputs if t.requires_grad], weights)
    wanted = {**parameters, **{i: t for i, t in enumerate(leaves) if t.requires_grad}}
    return [t.detach() for t in outputs], {name: t.grad for name, t in wanted.items()}


def assert_same(actual, expected):
    outputs, grads = actual
    for a, b in zip(outputs, expected[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert grads.keys() == expected[1].keys()
    for name, grad in expected[1].items():
        if grad is None:
            assert grads[name] is None, name
        else:
            assert grads[name] is not None, f"no gradient of {name}"
            torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-5)


def check_saved(path):
    """Runs the program PATH.pt2 on the inputs in PATH.pt, which also has the expected results."""
    inputs, expected = torch.load(f"{path}.pt")
    program = torch.export.load(f"{path}.pt2").module()
    assert_same(results(program, parameters_of(program), inputs), expected)


if __name__ == "__main__":
    import liger.losses

    # Losses of this process with the names that counters gave to others in the process that saved the
    # programs.
    others = [
        loss(beta=7.0)
        for loss in (
            liger.losses.FusedLinearORPOLoss, liger.losses.FusedLinearDPOLoss, liger.losses.FusedLinearKTOLoss,
            liger.losses.FusedLinearGRPOLoss,
        )
        for _ in range(200)
    ]  # fmt: skip
    for path in sys.argv[1:]:
        check_saved(path)
    print(len(sys.argv[1:]), "programs")
