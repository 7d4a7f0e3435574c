# SPDX-License-Identifier: BSD-3-Clause
"""Every op that writes over its arguments refuses memory in which two elements have one place."""

import pytest
import torch
from samples import SAMPLES

WRITING = sorted(op for op in SAMPLES if op.endswith("_"))


def arguments_of(op):
    return getattr(torch.ops.liger, op).default._schema.arguments


def is_written(argument):
    return argument.alias_info is not None and argument.alias_info.is_write


def written():
    return [(op, a.name) for op in WRITING for a in arguments_of(op) if is_written(a)]


def shared():
    """(op, the name of a written tensor, the name of another one which has the same shape and dtype)."""
    found = []
    for op in WRITING:
        sample = SAMPLES[op](torch.device("cpu"))[0]
        tensors = {
            a.name: t for a, t in zip(arguments_of(op), sample, strict=False) if isinstance(t, torch.Tensor)
        }
        names = [a.name for a in arguments_of(op) if is_written(a)]
        found += [
            (op, name, other)
            for i, name in enumerate(names)
            for other in [*names[i + 1 :], *(n for n in tensors if n not in names)]
            if tensors[name].shape == tensors[other].shape and tensors[name].dtype == tensors[other].dtype
        ]
    return found


def call(op, device, **replaced):
    given = list(SAMPLES[op](device)[0])
    for i, argument in enumerate(arguments_of(op)[: len(given)]):
        if argument.name in replaced:
            given[i] = replaced[argument.name](given)
    with torch.no_grad():
        getattr(torch.ops.liger, op)(*given)


def position(op, name):
    return next(i for i, argument in enumerate(arguments_of(op)) if argument.name == name)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("op", "name"), written())
def test_rows_in_one_place_are_refused(op, name, mode, device):
    def expanded(given):
        tensor = given[position(op, name)]
        return tensor.narrow(-2, 0, 1).expand_as(tensor)

    def one_apart(given):
        tensor = given[position(op, name)]
        memory = tensor.new_zeros(tensor.numel() + sum(tensor.shape))
        return memory.as_strided(tensor.shape, [1] * tensor.dim())

    for replace in (expanded, one_apart):
        with (
            pytest.raises(RuntimeError, match=rf"\w+: {name} of shape .* has strides .*since it is written"),
            mode(),
        ):
            call(op, device, **{name: replace})


@pytest.mark.parametrize(("op", "name", "other"), shared())
def test_memory_of_another_argument_is_refused(op, name, other, device):
    def one_behind(given):
        tensor = given[position(op, name)]
        memory = tensor.new_zeros(tensor.numel() + 1)
        given[position(op, name)] = memory[:-1].view(tensor.shape)
        return memory[1:].view(tensor.shape)

    for replace in (lambda given: given[position(op, name)], one_behind):
        with pytest.raises(RuntimeError, match=rf"\w+: {other} shares memory with {name}, .*is written"):
            call(op, device, **{other: replace})


def test_tensors_that_interleave_are_written(device):
    """Parts of one larger tensor, as a merged projection has them: each element has a place of its own."""
    merged = torch.randn(2, 3, 7, 8, device=device)  # tokens x (4 heads of q, 2 of k, 1 of v) x head_dim
    q, k = (merged[:, :, part].transpose(1, 2) for part in (slice(0, 4), slice(4, 6)))
    cos, sin = torch.rand(2, 3, 8, device=device)
    expected = torch.ops.liger.rope(q, k, cos, sin)
    v = merged[:, :, 6].clone()
    torch.ops.liger.rope_(q, k, cos, sin)
    torch.ops.liger.rope_(k[:, :0], q[:, :0], cos, sin)
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1]) and torch.equal(merged[:, :, 6], v)
    merged = torch.randn(5, 16, device=device)
    for gate, up in (
        (merged[:, 8:], merged[:, :8]),
        (merged[:, ::2], merged[:, 1::2]),
        merged.view(5, 2, 8).unbind(1),
    ):
        grad = torch.randn(5, 8, device=device)
        expected = torch.ops.liger.swiglu_backward(grad, gate, up)
        torch.ops.liger.swiglu_backward_(grad, gate, up)
        torch.testing.assert_close((gate, up), expected[:2], rtol=1e-6, atol=1e-6)
