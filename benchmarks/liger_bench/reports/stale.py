# SPDX-License-Identifier: BSD-3-Clause
"""Which measured cells are of other code than the code of this checkout.

    PYTHONPATH=benchmarks python -m liger_bench.reports.stale

Every record in benchmarks/results/experiments has a digest of the code that it depends on (depends.py),
without comments, docstrings and blank lines. A cell is stale if that code has another digest now; git is not
asked. Files may move: their paths are no part of the digest.

The check concerns claims about this code. What was tried and not kept is history: a lab page states it in a
section "Tried", as a ratio to what it was compared with at that time, without a table and without a result
file. The check names sections that have either, and links to result files that are not there.
"""

import ast
import functools
import hashlib
import io
import json
import posixpath
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

from . import depends

ROOT = Path(__file__).parents[3]
RESULTS = "benchmarks/results/experiments"
SUFFIXES = (".py", ".cu", ".cuh", ".h", ".cpp")
# A header has the code of a source of the same name; these are of the host.
_SOURCES = (".cu", ".cpp")
_HOST = ("csrc/host/",)
# Strings stay: they may have // in them.
_CPP_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.S)


def code(path, text):
    """The code of a file without comments, docstrings and blank lines; every version of Python finds the
    same."""
    if not path.endswith(".py"):
        return " ".join(_CPP_COMMENT.sub(lambda found: found[1] or " ", text).split())
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        named = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if named and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines[docstring.lineno - 1 : docstring.end_lineno] = [""] * (
                docstring.end_lineno - docstring.lineno + 1
            )
    return "\n".join(line.rstrip() for line in lines if line.strip())


class Tree:
    """The code below a folder."""

    def __init__(self, root=ROOT):
        self.root = Path(root)
        rooms = ("benchmarks", "csrc", "python", "triton_kernels")
        found = (path for room in rooms for path in (self.root / room).rglob("*") if path.suffix in SUFFIXES)
        self.files = {path.relative_to(self.root).as_posix() for path in found}
        # The same files are asked for again and again.
        for name in ("hash_of", "named_by", "digest"):
            setattr(self, name, functools.cache(getattr(self, name)))

    def hash_of(self, path):
        return hashlib.sha256(code(path, (self.root / path).read_text()).encode()).hexdigest()

    def named_by(self, path):
        """The files that a C++ or Triton file includes or imports."""
        if not path.startswith(("csrc/", "triton_kernels/")):
            return []
        text = (self.root / path).read_text()
        if path.startswith("csrc/"):
            found = [f"csrc/{name}" for name in re.findall(r'#include "([^"]+)"', text)]
            stems = [posixpath.splitext(name)[0] for name in found]
            return [*found, *(f"{stem}{suffix}" for stem in stems for suffix in _SOURCES)]
        names = re.findall(r"^from \.(\w+) import", text, re.M) + re.findall(
            r"^from \. import (\w+)", text, re.M
        )
        return [f"triton_kernels/{name}.py" for name in names]

    def closure(self, prefixes):
        """The files whose paths begin with one of the prefixes, and those that these include or import."""
        known, waiting = set(), [file for file in self.files if file.startswith(prefixes)]
        while waiting:
            path = waiting.pop()
            if path not in known:
                known.add(path)
                waiting += [p for p in self.named_by(path) if p in self.files and not p.startswith(_HOST)]
        return known

    def digest(self, prefixes):
        """Twelve digits that name the code of these files."""
        hashes = sorted(map(self.hash_of, self.closure(prefixes)))
        return hashlib.sha256("".join(hashes).encode()).hexdigest()[:12]


@functools.cache
def tree():
    return Tree()


def digest_of(name, method, size):
    """The digest of the code on which a cell depends, as it is now."""
    return tree().digest(depends.paths(name, method, size))


def is_stale(name, record):
    """True if the record of a cell is of other code."""
    return record.get("code") != digest_of(name, record["method"], record["size"])


def complaints(root=ROOT):
    """What pages say against the rules above."""
    found = []
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        text, name = page.read_text(), page.relative_to(root)
        for target in re.findall(r"benchmarks/results/([\w./-]+)", text):
            if not (root / "benchmarks/results" / target).exists():
                found.append(f"{name}: no result {target}")
        for title, body in re.findall(r"^#+ (Tried.*)\n((?:(?!#).*\n?)*)", text, re.M):
            if re.search(r"^\s*\||benchmarks/results", body, re.M):
                found.append(f"{name}: {title!r} has a table or a result file")
    return found


def main():
    stale = total = 0
    for path in sorted((ROOT / RESULTS).glob("*.json"), key=lambda path: (len(path.name), path.name)):
        result = json.loads(path.read_text())
        of_file = [k for k, r in result["cells"].items() if is_stale(result["experiment"], r)]
        devices = Counter(
            result["environments"][record["environment"]]["device"]
            for record in result["cells"].values()
            if "environment" in record
        )
        of_devices = ", ".join(f"{count} of {device}" for device, count in devices.items())
        print(f"{path.stem}: {len(of_file)} of {len(result['cells'])} cells are stale; {of_devices}")
        stale, total = stale + len(of_file), total + len(result["cells"])
    found = complaints()
    print("\n".join([*found, f"{stale} of {total} cells are stale."]))
    return 1 if stale or found else 0


if __name__ == "__main__":
    sys.exit(main())
