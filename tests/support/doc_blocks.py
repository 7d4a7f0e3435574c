# SPDX-License-Identifier: BSD-3-Clause
"""The Python blocks of README and the documents, with the comments that say how a test runs them.

A comment right before a block, which readers of the page do not see, is one of:

    <!-- setup              Code that runs before the block: the tensors and models that the page leaves to
    hidden = ...            the reader.
    -->

    <!-- not run: reason -->    The block is compiled only.
"""

import ast
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The distribution that liger.compat stands in for.
PROVIDED = {"liger_kernel"}
_BLOCK = re.compile(
    r"(?:^<!-- (?P<comment>(?:(?!-->).)*?)\s*-->\n\s*)?^```python\n(?P<code>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A block of a page; ``skipped`` is the reason why it is not run, ``setup`` the code before it."""

    page: str
    line: int
    code: str
    setup: str = ""
    skipped: str = ""

    @property
    def program(self):
        return f"{self.setup}\n{self.code}"

    def missing(self):
        """Packages that the program imports and this environment lacks."""
        found = set()
        for node in ast.walk(ast.parse(self.program)):
            if isinstance(node, ast.Import):
                found.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module.partition(".")[0])
        if "trl" in found:
            found.add("datasets")
        return sorted(name for name in found - PROVIDED if importlib.util.find_spec(name) is None)


def blocks(path):
    """The Python blocks of a page."""
    text = path.read_text()
    page = path.relative_to(ROOT).as_posix()
    for found in _BLOCK.finditer(text):
        comment = found["comment"] or ""
        kind, _, rest = comment.partition("\n") if comment.startswith("setup") else comment.partition(": ")
        if comment and kind.strip() not in ("setup", "not run"):
            raise ValueError(
                f"{page}: the comment before a block is {kind!r}, expected 'setup' or 'not run: reason'"
            )
        yield Block(
            page,
            text.count("\n", 0, found.start("code")),
            found["code"],
            setup=rest if kind.strip() == "setup" else "",
            skipped=rest if kind == "not run" else "",
        )
