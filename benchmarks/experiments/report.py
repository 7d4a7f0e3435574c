# SPDX-License-Identifier: BSD-3-Clause
"""Tables and pictures of result files: beside them, and in the pages that have them."""

import importlib.util
import os
import re
import textwrap

from liger_bench.environment import CHECKOUT
from liger_bench.reports import stale
from liger_bench.reports.chart import save

from . import MODULES, experiment, results, scaling, summary, tables

PAGE = CHECKOUT / "docs" / "lab" / "experiments.md"
IMAGES = CHECKOUT / "docs" / "images"


def _pictures(result, stem):
    """Writes the pictures of a result; returns {title: path}."""
    if importlib.util.find_spec("matplotlib") is None:
        return {}
    written = {}
    for suffix, figure in experiment(result["experiment"]).draw(result).items():
        path = stem.with_name(f"{stem.name}{'-' if suffix else ''}{suffix}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        save(figure, path)
        written[suffix or "all"] = path
    return written


def _text(result):
    return f"{experiment(result['experiment']).table(result)}\n\n{tables.environments(result)}."


def write(folder, name, tiny=False):
    """Writes NAME.md and the pictures of an experiment next to its JSON file; returns their paths."""
    source = results.path_of(folder, name, tiny)
    if not source.is_file():
        return []
    result = results.load(source, name, tiny)
    if not result["cells"]:
        return []
    page = source.with_suffix(".md")
    results.write_text(page, f"# {name}: {experiment(name).title}\n\n{_text(result)}\n")
    return [page, *_pictures(result, source.with_suffix("")).values()]


def section(folder, name, images=IMAGES, page=PAGE):
    """The generated part of docs/lab/experiments.md about an experiment."""
    source = results.path_of(folder, name, False)
    if not source.is_file():
        return summary.NOT_MEASURED
    result = results.load(source, name, False)
    if not result["cells"]:
        return summary.NOT_MEASURED
    parts = []
    for suffix, path in _pictures(result, images / f"experiment-{name}").items():
        parts.append(f"![{name}, {suffix}]({os.path.relpath(path, page.parent)})")
    data = os.path.relpath(source, page.parent)
    text = "\n\n".join([*parts, _text(result), f"Data: [{source.name}]({data}).{_state(result)}"])
    return "\n".join(map(_wrapped, text.split("\n")))


def _state(result):
    """How many cells are of an earlier commit, or missing."""
    name, cells = result["experiment"], result["cells"]
    every = experiment(name).cells(False)
    old = sum(stale.is_stale(name, record) for record in cells.values())
    absent = sum(cell.key not in cells for cell in every)
    text = f" Of an earlier state of the code: {old} of {len(cells)} cells." if old else ""
    return text + (f" Not measured yet: {absent}." if absent else "")


def _wrapped(line):
    """A line of at most 120 columns, but for tables and pictures."""
    if line.startswith(("|", "!")):
        return line
    return textwrap.fill(line, 120, break_on_hyphens=False, break_long_words=False)


def markers(name):
    return f"<!-- results of {name} -->", f"<!-- end of {name} -->"


def write_docs(folder, page=PAGE, images=IMAGES):
    """Renders the results in ``folder`` between the markers of the page."""
    _fill(page, {name: section(folder, name, images, page) for name in MODULES})


def write_summaries(folder):
    """Renders the tables of README, docs/start/speed.md and docs/lab/scaling.md."""
    for page, blocks in (summary.blocks(folder) | scaling.blocks(folder)).items():
        _fill(page, {name: "\n".join(map(_wrapped, text.split("\n"))) for name, text in blocks.items()})


def _fill(page, blocks):
    text = page.read_text()
    for name, block in blocks.items():
        first, last = markers(name)
        pattern = re.compile(f"{re.escape(first)}.*?{re.escape(last)}", re.S)
        if not pattern.search(text):
            raise ValueError(f"{page}: no markers {first} and {last}")
        made = f"{first}\n\n{block}\n\n{last}"
        text = pattern.sub(lambda _, made=made: made, text)
    results.write_text(page, text)
