# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures of the tests of the engine for compute capability 9.0."""

import pytest
import torch
from logprobs_sm90 import engine_calls

from liger.distributed.vocab.sm90 import CompiledSteps


@pytest.fixture
def calls(monkeypatch):
    """The calls of the engine's log-probability ops in this test: (forward or backward, exponentials are
    kept)."""
    return engine_calls(monkeypatch)


@pytest.fixture
def shards(sm90):
    assert CompiledSteps.are_built() and CompiledSteps.clusters(torch.empty(1, device=sm90))
    return sm90
