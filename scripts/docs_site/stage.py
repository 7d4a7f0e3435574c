"""Collects the sources of the documentation site in a folder:

    python scripts/docs_site/stage.py build/site-sources

Every file keeps its path in the repository, so a link between docs/ and another folder, such as
``../csrc/README.md``, is the same in a checkout and on the site. Added are the pages of the API reference,
and the differences between GitHub's Markdown and Python-Markdown. The result is plain Markdown: mkdocs.yml is
all that depends on the builder.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import reference

ROOT = Path(__file__).parents[2]
SOURCES = (
    "*.md",
    "LICENSE",
    "hub/README.md",
    "compat/README.md",
    "csrc/README.md",
    "csrc/*/*/README.md",
    "benchmarks/results/*.*",  # pages, and the data in JSON that pages link to
    "benchmarks/results/experiments/*.json",
    "docs/**/*.md",
    "docs/images/*",
)
# How a test runs the block below it: tests/support/doc_blocks.py.
_COMMENT = re.compile(r"^<!--.*?-->\n+", re.M | re.S)
_MARKER = re.compile(r"(?:[-*+]|\d+\.) +")


def stage(folder: Path) -> None:
    """Writes the sources of the site to a folder, which it empties first."""
    shutil.rmtree(folder, ignore_errors=True)
    for pattern in SOURCES:
        for path in ROOT.glob(pattern):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                target.write_text(indent_lists(_COMMENT.sub("", path.read_text())))
            else:
                shutil.copyfile(path, target)
    (folder / "api").mkdir()
    for name, text in reference.pages(ROOT).items():
        (folder / "api" / name).write_text(text)


def indent_lists(text: str) -> str:
    """Indents the contents of list items by four spaces per level, and separates a list from the paragraph
    before it.

    GitHub takes the width of the marker, two or three spaces; Python-Markdown takes four.
    """
    levels: list[int] = []
    result: list[str] = []
    in_fence = in_paragraph = False
    for line in text.splitlines():
        bare = line.lstrip()
        if not bare:
            result.append("")
            in_paragraph = False
            continue
        indent = len(line) - len(bare)
        if not in_fence:
            while levels and indent < levels[-1]:
                levels.pop()
        marker = None if in_fence else _MARKER.match(bare)
        if marker and in_paragraph:
            result.append("")
        result.append("    " * len(levels) + line[min(levels[-1] if levels else 0, indent) :])
        if marker:
            levels.append(indent + marker.end())
        in_fence ^= bare.startswith("```")
        # The next item of a list follows without a blank line.
        in_paragraph = not levels
    return "\n".join(result) + "\n"


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
