# SPDX-License-Identifier: BSD-3-Clause
"""The liger command: what info says, and what demo concludes."""

import importlib
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked_python import python
from public_callables import CASES, arguments, differentiable_outputs, weighted_sum

import liger
import liger_cli as cli
from liger._core.op.registration import FAMILIES
from liger._core.runtime import load
from liger._core.runtime.build_info import build_info
from liger._core.runtime.environment import triton_interpreted
from liger.cli import _demo_data, _demo_report, demo, info
from liger_cli.commands import COMMANDS
from liger_cli.demo_sizes import SIZES

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)


# --- info ---------------------------------------------------------------------------------------------------


def test_info_as_json(capsys, monkeypatch):
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "64M")
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert found["ops"].keys() == liger.backend_report().keys()
    assert found["environment"]["LIGER_MEMORY_BUDGET"] == "64M"
    assert len(found["devices"]) == torch.cuda.device_count()
    assert {name: row and row["op"] for name, row in found["functions"].items()} == info.FUNCTIONS
    assert found["build"]["version"] == liger.__version__
    assert found["liger._C"] == {"loaded": load.C is not None, "reason": load.C_REASON}


def test_info_as_text(capsys, monkeypatch):
    monkeypatch.delenv("LIGER_CHECK_TARGETS", raising=False)
    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    ops = json_info(capsys)["ops"]
    reasons = {row["reason"] for row in ops.values()}
    numbers = {}
    for reason in reasons:
        (line,) = (line for line in lines if reason in line)
        numbers[reason] = line.split()[0]
    for name, op in info.FUNCTIONS.items():
        (line,) = (line for line in lines if line.split()[:1] == [name])
        if op is not None:
            assert line.split()[1:3] == [ops[op]["backend"], numbers[ops[op]["reason"]]]
    assert any(line.split() == ["LIGER_CHECK_TARGETS", "not", "set:", "0"] for line in lines)
    assert f"  liger._C      {load.C_REASON}" in lines


def test_info_says_which_variables_are_invalid(capsys, monkeypatch):
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "lots")
    monkeypatch.setenv("LIGER_WGMMA", "0")
    monkeypatch.setenv("LIGER_COMPAT_OVERRIDE", "yes")
    assert cli.main(["info"]) == 0
    lines = {
        line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  LIGER")
    }
    assert (
        "lots (invalid: LIGER_MEMORY_BUDGET: expected a positive number of bytes"
        in lines["LIGER_MEMORY_BUDGET"]
    )
    assert "invalid" not in lines["LIGER_WGMMA"]
    assert "yes (invalid: LIGER_COMPAT_OVERRIDE: expected 0 or 1" in lines["LIGER_COMPAT_OVERRIDE"]


def json_info(capsys):
    assert cli.main(["info", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_public_function_has_the_op_that_it_calls():
    cases = [name for name, case in CASES.items() if "." not in case.public]
    assert info.FUNCTIONS.keys() == {CASES[name].public for name in cases}
    family_of = {op: name for name, family in FAMILIES.items() for op in family.torch_kernels}
    called = defaultdict(set)
    for name in cases:
        given = arguments(name)
        with torch.profiler.profile() as profile:
            torch.autograd.grad(
                weighted_sum(differentiable_outputs(name, given)),
                [given[key] for key in CASES[name].differentiable],
            )
        names = [event.key.removeprefix("liger::") for event in profile.key_averages()]
        called[CASES[name].public].update(map(family_of.get, names))
    assert {name: op for name, op in info.FUNCTIONS.items() if op not in called[name]} == {}


# --- help ---------------------------------------------------------------------------------------------------

HELP = """
import sys
start = __import__("time").process_time()
import liger_cli
try:
    code = liger_cli.main(sys.argv[1:])
except SystemExit as end:
    code = end.code
assert not {"torch", "liger"} & set(sys.modules)
print(__import__("time").process_time() - start, code)
"""


@pytest.mark.parametrize("command", ["", "--version", "-V", "--help", *COMMANDS])
def test_help_is_quick(command, tmp_path):
    given = command.split() if command in ("", "--version", "-V", "--help") else [command, "--help"]
    # A package that is no editable install.
    shutil.copytree(Path(cli.__file__).parent, tmp_path / "liger_cli")
    done = subprocess.run(
        [sys.executable, "-c", HELP, *given],
        cwd=tmp_path, env=os.environ | {"LIGER_BACKEND": "no such backend"}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    *text, end = done.stdout.splitlines()
    if "ersion" in command or command == "-V":
        assert text == [f"liger {liger.__version__}"]
    else:
        assert text[0].startswith(f"usage: liger {command.removeprefix('--help')}".rstrip())
    seconds, code = end.split()
    assert code == "0" and float(seconds) < 0.3


def test_unknown_commands(capsys):
    for command, words in (("ifno", "did you mean 'info'?"), ("x", "expected one of info, plan, demo")):
        with pytest.raises(SystemExit) as end:
            cli.main([command])
        assert end.value.code == 2
        assert f"liger: error: unknown command '{command}', {words}" in capsys.readouterr().err


# --- variables ----------------------------------------------------------------------------------------------

# Variables that are read when liger is imported: an invalid value, and what the command says.
INVALID = {
    "LIGER_BACKEND": ("cudaa", "unknown backend 'cudaa' in 'cudaa', expected auto, cuda, triton, torch"),
    "LIGER_AUTOGRAD": ("c++", "expected auto or python, got 'c++'"),
    "LIGER_CHECK_TARGETS": ("yes", "expected 0 or 1, got 'yes'"),
    "LIGER_LOG": ("plans", "unknown topic 'plans', expected one of dispatch, plan"),
    "TRITON_INTERPRET": ("true", "expected 0 or 1, got 'true'"),
}


@pytest.mark.parametrize("variable", INVALID)
def test_an_invalid_variable_ends_the_command_in_one_line(variable):
    value, words = INVALID[variable]
    script = Path(sysconfig.get_path("scripts"), "liger")
    for command in (["-m", "liger_cli"], *([[script]] if script.exists() else [])):
        done = python(*command, "info", environment=os.environ | {variable: value})
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"liger: {variable}: {words}\n"
    # In a program it is an exception.
    done = python("-c", "import liger", environment=os.environ | {variable: value})
    assert done.returncode == 1 and done.stderr.endswith(f"ValueError: {variable}: {words}\n")


def test_a_backend_that_cannot_serve_an_op_ends_the_command_in_one_line():
    code = "import sys; sys.modules['triton'] = None; import liger_cli; sys.exit(liger_cli.main(['info']))"
    done = python("-c", code, environment=os.environ | {"LIGER_BACKEND": "auto,rope=triton"})
    words = "LIGER_BACKEND: backend 'triton' was requested for rope, but "
    assert done.returncode == 2 and done.stderr.startswith(f"liger: {words}")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(
    torch.cuda.is_available() or triton_interpreted(), reason="about plain torch on machines without a GPU"
)
def test_info_names_what_serves_an_op_without_a_gpu(capsys):
    assert cli.main(["info", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["ops"]["rms_norm"]
    with torch.profiler.profile() as profile:
        liger.rms_norm(torch.ones(2, 4))
    called = {event.key for event in profile.key_averages()}
    assert "liger::rms_norm" in called
    assert any(key.startswith("aten::") for key in called) and row["backend"] == "torch"


def test_a_reader_that_closes_the_pipe_is_no_error():
    info = subprocess.Popen(
        [sys.executable, "-m", "liger_cli", "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    info.stdout.close()
    assert info.stderr.read() == ""
    assert info.wait() == 1


def test_info_says_how_the_libraries_were_built(capsys):
    build = build_info()
    assert build.keys() == {"version", "torch", "cuda", "cuda_archs", "compiler"}
    assert re.fullmatch(r"2\.\d+\..+", build["torch"]) and build["compiler"]
    assert bool(build["cuda"]) == bool(build["cuda_archs"])
    assert bool(build["cuda"]) == (load._library("liger_cuda") is not None)
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert f"torch {build['torch']}, g++ {build['compiler']}; runs on torch 2.10 and later" in out
    kernels = f"CUDA {build['cuda']} kernels for {build['cuda_archs']}"
    assert (kernels if build["cuda"] else "CPU and Triton build, without CUDA kernels") in out


# --- demo ---------------------------------------------------------------------------------------------------


def runs(difference, rounding):
    plain = [9.0, 8.0, 7.0, 6.0]
    rest = {"seconds": [5.0, 1.0, 1.0, 0.5], "peak_memory": 1000, "memory_exact": True, "parameters": 10}
    return {
        "unpatched": {"losses": plain, **rest},
        "liger": {"losses": [7.0 + difference if x == 7.0 else x for x in plain], **rest, "peak_memory": 250},
        "nudged": {"losses": [x + rounding for x in plain], **rest},
    }


@pytest.mark.parametrize(
    ("difference", "rounding", "agree"),
    [
        (0.0, 0.0, True),
        (0.04, 0.0101, True),
        (-0.05, 0.01, False),
        (1e-3, 0.0, False),
        (math.nan, 1.0, False),
    ],
)
def test_demo_judges_losses_by_what_rounding_does(difference, rounding, agree):
    found = _demo_report.compare(runs(difference, rounding), SIZES["tiny"])
    assert found["agree"] is agree
    assert found["memory_ratio"] == 4
    assert found["tokens_per_second"]["liger"] == SIZES["tiny"].tokens / 0.5


def test_demo_text_and_picture(tmp_path):
    pytest.importorskip("matplotlib")
    results = {"size": SIZES["tiny"].as_dict(), "device": "CPU, 2 threads", "runs": runs(0.5, 0.01)}
    results["comparison"] = _demo_report.compare(results["runs"], SIZES["tiny"])
    text = _demo_report.text(results)
    assert "3      7.000000    7.500000    +5.0e-01" in text
    assert "The losses DISAGREE: largest difference 5.0e-01" in text
    assert "4.00 x less" in text
    note = "Tokens/s on a CPU that has other work to do are noise"
    assert note in text and note not in _demo_report.text(results | {"device": "NVIDIA H100"})
    _demo_report.picture(results, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@needs_transformers
@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--quick", "--steps", "-3"], "argument --steps: expected an integer above 0, got '-3'"),
        (["--quick", "--steps", "1"], "--steps is 1, expected at least 2"),
        (["--quick", "--size", "cpu"], "not allowed with argument --quick"),
        (["--quick", "--output", __file__], f"--output {__file__}: File exists"),
    ],
)
def test_arguments_of_demo_are_refused_before_the_work(capsys, arguments, words):
    try:
        assert cli.main(["demo", *arguments]) == 2
    except SystemExit as end:
        assert end.code == 2
    assert words in capsys.readouterr().err


def test_demo_names_the_extra_when_something_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo", "--quick"]) == 2
    assert 'liger demo needs transformers and tqdm: pip install "liger-ops[demo]"' in capsys.readouterr().err


@needs_transformers
def test_demo_text_is_the_same_every_time():
    size = replace(SIZES["tiny"], text_bytes=1 << 16, vocab=512, steps=3)
    (batches, vocabulary), (again, _) = _demo_data.token_batches(size), _demo_data.token_batches(size)
    assert batches.shape == (3, size.batch, size.sequence)
    assert torch.equal(batches, again)
    assert vocabulary <= 512 and 256 <= batches.max() < 512


@needs_transformers
def test_demo_reports_a_failed_run(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(SIZES, "tiny", replace(SIZES["tiny"], text_bytes=1 << 16, heads=5))
    assert cli.main(["demo", "--quick", "--output", str(tmp_path / "out")]) == 1
    assert "the unpatched run ended with exit code 1 after 0 steps" in capsys.readouterr().err
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.slow
@needs_transformers
def test_demo(tmp_path, capsys):
    assert cli.main(["demo", "--quick", "--steps", "4", "--output", str(tmp_path)]) == 0
    assert "The losses agree" in capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["runs"]) == set(demo.RUNS)
    for run in results["runs"].values():
        assert len(run["losses"]) == 4 and run["losses"][-1] < run["losses"][0]
    assert results["comparison"]["memory_ratio"] > 1
