# SPDX-License-Identifier: BSD-3-Clause
"""Pages of the benchmark results, rendered from the JSON files in benchmarks/results.

The site renders a page for each file of ``benchmarks/run.py``, ``bench_model``, ``vocabulary`` and
``sharded_mlp``. Their first page, README.md, lists the newest results of each benchmark and device. A
file stays in the folder while it is the newest of its kind or a page names it;
``python scripts/docs_site/result_pages.py`` moves all others to archive.tar.xz.
"""

from __future__ import annotations

import datetime
import io
import json
import re
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = "benchmarks/results"
ARCHIVE = "archive.tar.xz"
# Searches lead to guides: MkDocs leaves out pages with these lines at their top.
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"

sys.path.insert(0, str(ROOT / "benchmarks"))
from liger_bench.devices import sharded_mlp_report, vocabulary_report  # noqa: E402
from liger_bench.models import report as model_report  # noqa: E402
from liger_bench.reports import report  # noqa: E402


def pages(root):
    """File name -> Markdown."""
    results = _load(root)
    made = {f"{stem}.md": text for stem, result in results.items() if (text := _page(result)) is not None}
    made["README.md"] = _index(results)
    return {name: NOT_SEARCHED + text for name, text in made.items()}


def superseded(root):
    """Names of result files that are neither the newest of their kind nor named by a page."""
    results = _load(root)
    kept = {stem for devices in _newest(results).values() for stem, _ in devices.values()}
    texts = [path.read_text() for path in [root / "README.md", *(root / "docs").rglob("*.md")]]
    return [
        f"{stem}.json"
        for stem in results
        if stem not in kept and not any(f"/{stem}.json" in t for t in texts)
    ]


def _load(root):
    paths = sorted((root / FOLDER).glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in paths}


def _page(result):
    """None for a file that another program wrote: only its data are shown."""
    text = _report(result)
    if text is None:
        return None
    body = text.partition("\n")[2]
    return f"# Results of {_subject(result)}: {_device(result)}, {_day(result)}\n{body}"


def _report(result):
    if "schema" in result:
        return report.markdown(result)
    if "model" in result:
        return model_report.markdown(
            result["environment"], result["rows"], result["model"], result["checkpointing"]
        )
    if "framework" in result:
        return sharded_mlp_report.markdown(result["environment"], result["framework"], result["records"])
    if result.get("records") and "speed_goal" in result["records"][0]:
        return vocabulary_report.markdown(result["environment"], result["records"])
    return None


def _subjects(result):
    """What was measured -> the anchor of its section, or an empty one."""
    if "schema" in result:
        if result["environment"]["size"] != "full":
            return {}
        ops = dict.fromkeys(row["op"] for row in result["rows"] if row["op"] != "ceilings")
        return {op: f"#{op}" for op in ops}
    return {} if _report(result) is None else {_subject(result): ""}


def _subject(result):
    if "schema" in result:
        ops = dict.fromkeys(row["op"] for row in result["rows"] if row["op"] != "ceilings")
        return ", ".join(ops) if len(ops) <= 3 else "ops and losses"
    if "model" in result:
        plain = "" if result["checkpointing"] else " without checkpointing"
        return f"training steps of {result['model']}{plain}"
    if "framework" in result:
        return f"a gated MLP under {result['framework']}"
    return "an lm_head with a sharded vocabulary"


def _device(result):
    facts = result["environment"]
    ranks = facts.get("ranks") or max((row.get("ranks") or 1 for row in result.get("rows", [])), default=1)
    name = re.search(r"[A-Z]+\d+\w*", facts["device"])
    return ("" if ranks == 1 else f"{ranks} x ") + (name[0] if name else facts["device"])


def _day(result):
    day = datetime.date.fromisoformat(result["environment"]["date"][:10])
    return f"{day.day} {day:%B %Y}"


def _newest(results):
    """Subject -> device -> (stem, anchor) of the newest run."""
    dated = [(result["environment"]["date"], stem) for stem, result in results.items() if _subjects(result)]
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for _, stem in sorted(dated):
        for subject, anchor in _subjects(results[stem]).items():
            found.setdefault(subject, {})[_device(results[stem])] = (stem, anchor)
    return found


def _index(results):
    newest = _newest(results)
    devices = sorted({device for row in newest.values() for device in row}, key=lambda d: (" x " in d, d))
    lines = ["# Benchmark results", ""]
    lines += [
        "The newest run of each benchmark on each device. [How they are measured](../../docs/lab/README.md)",
        "",
    ]
    lines += ["| benchmark | " + " | ".join(devices) + " |", "|---" * (len(devices) + 1) + "|"]
    for subject, row in sorted(newest.items()):
        cells = [
            f"[{_day(results[row[d][0]])}]({row[d][0]}.md{row[d][1]})" if d in row else "" for d in devices
        ]
        lines.append(f"| {subject} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def archive(root, names):
    """Moves result files into the archive. The same files give the same bytes."""
    folder = root / FOLDER
    path = folder / ARCHIVE
    contents = {name: (folder / name).read_bytes() for name in names}
    if path.is_file():
        with tarfile.open(path) as old:
            contents |= {member.name: old.extractfile(member).read() for member in old}
    with tarfile.open(path, "w:xz", format=tarfile.USTAR_FORMAT) as new:
        for name, data in sorted(contents.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            new.addfile(member, io.BytesIO(data))
    for name in names:
        (folder / name).unlink()


if __name__ == "__main__":
    archive(ROOT, superseded(ROOT))
