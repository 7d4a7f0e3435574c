# SPDX-License-Identifier: BSD-3-Clause
"""The statements by which released projects import liger_kernel run.

import_statements.txt has the statements of the wheels that its headings name, without duplicates.
"""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("transformers")


def statements():
    project = None
    for line in Path(__file__).with_name("import_statements.txt").read_text().splitlines():
        if line.startswith("# "):
            project = line[2:]
        elif line:
            yield pytest.param(line, id=f"{project}: {line}")


@pytest.mark.parametrize("statement", list(statements()))
def test_import(statement):
    if "torch_to_triton_dtype" in statement and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    namespace = {}
    exec(statement, namespace)
    assert len(namespace) > 1
