# SPDX-License-Identifier: BSD-3-Clause
"""Comments of csrc and triton_kernels are at most 110 columns wide; the formatters leave comments alone in
places."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WIDTH = 110
CXX = [path for suffix in ("cpp", "h", "cu", "cuh") for path in (ROOT / "csrc").rglob(f"*.{suffix}")]
PYTHON = list((ROOT / "triton_kernels").glob("*.py"))


def comment_lines_of_cxx(text):
    """(line number, line) of each line with a comment. Lines of code alone, such as schemas, may be
    longer."""
    return [(number, line) for number, line in enumerate(text.splitlines(), 1) if "//" in line]


def comment_lines_of_python(text):
    """(line number, line) of each line with a comment or a part of a docstring."""
    lines = text.splitlines()
    numbers = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            numbers.update(range(node.lineno, node.end_lineno + 1))
    return [(number, lines[number - 1]) for number in sorted(numbers)]


def test_comments_are_found():
    assert comment_lines_of_cxx("int a;  // one\nint b;\n") == [(1, "int a;  // one")]
    text = '"""One.\n\nTwo.\n"""\n\na = "# none"\nb = 2  # three\n'
    assert [number for number, _ in comment_lines_of_python(text)] == [1, 2, 3, 4, 7]
    assert len(CXX) > 100 and len(PYTHON) > 20


@pytest.mark.parametrize(
    "paths, comment_lines",
    [(CXX, comment_lines_of_cxx), (PYTHON, comment_lines_of_python)],
    ids=["csrc", "triton_kernels"],
)
def test_comments_are_at_most_110_columns_wide(paths, comment_lines):
    wide = [
        f"{path.relative_to(ROOT)}:{number} has {len(line)} columns"
        for path in paths
        for number, line in comment_lines(path.read_text())
        if len(line) > WIDTH
    ]
    assert not wide, "\n".join(wide)
