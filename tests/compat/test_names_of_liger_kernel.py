# SPDX-License-Identifier: BSD-3-Clause
"""Every public name of liger-kernel can be imported, or the error names the page with the reason."""

import fnmatch
import importlib.util
import re
from pathlib import Path

import pytest

from liger.compat.names import MODULES, needed_packages

pytest.importorskip("transformers")

DOCUMENTATION = (Path(__file__).parents[2] / "docs" / "guides" / "compat.md").read_text()
NAMES = {
    module: names
    for line in Path(__file__).with_suffix(".txt").read_text().splitlines()
    if not line.startswith("#")
    for module, *names in [line.split()]
}
MESSAGE = re.compile(
    r"liger\.compat: liger_kernel\S* has no '\w+': docs/guides/compat\.md lists the names that are missing, with "
    "the reasons"
)


def exists(module, name):
    return name in MODULES.get(module, {}) or f"{module}.{name}" in MODULES


def is_missing(module, name=None):
    """True if a module or a name of it is missing. An optional package may be missing as well."""
    source = MODULES.get(module, {}).get(name, "")
    try:
        exec(f"import {module}" if name is None else f"from {module} import {name}", {})
    except ImportError as error:
        if source:
            package = next(p for p in needed_packages(source, name) if importlib.util.find_spec(p) is None)
            assert str(error) == (
                f"liger.compat: {module}.{name} needs {package}, which is not installed: "
                f'pip install "liger-ops[{package}]"'
            )
        else:
            assert MESSAGE.fullmatch(str(error))
        return not source
    return False


@pytest.mark.parametrize("module", NAMES)
def test_import(module):
    if is_missing(module):
        assert all(is_missing(module, name) for name in NAMES[module])
    else:
        found = importlib.import_module(module)
        for name in NAMES[module]:
            assert is_missing(module, name) is not exists(module, name)
            assert exists(module, name) or not hasattr(found, name)


def test_the_page_lists_what_is_missing():
    """Every row of its table matches a name that is missing, and every such name a row."""
    table = DOCUMENTATION.partition("## Names that are missing")[2]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    # What follows "except" is no pattern.
    patterns = [p for cell in cells for p in re.findall(r"`(.*?)`", cell.partition(", except")[0])]
    unused = set(patterns)
    for module, names in NAMES.items():
        for name in names:
            if exists(module, name):
                continue
            whole = f"{module}.{name}".removeprefix("liger_kernel.")
            parts = whole.split(".")
            candidates = [name, *(".".join(parts[: i + 1]) for i in range(len(parts)))]
            matched = {
                pattern
                for pattern in patterns
                if fnmatch.filter(candidates, re.sub(r"<\w+>", "*", pattern.replace("...", "*")))
            }
            assert matched, whole
            unused -= matched
    assert not unused
