# SPDX-License-Identifier: BSD-3-Clause
"""For all tests of this folder."""

import sys

import pytest


@pytest.fixture(autouse=True)
def warnings_of_heads_again():
    """Why a head needs logits is logged once per process and reason; a test expects it whatever ran
    before."""
    calls = sys.modules.get("liger.transformers.head.loss_call")
    if calls is not None:
        calls.warn_about_head.cache_clear()
