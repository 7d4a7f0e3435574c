# SPDX-License-Identifier: BSD-3-Clause
"""A norm that waits for the rotation after it: everything else that reads it gets its result."""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from liger.transformers.attention import deferred_norm
from liger.transformers.attention.deferred_norm import DeferredNorm


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps, self.calls = nn.Parameter(torch.rand(8) + 0.5), 1e-6, 0

    def forward(self, x):
        self.calls += 1
        return nn.functional.rms_norm(x, (8,), self.weight, self.eps)


READS = {
    "torch function": lambda y: torch.cat((y, y), -1),
    "nested arguments": lambda y: torch.stack([y, y]).sum(0),
    "method": lambda y: y.float().reshape(-1, 4),
    "arithmetic": lambda y: ((1 - y) * 2 / (-(y**2) + 1) - y / 3) @ y.transpose(-1, -2),
    "from the left": lambda y: torch.ones(8) * y + (torch.ones(8, 8) @ y.transpose(-1, -2)).transpose(-1, -2),
    "index": lambda y: y[..., :4],
    "unpacked": lambda y: next(iter(y)) + len(y),
    "last dimension swapped": lambda y: y.transpose(1, 2).transpose(0, -1),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_everything_but_a_rotation_reads_the_norm(read):
    norm, x = Norm(), torch.randn(2, 3, 8)
    deferred = DeferredNorm(norm, x)
    assert deferred.shape == x.shape and deferred.dtype == x.dtype and deferred.dim() == 3
    assert deferred.device == x.device and norm.calls == 0
    assert torch.equal(read(deferred), read(norm(x)))
    swapped = DeferredNorm(norm, x).transpose(0, 1)
    assert isinstance(swapped, DeferredNorm) and swapped.shape == (3, 2, 8)
    assert torch.equal(read(swapped), read(norm(x).transpose(0, 1)))


def test_a_deferred_norm_is_computed_once():
    norm = Norm()
    deferred = DeferredNorm(norm, torch.randn(2, 3, 8))
    deferred + deferred
    deferred.sum()
    assert norm.calls == 1
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = deferred.no_such_name
    assert deferred_norm.computed(3) == 3
