# SPDX-License-Identifier: BSD-3-Clause
"""liger_kernel is importable in the tests of this folder only: other tests compare with an installed one."""

import os

import pytest

_OVERRIDE = "LIGER_COMPAT_OVERRIDE"

# Test files import parts of liger.compat, which installs itself.
_before = os.environ.get(_OVERRIDE)
os.environ[_OVERRIDE] = "1"
import liger.compat  # noqa: E402

liger.compat.uninstall()
if _before is None:
    del os.environ[_OVERRIDE]
else:
    os.environ[_OVERRIDE] = _before


@pytest.fixture(autouse=True)
def liger_kernel(monkeypatch):
    monkeypatch.setenv(_OVERRIDE, "1")
    try:
        liger.compat.install()
    except ImportError as error:
        pytest.skip(str(error))
    yield
    liger.compat.uninstall()
