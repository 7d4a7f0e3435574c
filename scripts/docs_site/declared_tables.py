# SPDX-License-Identifier: BSD-3-Clause
"""Tables of the documentation that follow from csrc/declarations.cpp:

    python scripts/docs_site/declared_tables.py

writes them between their markers in docs/guides/distributed.md and docs/reference/errors.md. A test compares
them.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_DECLARATION = re.compile(r'\{\{"(\w+)\((.*?)\) -> .*?\},\s*"([^"]*)"\}', re.S)
# Dimensions of the main tensor -> which placements let each rank work alone.
_ALONE = {
    "...": "sharded along any dimension",
    "... H": "sharded along any dimension but the last",
    "... 2I": "sharded along any dimension but the last, which has gate and up",
    "batch channels ...": "sharded along the first dimension",
}
_RANGES = {
    ">= 0": "finite, at least 0",
    "finite": "finite",
    "divides H": "an integer above 0 that divides the last dimension",
    "divides channels": "an integer above 0 that divides the number of channels",
}


def declarations(text):
    """(op, names of its tensors, {tensor or option: its words}) of each op."""
    text = text.replace('\\"', "'")
    for op, arguments, shapes in _DECLARATION.findall(text):
        tensors = re.findall(r"Tensor\??(?:\([^)]*\))? (\w+)", arguments)
        words = {}
        for entry in shapes.split(";"):
            names, _, rest = entry.strip().partition(":")
            if not rest:
                names, _, rest = entry.strip().partition(" ")
            words.update(dict.fromkeys(names.split(", "), rest.strip()))
        yield op, tensors, words


def _names(names):
    return ", ".join(f"`{name}`" for name in names)


def _rows(header, rows):
    """A table, in which ops with the same cells share a row."""
    merged = {}
    for first, *cells in rows:
        merged.setdefault(tuple(cells), []).append(first)
    lines = [header, ["---"] * len(header), *([_names(ops), *cells] for cells, ops in merged.items())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def placements(ops):
    """The DTensor rules of distributed/rules/ops.py."""
    rows = []
    for op, (main, *others), words in ops:
        like = [name for name in others if words[name].startswith("like ")]
        whole = [name for name in others if name not in like]
        other = [f"{_names(like)} as `{main}`"] * bool(like) + [f"{_names(whole)} replicated"] * bool(whole)
        gradients = [f"as `{main}`"] + [f"of {_names(whole)}: `Partial`"] * bool(whole)
        rows.append((op, _ALONE[words[main]], "; ".join(other), "; ".join(gradients)))
    return _rows(["op", "each rank works alone", "other arguments", "gradients"], rows)


def ranges(ops):
    """The conditions on options, each option with the ops that have it."""
    found = {}
    for op, tensors, words in ops:
        for option, condition in words.items():
            kind = _RANGES.get(condition)
            if condition.startswith("in "):
                kind = "one of " + ", ".join(f'`"{choice}"`' for choice in condition.split()[1:])
            if kind and option not in tensors:
                found.setdefault((option, kind), []).append(op)
    lines = [("option", "of", "range"), ("---",) * 3]
    lines += [(f"`{option}`", _names(of), kind) for (option, kind), of in found.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


TABLES = {"docs/guides/distributed.md": placements, "docs/reference/errors.md": ranges}


def written(page, table):
    """The text of a page with the table between the markers."""
    begin, end = "<!-- declared_tables.py -->\n\n", "\n<!-- end -->\n"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError("the page has no markers for the table")
    return before + begin + table + end + after


def pages(root=ROOT):
    """{path: (text, text with its table as it is declared)}."""
    ops = list(declarations((root / "csrc/declarations.cpp").read_text()))
    texts = {root / name: (root / name).read_text() for name in TABLES}
    return {
        path: (text, written(text, make(ops)))
        for (path, text), make in zip(texts.items(), TABLES.values(), strict=True)
    }


def main():
    for path, (_, text) in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
