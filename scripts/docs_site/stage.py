# SPDX-License-Identifier: BSD-3-Clause
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
    "benchmarks/results/experiments/*.json",  # data that pages link to
    "docs/**/*.md",
    "docs/images/*",
)
# Searches lead to guides first: the weight of the pages in a folder, the first that fits.
BOOSTS = {
    **dict.fromkeys(("docs/lab", "csrc", "CHANGELOG.md"), 0.1),
    "docs/reference/models.md": 0.5,
    "docs/start/troubleshooting.md": 4,
    **dict.fromkeys(("docs", "README.md"), 2),
}
# Their tables take the place of the table of contents.
WIDE = ("docs/reference/models.md",)
# How a test runs the block below it: tests/support/doc_blocks.py.
_COMMENT = re.compile(r"^<!--.*?-->\n+", re.M | re.S)
# GitHub takes the width of a picture in HTML only, and MkDocs finds pictures in Markdown only.
_PICTURE = re.compile(r'<img src="([^"]+)" width="(\d+)" alt="([^"]*)">')
_MARKER = re.compile(r"(?:[-*+]|\d+\.) +")


def stage(folder: Path) -> None:
    """Writes the sources of the site to a folder, which it empties first."""
    shutil.rmtree(folder, ignore_errors=True)
    for pattern in SOURCES:
        for path in ROOT.glob(pattern):
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                text = indent_lists(_COMMENT.sub("", path.read_text()))
                text = _PICTURE.sub(r'![\3](\1){ width="\2" }', text)
                target.write_text(_front_matter(path.relative_to(ROOT)) + text)
            else:
                shutil.copyfile(path, target)
    (folder / "api").mkdir(exist_ok=True)
    for name, text in reference.pages(ROOT).items():
        (folder / "api" / name).write_text(text)
    shutil.copytree(Path(__file__).parent / "assets", folder / "assets")


def _front_matter(path: Path) -> str:
    parents = {path.as_posix(), *(parent.as_posix() for parent in path.parents)}
    boost = next((weight for place, weight in BOOSTS.items() if place in parents), 1)
    hidden = "hide: [toc]\n" if path.as_posix() in WIDE else ""
    return f"---\n{hidden}search:\n  boost: {boost}\n---\n\n"


def indent_lists(text: str) -> str:
    """Indents the contents of list items by four spaces per level, and separates a list from the paragraph
    before it.

    GitHub takes the width of the marker, two or three spaces; Python-Markdown takes four.
    """
    levels: list[int] = []
    result: list[str] = []
    in_fence = in_paragraph = after_blank = False
    for line in text.splitlines():
        bare = line.lstrip()
        if not bare:
            result.append("")
            in_paragraph, after_blank = False, True
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
        # The next item of a list follows without a blank line, but not after a further paragraph of an item.
        further = (in_paragraph or after_blank) and not marker and not bare.startswith("```")
        in_paragraph = not levels or further
        after_blank = False
    return "\n".join(result) + "\n"


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
