# SPDX-License-Identifier: BSD-3-Clause
"""Choosing backends: LIGER_BACKEND, use_backend, the report, and what importing liger costs."""

import importlib.util
import os
import subprocess
import sys

import forked_python
import pytest
import torch

import liger
from liger._core.op import backend
from liger._core.op.backend import BackendUnavailable, parse
from liger._core.op.registration import FAMILIES
from liger._core.runtime import load

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


pytestmark = pytest.mark.usefixtures("backends_restored")


def python(*arguments, run=forked_python.python, **environment):
    """Runs a new interpreter; (exit status, stdout, stderr)."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LIGER_", "TRITON_"))}
    done = run(*arguments, environment={**clean, **environment})
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def output(code, **more):
    status, out, err = python("-c", code, **more)
    assert status == 0, err
    return out


def last_line_of_failure(code, **environment):
    status, _, err = python("-c", code, **environment)
    assert status == 1, "the import should have raised"
    return err.splitlines()[-1]


# --- LIGER_BACKEND ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("auto", {})),
        ("auto", ("auto", {})),
        ("triton", ("triton", {})),
        ("triton,rms_norm=cuda", ("triton", {"rms_norm": "cuda"})),
        ("rms_norm=torch", ("auto", {"rms_norm": "torch"})),
        (" torch , rope = auto ,swiglu=triton, ", ("torch", {"rope": "auto", "swiglu": "triton"})),
    ],
)
def test_parse(text, expected):
    assert parse(text)[:2] == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cudnn", "unknown backend 'cudnn' in 'cudnn', expected auto, cuda, triton, torch"),
        ("CUDA", "unknown backend 'CUDA'"),
        ("rms_norm=fast", "unknown backend 'fast'"),
        ("rms_norm=", "unknown backend ''"),
        (
            "torch,batch_norm=torch",
            "unknown op 'batch_norm' in 'torch,batch_norm=torch', expected one of rms_norm, ",
        ),
        ("=torch", "unknown op ''"),
        ("torch,triton", "'triton' in 'torch,triton' must come first or be written op=triton"),
        ("rms_norm=torch,triton", "'triton' in 'rms_norm=torch,triton' must come first"),
        ("rms_norm_backward=torch", "unknown op 'rms_norm_backward'"),
        (
            "rms_norm=cuda,rms_norm=torch",
            "two backends for rms_norm in 'rms_norm=cuda,rms_norm=torch', 'cuda' and 'torch', expected one",
        ),
        ("rope=torch, swiglu=torch, rope=torch", "two backends for rope"),
    ],
)
def test_parse_refuses(text, words):
    with pytest.raises(ValueError, match=r"^LIGER_BACKEND: ") as caught:
        parse(text)
    assert words in str(caught.value)


def test_an_explicit_backend_that_is_missing_raises_at_import():
    hidden = "import sys; sys.modules['triton'] = None; import liger"
    line = last_line_of_failure(hidden, LIGER_BACKEND="torch,rope=triton", TRITON_INTERPRET="1")
    assert line == (
        "liger.BackendUnavailable: LIGER_BACKEND: backend 'triton' was requested for rope, but triton is not "
        'installed: pip install "liger-ops[triton]"'
    )


@pytest.mark.skipif(load.CUDA_LOADED, reason="this machine has the compiled kernels")
def test_the_cuda_backend_raises_where_it_is_not_built():
    line = last_line_of_failure("import liger", LIGER_BACKEND="cuda")
    assert line.endswith(f"backend 'cuda' was requested for {next(iter(FAMILIES))}, but {load.CUDA_REASON}")


@pytest.mark.skipif(torch.version.cuda is not None, reason="Triton can serve this torch")
@needs_triton
def test_the_triton_backend_raises_without_a_device_for_it():
    line = last_line_of_failure("import liger", LIGER_BACKEND="triton")
    assert line.endswith("but this torch has no CUDA and TRITON_INTERPRET is not 1")


def test_one_op_can_differ_from_the_rest():
    code = "import liger; print({n: r['backend'] for n, r in liger.backend_report().items()})"
    report = eval(output(code, LIGER_BACKEND="torch"))
    assert set(report.values()) == {"torch"}
    if importlib.util.find_spec("triton"):
        report = eval(output(code, LIGER_BACKEND="torch,rms_norm=triton", TRITON_INTERPRET="1"))
        assert {name for name, chosen in report.items() if chosen == "triton"} == {"rms_norm"}


# --- use_backend and set_backend ----------------------------------------------------------------------------


def test_use_backend_restores():
    before = backend._requested
    with liger.use_backend("torch"):
        inside = liger.backend_report()
        with liger.use_backend("auto", rms_norm="torch"):
            assert liger.backend_report()["rms_norm"]["reason"].startswith("requested by use_backend; ")
        assert liger.backend_report() == inside
        assert all(r == {"backend": "torch", "reason": inside["rope"]["reason"]} for r in inside.values())
    assert backend._requested == before


def test_use_backend_restores_after_an_error():
    with pytest.raises(KeyError), liger.use_backend("torch"):
        raise KeyError


def test_set_backend_takes_a_whole_string():
    before = backend._requested
    try:
        liger.set_backend("torch,rope=auto", swiglu="torch")
        assert backend._requested[:2] == ("torch", {"rope": "auto", "swiglu": "torch"})
    finally:
        liger.set_backend(before[0], **before[1])


def test_a_refused_choice_changes_nothing(monkeypatch):
    before, requested = liger.backend_report(), backend._requested
    monkeypatch.setattr(load, "CUDA_LOADED", False)
    monkeypatch.setattr(load, "CUDA_REASON", "the kernels were not built")
    for given, error, words in (
        (
            ("torch", {"swiglu": "cuda"}),
            BackendUnavailable,
            "backend 'cuda' was requested for swiglu, but the kernels",
        ),
        (("torch", {"batch_norm": "torch"}), ValueError, "unknown op 'batch_norm'"),
        (("fast", {}), ValueError, "unknown backend 'fast'"),
        (("rope=torch", {"rope": "auto"}), ValueError, "two backends for rope"),
        (("rope=torch,torch", {}), ValueError, "'torch' in 'rope=torch,torch' must come first"),
        ((3, {}), TypeError, "default is 3, expected a string"),
        (("torch", {"rope": None}), TypeError, "rope is None, expected a string"),
    ):
        default, per_op = given
        with pytest.raises(error, match=f"^set_backend: {words}"):
            liger.set_backend(default, **per_op)
        with pytest.raises(error, match=f"^use_backend: {words}"), liger.use_backend(default, **per_op):
            raise AssertionError("not reached")
    assert liger.backend_report() == before and backend._requested == requested


FOLLOW = """
import torch, liger
from torch._dynamo.backends.registry import lookup_backend
import liger.triton_kernels.swiglu as launchers

calls = []
def counted(launcher):
    def call(*arguments):
        calls.append(launcher.__name__)
        return launcher(*arguments)
    return call
launchers.swiglu, launchers.swiglu_backward = counted(launchers.swiglu), counted(launchers.swiglu_backward)

class Product(torch.nn.Module):
    def forward(self, gate, up):
        return torch.ops.liger.swiglu(gate, up)

compilations = []
def count(graph, inputs):
    compilations.append(graph)
    return lookup_backend("aot_eager")(graph, inputs)

leaves = [torch.randn(4, 64, requires_grad=True) for _ in range(2)]
functions = [liger.swiglu, torch.compile(liger.swiglu, fullgraph=True, backend=count), torch.jit.script(Product())]
def run():
    out = []
    for function in functions:
        y = function(*leaves)
        out += [y, *torch.autograd.grad(y.square().sum(), leaves)]
    return out

liger.set_backend("torch")
first = run()
assert not calls
with liger.use_backend("torch", swiglu="triton"):
    second = run()
assert calls == 3 * ["swiglu", "swiglu_backward"], calls
third = run()
assert len(calls) == 6 and len(compilations) == 1
for a, b, c in zip(first, second, third, strict=True):
    torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    assert torch.equal(a, c)
"""


@needs_triton
def test_eager_compiled_and_scripted_functions_follow_the_switch(tmp_path):
    program = tmp_path / "follow.py"  # TorchScript reads the source of what it compiles
    program.write_text(FOLLOW)
    status, _, err = python(program, TRITON_INTERPRET="1")
    assert status == 0, err
    assert "overrid" not in err.lower(), "torch warned that a kernel was replaced"


# --- the report and the import ------------------------------------------------------------------------------


def test_report_names_every_family_and_says_why():
    report = liger.backend_report()
    assert list(report) == list(FAMILIES)
    for entry in report.values():
        assert entry["backend"] in backend.BACKENDS and entry["reason"]
    if torch.version.cuda is None and backend._requested[:2] == ("auto", {}):
        assert set(map(tuple, (e.values() for e in report.values()))) == {
            ("torch", "auto: this torch has no CUDA")
        }


CHANGED = """
import os, warnings, liger
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(liger.backend_report()["rope"]["reason"])
    os.environ |= {"LIGER_BACKEND": "auto", "LIGER_AUTOGRAD": "python", "TRITON_INTERPRET": "", "LIGER_LOG": "plan"}
    liger.backend_report()
print(*(w.message for w in caught), sep="\\n")
"""


def test_report_names_the_variable_and_warns_of_later_changes():
    lines = output(CHANGED, LIGER_BACKEND="torch", LIGER_AUTOGRAD="", TRITON_INTERPRET="").splitlines()
    assert lines[0] == (
        "requested by LIGER_BACKEND=torch, read when liger was imported; plain torch runs everywhere"
    )
    assert len(lines) == 3
    for line, words in zip(
        lines[1:],
        (
            "LIGER_BACKEND is 'auto', and was 'torch' when liger was imported",
            "LIGER_AUTOGRAD is 'python', and was not set when liger was imported",
        ),
        strict=True,
    ):
        assert line.startswith(f"liger.backend_report: {words}")


IMPORT = """
import sys, time
for name in ("triton", "transformers", "numpy", "matplotlib"):
    sys.modules[name] = None  # an import of it would raise
import torch
before = set(sys.modules)
start = time.process_time()
import liger
print(time.process_time() - start)
heavy = {"torch._dynamo", "torch._inductor", "sympy", "liger.nn", "liger.transformers", "liger.triton_kernels"}
assert not heavy & (set(sys.modules) - before)
assert not torch.cuda.is_initialized()
y = liger.rms_norm(torch.ones(2, 8))
assert torch.allclose(y, torch.ones(2, 8))
"""


def interpreter(*arguments, environment):
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


def test_import_is_quick_and_needs_torch_alone():
    # Seconds of CPU time; up to three times, since other work on the machine only ever adds.
    assert any(float(output(IMPORT, run=interpreter)) < 0.3 for _ in range(3))


def test_log_of_dispatch():
    """LIGER_LOG=dispatch: each choice of a backend with its reason, on stderr."""
    code = "import liger; liger.set_backend('torch', rms_norm='auto')"
    status, _, err = python("-c", code, LIGER_LOG="plan,dispatch")
    assert status == 0, err
    lines = [line for line in err.splitlines() if line.startswith("liger: dispatch ")]
    assert "liger: dispatch softmax -> torch (requested by set_backend; plain torch runs everywhere)" in lines
    assert any(line.startswith("liger: dispatch rms_norm -> ") and "(auto: " in line for line in lines)
