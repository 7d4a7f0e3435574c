"""Fixtures of the tests of the engine for compute capability 9.0."""

import pytest
import torch
from logprobs_sm90 import engine_calls

from liger.distributed import _sm90_shards


@pytest.fixture
def calls(monkeypatch):
    """The calls of the engine's log-probability ops in this test: (forward or backward, exponentials are kept)."""
    return engine_calls(monkeypatch)


@pytest.fixture
def shards(sm90):
    assert _sm90_shards.CompiledSteps.are_built() and _sm90_shards.CompiledSteps.clusters(
        torch.empty(1, device=sm90)
    )
    return sm90
