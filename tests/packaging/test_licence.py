# SPDX-License-Identifier: BSD-3-Clause
"""Every source file names its licence, as SPDX wants it: tools read a file without the folder that it comes
from."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINE = "SPDX-License-Identifier: BSD-3-Clause"
SUFFIXES = {".cmake", ".cpp", ".cu", ".cuh", ".h", ".py", ".sh"}


def test_source_files_name_the_licence():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("no checkout: an sdist has no list of its files")
    sources = [ROOT / name for name in listed.stdout.splitlines() if Path(name).suffix in SUFFIXES]
    assert len(sources) > 500
    without = [
        str(path.relative_to(ROOT))
        for path in sources
        if path.is_file() and LINE not in "".join(path.read_text().splitlines()[:2])
    ]
    assert not without
