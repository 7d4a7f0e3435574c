# SPDX-License-Identifier: BSD-3-Clause
"""scripts/multi_gpu.py: pieces of tests and of E15, each of which goes on where the one before stopped."""

import json
import time

import pytest

import multi_gpu

PASSES = "def test_it():\n    pass\n"
FAILS = "def test_it():\n    assert False\n"
# Writes down its ranks, and that it ran.
NOTED = """
import os
from pathlib import Path

def test_it():
    with open(Path(__file__).with_suffix(".txt"), "a") as file:
        file.write(os.environ["LIGER_TEST_RANKS"])
"""
SLOW = "import time\n\ndef test_it():\n    time.sleep(600)\n"


def write(folder, **texts):
    paths = [folder / f"test_{name}.py" for name in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text)
    return paths


def test_files_with_an_outcome_do_not_run_again(tmp_path):
    noted, fails = paths = write(tmp_path, noted=NOTED, fails=FAILS)
    assert multi_gpu.run_tests(paths, 4, tmp_path) == {"test_noted.py": 0, "test_fails.py": 1}
    fails.write_text(PASSES)
    assert multi_gpu.run_tests(paths, 4, tmp_path) == {"test_noted.py": 0, "test_fails.py": 1}
    assert noted.with_suffix(".txt").read_text() == "4"
    # Another number of ranks has outcomes of its own.
    assert multi_gpu.run_tests(paths, 8, tmp_path) == {"test_noted.py": 0, "test_fails.py": 0}
    assert noted.with_suffix(".txt").read_text() == "48"
    assert json.loads((tmp_path / "tests.json").read_text())["4"]["test_fails.py"] == 1
    assert "assert False" in (tmp_path / "test_fails-4.log").read_text()


def test_a_file_that_is_cut_off_runs_again_unless_it_had_the_whole_piece(tmp_path, monkeypatch):
    slow, passes = write(tmp_path, slow=SLOW, passes=PASSES)
    begin = time.monotonic()
    found = multi_gpu.run_tests([slow, passes], 4, tmp_path, begin + 0.5)
    assert found == {"test_slow.py": multi_gpu.TIMEOUT} and time.monotonic() - begin < 300
    (tmp_path / "tests.json").unlink()

    def cut_off(path, ranks, log, deadline):
        log.touch()
        return None if path == slow else 0

    monkeypatch.setattr(multi_gpu, "run_file", cut_off)
    assert multi_gpu.run_tests([passes, slow], 4, tmp_path) == {"test_passes.py": 0}
    assert multi_gpu.run_tests([passes, slow], 4, tmp_path)["test_slow.py"] == multi_gpu.TIMEOUT


@pytest.mark.slow
def test_the_experiment_follows_the_tests(tmp_path, monkeypatch, capfd):
    paths = write(tmp_path, passes=PASSES)
    monkeypatch.setattr(multi_gpu, "files", lambda: paths)
    arguments = ["--ranks", "4", "--tiny", "--out", str(tmp_path), "--minutes"]
    assert multi_gpu.main([*arguments, "0"]) == 1  # a piece of no time: the first file has had all of it
    (tmp_path / "tests.json").unlink()
    assert multi_gpu.main([*arguments, "1"]) == 0
    said = capfd.readouterr().out
    assert "tests on 4 ranks: 0 of 1 files left, failed: none" in said and "E15: " in said
    assert json.loads((tmp_path / "E15-tiny.json").read_text())["cells"]


def test_all_files_are_found():
    names = [path.name for path in multi_gpu.files()]
    assert len(names) == len(set(names)) > 25 and "test_fsdp2.py" in names
