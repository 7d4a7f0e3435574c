# SPDX-License-Identifier: BSD-3-Clause
"""Figures of code that has changed since: ``PYTHONPATH=benchmarks python -m liger_bench.reports.stale``.

Every result file in benchmarks/results names the commit that was measured. The check compares it with the
checkout in the files that the benchmark depends on (depends.py), and lists figures with a difference, with
the pages that name the result. A difference counts if it changes code: comments, docstrings and white space
do not. A file that was moved and is otherwise the same is no difference; one that was moved and has other
imports is one.

A commit that is not in this history, or that is no name of a single commit, is stale. Files of other
programs, which compare variants of one commit for a lab note, are not checked.

Exit code: 0, or 1 if a figure is stale.
"""

import argparse
import ast
import functools
import json
import posixpath
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from . import depends

ROOT = Path(__file__).parents[3]
RESULTS = "benchmarks/results"
# A header has the code of a source of the same name; these are of the host.
_SOURCES = (".cu", ".cpp")
_HOST = ("csrc/host/",)
# Strings stay: they may have // in them.
_CPP_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.S)


@dataclass(frozen=True)
class Figure:
    """Figures of one subject in one result file, measured at one commit."""

    file: str
    subject: str
    commit: str
    paths: tuple[str, ...]
    modified: bool = False


# --- code ---------------------------------------------------------------------------------------------------


def code(path, text):
    """The code of a file without comments, docstrings and white space."""
    if path.endswith(".py"):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            named = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            if named and ast.get_docstring(node, clean=False) is not None:
                del node.body[0]
        return ast.dump(tree)
    return " ".join(_CPP_COMMENT.sub(lambda found: found[1] or " ", text).split())


class Repository:
    """What the check asks git, for one repository."""

    def __init__(self, root):
        self.root = Path(root)
        self.files = self._git("ls-files").splitlines()
        # The same files are asked for again and again.
        for name in ("text", "has", "changes", "differs", "named_by", "closure"):
            setattr(self, name, functools.cache(getattr(self, name)))

    def _git(self, *arguments):
        command = ["git", "-c", "core.quotePath=false", *arguments]
        return subprocess.run(command, cwd=self.root, check=True, capture_output=True, text=True).stdout

    def text(self, path, commit=None):
        return (self.root / path).read_text() if commit is None else self._git("show", f"{commit}:{path}")

    def has(self, commit):
        """True for a commit that HEAD descends from."""
        if re.fullmatch(r"[0-9a-f]{7,40}", commit or "") is None:
            return False
        command = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
        return subprocess.run(command, cwd=self.root, capture_output=True).returncode == 0

    def changes(self, commit):
        """{path now, or before if it is gone: path before, or None if the file is new or gone}."""
        lines = self._git("diff", "-M", "--name-status", commit).splitlines()
        split = [line.split("\t") for line in lines]
        return {names[-1]: None if s[0] in "AD" else names[0] for s, *names in split if s != "R100"}

    def differs(self, before, now, commit):
        """True if the code of a file has changed since the commit."""
        if before is None or not now.endswith((".py", ".cu", ".cuh", ".h", ".cpp")):
            return True
        return code(before, self.text(before, commit)) != code(now, self.text(now))

    def named_by(self, path):
        """The files that a C++ or Triton file includes or imports."""
        text = self.text(path)
        if path.startswith("csrc/"):
            found = [f"csrc/{name}" for name in re.findall(r'#include "([^"]+)"', text)]
            stems = [posixpath.splitext(name)[0] for name in found]
            return [*found, *(f"{stem}{suffix}" for stem in stems for suffix in _SOURCES)]
        if path.startswith("triton_kernels/"):
            names = re.findall(r"^from \.(\w+) import", text, re.M) + re.findall(
                r"^from \. import (\w+)", text, re.M
            )
            return [f"triton_kernels/{name}.py" for name in names]
        return []

    def closure(self, prefixes):
        """The files whose paths begin with one of the prefixes, and those that these include or import."""
        known, waiting = set(), [file for file in self.files if file.startswith(prefixes)]
        while waiting:
            path = waiting.pop()
            if path not in known:
                known.add(path)
                found = (p for p in self.named_by(path) if p in self.files)
                waiting += [p for p in found if not p.startswith(_HOST)]
        return known

    def differences(self, figure):
        """The files of a figure whose code has changed, by the names that they have now."""
        depends_on, commit = self.closure(figure.paths), figure.commit
        # A file that is gone is no part of the closure.
        return sorted(
            now
            for now, before in self.changes(commit).items()
            if (now in depends_on or now.startswith(figure.paths)) and self.differs(before, now, commit)
        )


# --- figures ------------------------------------------------------------------------------------------------


def _ours(method):
    return method.startswith("liger") and not method.startswith("liger-kernel")


def _of_experiment(file, result):
    """Figures of an experiment; methods of others depend on the benchmark alone."""
    name = result["experiment"]
    of_liger, of_all = depends.EXPERIMENTS[name]
    found = {}
    for cell in result["cells"].values():
        if "environment" not in cell:
            continue
        if name == "E1":
            subject, paths = cell["method"], (*depends.OPS[cell["method"]], *of_all)
        elif name in ("E5", "E11") or _ours(cell["method"]):
            subject, paths = "liger", (*of_liger, *of_all)
        else:
            subject, paths = "others", of_all
        facts = result["environments"][cell["environment"]]
        figure = Figure(file, f"{name} {subject}", facts["commit"], paths, bool(facts["modified"]))
        found[figure] = None
    return list(found)


def _of_suite(file, result):
    facts = result["environment"]
    ops = dict.fromkeys(row["op"] for row in result["rows"] if row["op"] != "ceilings")
    return [
        Figure(
            file, op, facts["commit"],
            (*depends.OPS[op], *depends.SUITE, f"benchmarks/liger_bench/ops/{op}.py"), bool(facts.get("modified")),
        )
        for op in ops
    ]  # fmt: skip


def figures(file, result):
    """The figures of a result file; None for a file of another program."""
    if "experiment" in result:
        return _of_experiment(file, result)
    if "schema" in result:
        return _of_suite(file, result)
    if "model" in result:
        family = result["model"].partition("-")[0].lower()
        subject, paths = f"steps of {result['model']}", (*depends.MODELS[family], *depends.STEPS)
    elif "framework" in result:
        subject = f"MLP under {result['framework']}"
        paths = (*depends.SHARDED_MLP, "benchmarks/liger_bench/devices/sharded_mlp.py")
    elif result.get("records") and "speed_goal" in result["records"][0]:
        subject = "sharded vocabulary"
        paths = (*depends.VOCABULARY, "benchmarks/liger_bench/devices/vocabulary.py")
    else:
        return None
    facts = result["environment"]
    return [Figure(file, subject, facts["commit"], paths, bool(facts.get("modified")))]


def reason(repository, figure):
    """Why a figure is stale, or None."""
    if not repository.has(figure.commit):
        return f"commit {figure.commit} is not in this history"
    if figure.modified:
        return f"measured with changes on top of {figure.commit}"
    changed = repository.differences(figure)
    if not changed:
        return None
    shown = ", ".join(changed[:3]) + (", ..." if len(changed) > 3 else "")
    return f"{len(changed)} files changed: {shown}"


def named_on(root, file):
    """The pages that name a result file, README first."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    name = re.compile(rf"/{re.escape(Path(file).name)}\b")
    return [str(p.relative_to(root)) for p in pages if p.is_file() and name.search(p.read_text())]


def check(root):
    """(figure, pages, reason or None) of every figure, and the number of files of other programs."""
    repository, found, others = Repository(root), [], 0
    for path in sorted((root / RESULTS).rglob("*.json")):
        of_file = figures(path.name, json.loads(path.read_text()))
        if of_file is None:
            others += 1
            continue
        pages = named_on(root, path)
        found += [(figure, pages, reason(repository, figure)) for figure in of_file]
    return found, others


def report(found, others):
    """Lines of text: a table of the stale figures, and counts."""
    lines = ["| result | figures | commit | why stale | pages |", "|---|---|---|---|---|"]
    stale = [(figure, pages, why) for figure, pages, why in found if why is not None]
    for figure, pages, why in stale:
        lines.append(
            f"| {figure.file} | {figure.subject} | {(figure.commit or 'none')[:9]} | {why} | {', '.join(pages)} |"
        )
    counts = Counter(page for _, pages, _ in stale for page in pages)
    shown = ", ".join(f"{page} {count}" for page, count in sorted(counts.items()))
    lines += ["", f"{len(stale)} of {len(found)} figures are stale. By page: {shown or 'none'}."]
    return [*lines, f"{others} files of other programs are not checked."]


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    found, others = check(ROOT)
    print("\n".join(report(found, others)))
    return 1 if any(why is not None for *_, why in found) else 0


if __name__ == "__main__":
    sys.exit(main())
