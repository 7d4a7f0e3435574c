"""Fixtures of the tests of the engine for compute capability 9.0."""

import pytest
from logprobs_sm90 import engine_calls


@pytest.fixture
def calls(monkeypatch):
    """The calls of the engine's log-probability ops in this test: (forward or backward, exponentials are kept)."""
    return engine_calls(monkeypatch)
