# SPDX-License-Identifier: BSD-3-Clause
"""A LIGER_MEMORY_BUDGET that cannot be read is a ValueError of every public callable that plans by it."""

import pytest
from public_callables import CASES, arguments

PLANNED = [
    name
    for name, case in CASES.items()
    if case.public.startswith(("fused_linear", "losses.", "tiled_mlp", "nn.LMHead", "nn.Fused", "nn.Tiled"))
]


@pytest.mark.parametrize("name", PLANNED)
def test_variable_that_cannot_be_read(name, device, monkeypatch):
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "lots")
    given = arguments(name, device)
    if "memory_budget" in given or "chunks" in name:
        CASES[name].call(**given)  # a budget of one's own comes before the variable
        return
    with pytest.raises(ValueError, match=r"^LIGER_MEMORY_BUDGET: expected a positive number of bytes"):
        CASES[name].call(**given)
