# SPDX-License-Identifier: BSD-3-Clause
"""What README.md and docs/ show: the Python runs, the commands exist, the links lead somewhere."""

import itertools
import os
import re
import runpy
import shlex
import sys
from pathlib import Path, PurePosixPath

import pytest
import tiny_models
import torch
from doc_blocks import blocks as python_blocks

import liger
import liger_cli as cli

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("compat", "csrc", "csrc/lm_head/sm90", "hub")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
README = (ROOT / "README.md").read_text()
PYTHON = [block for page in PAGES for block in python_blocks(page)]
# Blocks that are compiled only: each is marked on its page with a reason that a test environment cannot
# remove.
NOT_RUN = 8
# A word that begins with one of these folders is a path. An sdist lacks the first two.
FOLDERS = [
    *(".ci", ".github", "benchmarks", "cmake", "csrc", "docs", "examples", "python", "scripts", "tests"),
    "triton_kernels",
]
SUFFIXES = (".py", ".sh", ".cpp", ".cu", ".cuh", ".h", ".md", ".cmake", ".toml", ".yaml", ".yml", ".cff")
GENERATED = ("build", "dist", "demo-output", "__pycache__")


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def commands():
    for page in PAGES:
        for block in blocks(page.read_text(), "bash"):
            for line in block.splitlines():
                yield shlex.split(line, comments=True)


@pytest.fixture
def undone(monkeypatch, tmp_path):
    """A folder of its own; what a block has changed in the process is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("LIGER_COMPAT_OVERRIDE", "1")
    # With several GPUs the Trainer of a block would wrap its model in DataParallel.
    tiny_models.older_checkpointing_method(monkeypatch)
    devices = torch.cuda.device_count()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: min(devices, 1))
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if "liger.transformers" in sys.modules:
        liger.transformers.unpatch_future()
    if "liger.compat" in sys.modules:
        sys.modules["liger.compat"].uninstall()


@pytest.mark.usefixtures("undone", "backends_restored")
@pytest.mark.parametrize(
    "block", [block for block in PYTHON if not block.skipped], ids=lambda block: f"{block.page}:{block.line}"
)
def test_python_runs(block, tmp_path, capsys):
    if missing := block.missing():
        pytest.skip(f"needs {', '.join(missing)}")
    if "liger.compat" in sys.modules and "liger.compat" in block.program:
        # The import statement of the block has no effect then.
        sys.modules["liger.compat"].install()
    # From a file, since TorchScript reads its functions' source.
    script = tmp_path / "block.py"
    script.write_text(block.program)
    runpy.run_path(str(script))
    assert "not patched" not in capsys.readouterr().out


def test_blocks_that_do_not_run_are_few():
    marked = [block for block in PYTHON if block.skipped]
    for block in marked:
        compile(block.code, block.page, "exec")
    assert len(marked) == NOT_RUN, [f"{block.page}:{block.line}: {block.skipped}" for block in marked]
    # Whatever its indentation and spelling, a block of Python is one of those that are found.
    fences = sum(len(re.findall(r"^ *(?:```|~~~) *py", page.read_text(), re.M)) for page in PAGES)
    assert len(PYTHON) == fences >= 35


def test_liger_commands_run(capsys, tmp_path):
    pytest.importorskip("transformers")
    tiny_models.make("llama").config.save_pretrained(tmp_path)
    lines = [command[1:] for command in commands() if command[:1] == ["liger"]]
    assert {line[0] for line in lines} >= {"info", "plan"}
    for line in lines:
        # A folder in place of a model of the Hub.
        model = line.index("--model") + 1 if "--model" in line else len(line)
        assert cli.main([*line[:model], *[str(tmp_path)] * (model < len(line)), *line[model + 1 :]]) == 0


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    used = {command[1] for command in commands() if command[:1] == ["make"]}
    assert {"demo", "test"} <= used <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r'<img src="([^"]+)"', text):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def is_source(folder):
    """True if a folder is part of the repository: .gitignore leaves out the others."""
    return folder in FOLDERS or not (folder.startswith(".") or folder in GENERATED)


def files_of_the_repository():
    """Paths relative to ROOT."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = filter(is_source, folders)
        yield from (PurePosixPath(folder, file).relative_to(ROOT) for file in files)


FILES = sorted(files_of_the_repository())


def alternatives(path):
    """``a/{b,c}.py`` as ``["a/b.py", "a/c.py"]``."""
    parts = [p[1:-1].split(",") if p.startswith("{") else [p] for p in re.split(r"(\{[^{}]*\})", path)]
    return ["".join(choice) for choice in itertools.product(*parts)]


def paths_named(text):
    """Words in backticks and in blocks of commands that look like a path of the repository; of a file name
    without a folder, only one that stands in backticks alone: arguments of commands may be files of the
    reader."""
    paragraphs = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S).split("\n\n")
    spans = itertools.chain.from_iterable(re.findall(r"`([^`]+)`", paragraph) for paragraph in paragraphs)
    for words in map(str.split, [*spans, *blocks(text, "bash")]):
        for word in words:
            path = re.sub(r"(::.*|:\d+)$", "", word.strip("\"'(),;")).rstrip("/")
            if path in SUFFIXES or re.search(r"[<>$=]|\.\.\.|^https?:", path):
                continue
            top, slash, _ = path.partition("/")
            if slash and top in FOLDERS:
                if (ROOT / top).exists():
                    yield path
            elif path.endswith(SUFFIXES) and (slash or len(words) == 1) and not path.startswith(("/", "~")):
                yield path


def exists(path, page):
    """True if a path, from ROOT, from the page or as the last parts of a file's, leads to something."""
    for start in (ROOT, page.parent):
        if any(start.glob(path)):
            return True
    return any(file.match(path) for file in FILES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_exist(page):
    """Globs and ``{a,b}`` are allowed; names in angle brackets are skipped; a bare file name is in any
    folder."""
    named = itertools.chain.from_iterable(map(alternatives, paths_named(page.read_text())))
    assert not sorted({path for path in named if not exists(path, page)})


def test_environment_variables_are_documented():
    from liger.cli.info import VARIABLES

    documented = (ROOT / "docs/reference/environment.md").read_text()
    for name in VARIABLES:
        assert f"| `{name}` |" in documented
        assert f"**`{name}`**" in documented


def test_the_front_page_is_short():
    assert len(README.splitlines()) <= 180
    # Wider lines are cut by the column of the site.
    code = re.findall(r"^```\w*\n(.*?)^```", README, re.M | re.S)
    assert max(len(line) for block in code for line in block.splitlines()) <= 75
