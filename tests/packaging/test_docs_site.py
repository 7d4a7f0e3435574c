# SPDX-License-Identifier: BSD-3-Clause
"""The documentation site: every page has its place, the build is strict, and the reference has every public
name.

The build needs MkDocs: in this environment, or in the environment of ``make docs``. The navigation is
compared without it.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import public_callables
import pytest
import torch

import liger

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "docs_site"
DOCS_PYTHON = ROOT / "build" / "docs" / "bin" / "python"
pytestmark = pytest.mark.skipif(not (ROOT / "mkdocs.yml").is_file(), reason="not a checkout")


def module(name):
    """A module of scripts/docs_site, none of which needs MkDocs."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location(f"docs_site_{name}", SCRIPTS / f"{name}.py")
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return made
    finally:
        sys.path.remove(str(SCRIPTS))


def navigation():
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    return re.findall(r"([\w./-]+\.md)$", text, re.M)


def test_every_page_is_in_the_navigation_once(tmp_path):
    if not (ROOT / "benchmarks" / "results").is_dir():
        pytest.skip("an sdist has no results")
    module("stage").stage(tmp_path / "sources")
    pages = {path.relative_to(tmp_path / "sources").as_posix() for path in tmp_path.rglob("*.md")}
    listed = navigation()
    assert not sorted(pages - set(listed)), "add them to nav in mkdocs.yml"
    assert not sorted(set(listed) - pages), "nav in mkdocs.yml names pages that do not exist"
    assert len(listed) == len(set(listed))


def test_pages_repeat_the_noun():
    """docs/development/contributing.md, "English": at most 0.2 of these per 1000 words."""
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "models.md"]
    texts = [re.sub(r"^ *```.*?^ *```", "", path.read_text(), flags=re.M | re.S) for path in pages]
    words = sum(len(text.split()) for text in texts)
    found = [match[0] for text in texts for match in re.finditer(r"\b(?:that|those)\s+of\b.{0,40}", text)]
    assert len(found) <= 0.2 * words / 1000, found


def test_guides_are_not_a_lab_book():
    """What users read, without the lab notes and the generated tables: at most 34000 words."""
    guides = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "lab"]
    # The set-up of the tests of code blocks is in comments, a generated table between two of them.
    left_out = re.compile(r"<!-- results of (\w+) -->.*?<!-- end of \1 -->|<!--.*?-->", re.S)
    pages = [left_out.sub("", p.read_text()) for p in guides if p.name != "models.md"]
    assert sum(len(page.split()) for page in pages) <= 34000


@pytest.mark.parametrize(
    "source, expected",
    [
        (
            "Text:\n- a\n  b\n\n  ```bash\n    c\n  ```\n- d\n   1. e\n\n      f\n\ng\n",
            "Text:\n\n- a\n    b\n\n    ```bash\n      c\n    ```\n- d\n     1. e\n\n        f\n\ng\n",
        ),
        ("- a\n\n  b\n  c\n- d\n- e\n", "- a\n\n    b\n    c\n\n- d\n- e\n"),
    ],
)
def test_lists_are_indented_as_python_markdown_needs_them(source, expected):
    assert module("stage").indent_lists(source) == expected


def test_tables_follow_from_the_declarations():
    found = module("declared_tables").pages(ROOT)
    assert [path.name for path in found] == ["distributed.md", "errors.md"]
    for committed, written in found.values():
        assert written.count("`rms_norm`") and committed == written, (
            "python scripts/docs_site/declared_tables.py writes them"
        )


def test_the_header_has_the_version_and_pages_an_edit_link(tmp_path, monkeypatch):
    hooks = module("hooks")
    settings = {"site_name": "liger-ops", "repo_url": None, "edit_uri": None}
    config = hooks.on_config(SimpleNamespace(**settings))
    assert config.site_name == f"liger-ops {liger.__version__}"

    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    for file, text in {
        "python/liger/__init__.py": '__version__ = "1.2"\n',
        "pyproject.toml": 'Repository = "https://host/us/liger-ops"\n',
        "README.md": "",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    config = hooks.on_config(SimpleNamespace(**settings))
    assert (config.repo_url, config.edit_uri) == ("https://host/us/liger-ops", "edit/main/")
    (tmp_path / "pyproject.toml").write_text('Repository = "https://host/x/liger-ops"  # placeholder: see\n')
    assert hooks.on_config(SimpleNamespace(**settings)).repo_url is None
    for place, expected in {"README.md": "address", "api/liger.md": None}.items():
        page = SimpleNamespace(file=SimpleNamespace(src_uri=place), edit_url="address")
        hooks.on_page_markdown("", page)
        assert page.edit_url == expected


def test_every_exported_name_is_on_one_page_of_the_reference():
    reference = module("reference")
    text = "\n".join(reference.pages(ROOT).values())
    listed = re.findall(r"^::: (liger[\w.]*)$", text, re.M)
    packages = {module for _, module, _ in reference.PAGES.values()}
    names = {f"{package}.{name}" for package in packages for name in reference.exported(ROOT, package)}
    assert sorted(listed) == sorted(names | packages)


def test_the_reference_lists_every_schema():
    page = module("reference").pages(ROOT)["torch_ops.md"]
    listed = set(re.findall(r"#torch\.ops\.liger\.(\w+) ", page))
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("liger::")}
    assert listed == {name.removeprefix("liger::") for name in registered}


def documented_names():
    """Every public name with ``liger.`` before it: the registry's, and the names of the packages that it
    leaves out."""
    names = {f"liger.{name}" for name in public_callables.public_names()}
    for package in ("distributed", "transformers"):
        names |= {f"liger.{package}.{name}" for name in getattr(liger, package).__all__}
    reference = module("reference")
    for package in ("liger.trl", "liger.compat"):
        # Importing them needs TRL, or has effects.
        names |= {f"{package}.{name}" for name in reference.exported(ROOT, package)}
    return names


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if not (ROOT / "benchmarks" / "results").is_dir():
        pytest.skip("an sdist has no results")
    if importlib.util.find_spec("mkdocs") and importlib.util.find_spec("mkdocstrings_handlers"):
        python = sys.executable
    elif DOCS_PYTHON.is_file():
        python = str(DOCS_PYTHON)
    else:
        pytest.skip("needs MkDocs: make docs")
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"LIGER_SITE_SOURCES": str(folder / "sources"), "NO_MKDOCS_2_WARNING": "1"}
    for command in (
        [SCRIPTS / "stage.py", folder / "sources"],
        ["-m", "mkdocs", "build", "--strict", "--site-dir", folder / "html"],
    ):
        run = subprocess.run(
            [python, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )
        assert run.returncode == 0, run.stdout + run.stderr
    return folder / "html"


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site):
    anchors = set()
    for page in (site / "api").rglob("index.html"):
        anchors |= set(re.findall(r'id="(liger[\w.]*)"', page.read_text()))
    assert not sorted(documented_names() - anchors)


@pytest.mark.slow
def test_a_reference_entry_has_shapes_errors_and_source(site):
    page = (site / "api" / "liger_layers" / "index.html").read_text()
    entry = page.partition('id="liger.rms_norm"')[2].partition('id="liger.rms_norm_gated"')[0]
    for text in (
        "(..., H), float16",
        "Raises:",
        "RuntimeError",
        "<strong>Source:</strong>",
        "<strong>Example:</strong>",
        "Returns:",
    ):
        assert text in entry
    # A colon within the description of the results.
    assert "(q, k) rotated: new tensors" in (site / "api" / "liger_rope" / "index.html").read_text()
    for path in (site / "api").rglob("*.html"):
        assert not re.search(r":(func|class|meth|mod):", path.read_text())


@pytest.mark.slow
def test_searches_lead_to_guides_before_lab_notes(site):
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    boosts = {entry["location"]: entry.get("boost", 1) for entry in entries}
    assert not [place for place in boosts if place.startswith("benchmarks/")]
    lab = {boost for place, boost in boosts.items() if place.startswith("docs/lab/")}
    assert max(lab) < 1 < boosts["docs/guides/patching/"] == boosts["docs/recipes/trl/"]


@pytest.mark.slow
def test_addresses_within_the_site_exist(site):
    """Also those that MkDocs does not check: cross-references of the API reference and its own anchors."""
    pages = {path: path.read_text() for path in site.rglob("*.html") if path.name != "404.html"}
    anchors = {path: set(re.findall(r'\bid="?([^"\s>]+)', text)) for path, text in pages.items()}
    missing = set()
    for path, text in pages.items():
        for address in re.findall(r'\b(?:href|src)="([^"]*)"', text):
            if re.match(r"[a-z]+:", address):
                continue
            target, _, anchor = address.partition("#")
            file = (path.parent / target).resolve() if target else path
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file() or (anchor and file in anchors and anchor not in anchors[file]):
                missing.add((path.relative_to(site).as_posix(), address))
    assert not sorted(missing)
    assert len(pages) > 60


@pytest.mark.slow
def test_markdown_is_rendered(site):
    """A list that is text, a fence that is text, a link that is text."""
    for path in site.rglob("*.html"):
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", path.read_text(), flags=re.S)
        paragraphs = re.findall(r"<p>.*?</p>", text, re.S)
        raw = [p for p in paragraphs if re.search(r"\n(?:[-*]|\d+\.) |```|\]\(", p)]
        assert not raw, (path, raw)


@pytest.mark.slow
def test_pages_load_nothing_from_other_hosts(site):
    for path in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img)[^>]*\bsrc="(https?:[^"]*)"', path.read_text())
        loaded += re.findall(
            r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(https?:[^"]*)"', path.read_text()
        )
        assert not loaded, path
