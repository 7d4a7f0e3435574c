# SPDX-License-Identifier: BSD-3-Clause
"""A process has the ops of torch.ops.liger once: a second copy of their library is refused with the paths of
both."""

import shutil

import pytest
from forked_python import python

from liger._core.runtime import load

LIBRARY = load._library("liger_ops")


@pytest.fixture
def copy(tmp_path):
    return shutil.copy(LIBRARY, tmp_path / LIBRARY.name)


def run(code):
    done = python("-c", code)
    return done.returncode, done.stderr


def test_a_package_beside_a_loaded_copy_does_not_import(copy):
    status, errors = run(f"import torch; torch.ops.load_library({str(copy)!r}); import liger")
    assert status == 1
    assert errors.splitlines()[-1].startswith(
        f"ImportError: liger: this process has the ops of torch.ops.liger from {copy} already, and cannot load the "
        f"ops of {LIBRARY} as well"
    )


def test_a_copy_beside_the_package_ends_with_a_message(copy):
    status, errors = run(f"import torch, liger; torch.ops.load_library({str(copy)!r})")
    assert status == -6  # SIGABRT: nothing can be thrown where a library is loaded
    assert f"liger: {copy} is a second copy of {LIBRARY.name}" in errors and str(LIBRARY) in errors


def test_the_library_itself_may_be_loaded_before_the_package():
    """By C++ code, for example."""
    status, errors = run(
        f"import torch; torch.ops.load_library({str(LIBRARY)!r}); import liger; liger.swiglu"
    )
    assert status == 0, errors
