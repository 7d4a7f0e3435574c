"""What README.md and docs/ show: the Python runs, the commands exist, the links lead somewhere."""

import importlib.util
import re
import runpy
import shlex
from pathlib import Path

import pytest

from liger import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = PAGES[0].read_text()


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def commands():
    for page in PAGES:
        for block in blocks(page.read_text(), "bash"):
            for line in block.splitlines():
                yield shlex.split(line, comments=True)


@pytest.mark.parametrize("code", blocks(README, "python"), ids=lambda code: code.split()[-1])
def test_python_runs(code, tmp_path, capsys):
    if "transformers import" in code and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    # From a file, since TorchScript reads its functions' source.
    script = tmp_path / "block.py"
    script.write_text(code)
    runpy.run_path(str(script))
    assert "nothing" not in capsys.readouterr().out


def test_liger_commands_run(capsys):
    lines = [command[1:] for command in commands() if command[:1] == ["liger"]]
    assert {line[0] for line in lines} >= {"info", "plan"}
    for line in lines:
        assert cli.main(line) == 0


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    used = {command[1] for command in commands() if command[:1] == ["make"]}
    assert {"demo", "test"} <= used <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_environment_variables_are_documented():
    from liger.cli.info import VARIABLES

    documented = (ROOT / "docs/environment.md").read_text()
    for name in VARIABLES:
        assert f"| `{name}` |" in README
        assert f"**`{name}`**" in documented
