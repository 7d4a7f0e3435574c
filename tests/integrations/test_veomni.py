# SPDX-License-Identifier: BSD-3-Clause
"""The kernels that VeOmni finds by the name ``liger_ops``, as its models call them."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

FRAMEWORK = "veomni"


def stand_in():
    """veomni 0.1.12."""

    @dataclass(frozen=True)
    class HardwareRequirement:
        device_type: str
        min_compute_capability: int | None = None
        max_compute_capability: int | None = None

    @dataclass(frozen=True)
    class KernelSpec:
        name: str
        op_name: str
        variant: str
        factory: object
        hardware: HardwareRequirement
        description: str = ""

    class KernelRegistry:
        def __init__(self):
            self.specs = {}

        def register(self, spec, force=False):
            key = spec.op_name, spec.variant, spec.name
            if key in self.specs and not force:
                raise ValueError(key)
            self.specs[key] = spec

        def resolve(self, op_name, variant, impl_name):
            spec = self.specs[op_name, variant, impl_name]
            assert spec.hardware.device_type == "any"
            return spec.factory()

    return {
        "veomni.ops.kernel_registry": {
            "KERNEL_REGISTRY": KernelRegistry(),
            "HardwareRequirement": HardwareRequirement,
            "KernelSpec": KernelSpec,
        }
    }


@pytest.fixture
def kernel(integration):
    registry = integration.KERNEL_REGISTRY
    return lambda op, variant="standard": registry.resolve(op, variant, "liger_ops")


def normalised(x, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def test_norms(kernel):
    x, weight = torch.randn(2, 5, 16), torch.randn(16)
    expected = normalised(x, 1e-3)
    torch.testing.assert_close(kernel("rms_norm")(x, weight, 1e-3), expected * weight)
    torch.testing.assert_close(kernel("rms_norm", "unweighted")(x, None, 1e-3), expected)
    torch.testing.assert_close(kernel("rms_norm", "qwen3_5")(x, weight, 1e-3), expected * (1 + weight))


def test_the_gated_norm_is_a_module(kernel):
    build = kernel("rms_norm_gated")
    norm = build(16, eps=1e-3, activation="silu", device="cpu", dtype=torch.float32)
    nn.init.normal_(norm.weight)
    x, gate = torch.randn(10, 16), torch.randn(10, 16)
    torch.testing.assert_close(norm(x, gate), normalised(x, 1e-3) * norm.weight * F.silu(gate))
    assert list(norm.state_dict()) == ["weight"]


def test_rotations(kernel):
    q, k, angles = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 5, 4).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    found = kernel("rotary_pos_emb", "full")(q, k, cos, sin, unsqueeze_dim=1)
    for x, y in zip((q, k), found, strict=True):
        torch.testing.assert_close(y, rotated(x, cos.unsqueeze(1), sin.unsqueeze(1)))
    q, k, angles = torch.randn(10, 4, 8), torch.randn(10, 4, 8), torch.randn(10, 4).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    for x, y in zip((q, k), kernel("rotary_pos_emb_vision", "full")(q, k, cos, sin), strict=True):
        torch.testing.assert_close(y, rotated(x, cos.unsqueeze(1), sin.unsqueeze(1)))


def test_the_mlp(kernel):
    mlp = nn.Module()
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
    x = torch.randn(2, 5, 8, requires_grad=True)
    expected = mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    grads = torch.autograd.grad(expected.sum(), (x, *mlp.parameters()))
    found = kernel("swiglu_mlp")(mlp, x)
    torch.testing.assert_close(found, expected)
    for a, b in zip(torch.autograd.grad(found.sum(), (x, *mlp.parameters())), grads, strict=True):
        torch.testing.assert_close(a, b)
