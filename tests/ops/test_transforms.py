# SPDX-License-Identifier: BSD-3-Clause
"""Every public op under vmap. tests/properties has the transforms of torch.func and second derivatives."""

import pytest
import torch
from public_ops import CASES, as_tuple, assert_same, differentiable, inputs_of, results

import liger


@pytest.fixture(params=CASES)
def name(request):
    return request.param


def test_vmap_over_every_tensor_with_tokens(device, name):
    case = CASES[name]
    samples = [inputs_of(name, device) for _ in range(3)]
    in_dims = tuple(None if dim is None else 0 for dim in case.token_dims)
    inputs = [
        torch.stack(ts).detach() if dim == 0 else ts[0].detach()
        for ts, dim in zip(zip(*samples, strict=True), in_dims, strict=True)
    ]
    for i, tensor in enumerate(inputs):
        tensor.requires_grad_(differentiable(name, i, tensor))

    def loop(*inputs):
        outputs = [
            as_tuple(
                case.function(*(t if dim is None else t[i] for t, dim in zip(inputs, in_dims, strict=True)))
            )
            for i in range(3)
        ]
        return tuple(torch.stack(o) for o in zip(*outputs, strict=True))

    assert_same(results(torch.vmap(case.function, in_dims=in_dims), inputs), results(loop, inputs))


def test_vmap_with_the_batch_elsewhere(device):
    q, k, cos, sin = inputs_of("rope", device)
    tables = torch.stack([cos, sin, cos], -1)
    mapped = torch.vmap(liger.rope, in_dims=(None, None, -1, None), out_dims=-1)(q, k, tables, sin)
    for i in range(3):
        assert_same([t[..., i] for t in mapped], liger.rope(q, k, tables[..., i], sin))
    per_sequence = torch.rand(3, 2, *cos.shape, device=device)
    mapped = torch.vmap(liger.rope, in_dims=(None, None, 0, 0))(q, k, per_sequence, per_sequence)
    for i in range(3):
        assert_same([t[i] for t in mapped], liger.rope(q, k, per_sequence[i], per_sequence[i]))
    gate, up = inputs_of("swiglu", device)
    mapped = torch.vmap(liger.swiglu, in_dims=(1, None), out_dims=1)(gate, up[:, 0])
    assert_same([mapped], [liger.swiglu(gate, up[:, :1].expand_as(up))])


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm"])
def test_vmap_over_a_norm_weight(device, name):
    *inputs, weight = inputs_of(name, device)
    weights = torch.stack([weight, 2 * weight, -weight], -1)
    mapped = torch.vmap(CASES[name].function, in_dims=(*(None for _ in inputs), -1))(*inputs, weights)
    for i in range(3):
        expected = as_tuple(CASES[name].function(*inputs, weights[:, i]))
        assert_same([t[i] for t in as_tuple(mapped)], expected)
