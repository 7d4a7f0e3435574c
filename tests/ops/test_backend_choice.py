# SPDX-License-Identifier: BSD-3-Clause
"""What each backend can serve, by the capabilities of the devices and what was built, and what auto makes of
it."""

import importlib.metadata
import importlib.util

import pytest
import torch
from cases import compiled

from liger._core.op import backend
from liger._core.op.backend import BACKENDS, BackendUnavailable, code_for, preference, supported
from liger._core.op.registration import FAMILIES
from liger._core.runtime import load

RMS_NORM = FAMILIES["rms_norm"]


def resolved(family, requested):
    return backend._resolve(family, backend.Request(requested, {}))


pytestmark = pytest.mark.usefixtures("backends_restored")


# --- what is possible: pure functions of capabilities -------------------------------------------------------


@pytest.fixture
def cuda_machine(monkeypatch):
    """As if torch had CUDA and the kernels were built."""
    monkeypatch.setattr(load, "CUDA_LOADED", True)
    monkeypatch.setattr(load, "CUDA_REASON", "compiled CUDA kernels")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(backend, "triton_interpreted", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(backend, "_triton_version", lambda: "3.6.0")
    monkeypatch.setattr(backend, "_capabilities", [])
    monkeypatch.setattr(backend, "_built_architectures", lambda: EVERYWHERE)


EVERYWHERE = ("80", "86", "89", "90a", "100", "120", "120+PTX")


@pytest.mark.parametrize("name", ["cuda", "triton"])
@pytest.mark.parametrize(
    ("capabilities", "possible"),
    [
        ([], True),
        ([(7, 5)], False),
        ([(8, 0)], True),
        ([(8, 9)], True),
        ([(9, 0)], True),
        ([(12, 0)], True),
        ([(9, 0), (7, 0)], False),
    ],
    ids=str,
)
def test_supported(cuda_machine, name, capabilities, possible):
    answer, why = supported(name, capabilities)
    assert answer is possible
    if not possible:
        major, minor = capabilities[-1]
        assert why == f"a device has compute capability {major}.{minor}, the kernels need 8.0"


@pytest.mark.parametrize(
    ("architectures", "capability", "code"),
    [
        (EVERYWHERE, (8, 0), "binary"),
        (EVERYWHERE, (8, 7), "binary"),  # of 8.6
        (EVERYWHERE, (9, 0), "binary"),
        (EVERYWHERE, (10, 3), "binary"),
        (EVERYWHERE, (11, 0), None),  # the PTX is for 12.0 and later
        (EVERYWHERE, (12, 1), "binary"),
        (EVERYWHERE, (13, 0), "ptx"),
        (("90a",), (9, 0), "binary"),
        (("90a",), (8, 0), None),
        (("90a",), (10, 0), None),
        (("100a",), (10, 3), None),
        (("100f",), (10, 3), "binary"),
        (("89", "89+PTX"), (8, 6), None),
        (("80", "80+PTX"), (9, 0), "ptx"),
        (("80+PTX", "90"), (9, 0), "binary"),
        ((), (9, 0), None),
    ],
    ids=str,
)
def test_code_for(architectures, capability, code):
    assert code_for(capability, architectures) == code


def test_what_was_built_is_read_from_the_package():
    found = backend._built_architectures()
    assert bool(found) == (load._library("liger_cuda") is not None)
    for capability in ((8, 0), (9, 0), (12, 0)):
        assert code_for(capability, found) in ("binary", "ptx", None)


def test_cuda_needs_code_for_every_device(cuda_machine, monkeypatch):
    monkeypatch.setattr(backend, "_built_architectures", lambda: ("90a",))
    assert supported("cuda", [(9, 0)])[0]
    expected = (False, "a device has compute capability 8.0, the kernels were built for 90a")
    assert supported("cuda", [(9, 0), (8, 0)]) == expected
    assert supported("triton", [(9, 0), (8, 0)])[0]
    # A build for 8.0 alone, as LIGER_CUDA_ARCHS=80 makes it, serves later devices, and says how.
    monkeypatch.setattr(backend, "_built_architectures", lambda: ("80", "80+PTX"))
    assert supported("cuda", [(8, 0)]) == (True, "compiled CUDA kernels")
    through = "compiled CUDA kernels; through PTX on compute capability 9.0"
    assert supported("cuda", [(9, 0), (9, 0)]) == (True, through)
    # Unknown: the kernels are there, and the ops use them.
    monkeypatch.setattr(backend, "_built_architectures", lambda: ())
    assert supported("cuda", [(8, 0)])[0]


# --- what auto prefers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capabilities", "order", "words"),
    [
        ([], BACKENDS, ""),
        ([(8, 9)], BACKENDS, ""),
        ([(9, 0), (8, 9)], BACKENDS, ""),
        ([(9, 0), (13, 0)], ("triton", "cuda", "torch"), "no binary of the CUDA kernels for compute capability 13.0"),
        ([(10, 0), (11, 0)], ("triton", "cuda", "torch"), "no binary of the CUDA kernels for compute capability 11.0"),
    ],
    ids=str,
)  # fmt: skip
def test_preference(capabilities, order, words):
    assert preference(capabilities, EVERYWHERE) == (order, words)


def test_auto_takes_the_compiled_kernels(cuda_machine, monkeypatch):
    monkeypatch.setattr(backend, "_capabilities", [(9, 0)])
    assert resolved(RMS_NORM, "auto") == ("cuda", "auto: compiled CUDA kernels")
    assert resolved(RMS_NORM, "cuda") == ("cuda", "requested by LIGER_BACKEND; compiled CUDA kernels")


def test_auto_takes_triton_where_no_binary_fits(cuda_machine, monkeypatch):
    monkeypatch.setattr(backend, "_capabilities", [(13, 0)])
    why = "no binary of the CUDA kernels for compute capability 13.0"
    assert resolved(RMS_NORM, "auto") == ("triton", f"auto: triton 3.6.0; {why}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    chosen, why = resolved(RMS_NORM, "auto")
    assert chosen == "cuda" and why.endswith("not triton: triton is not installed")
    # Neither binary nor PTX.
    monkeypatch.setattr(backend, "_capabilities", [(11, 0)])
    assert resolved(RMS_NORM, "auto")[0] == "torch"


def test_supported_everywhere_and_nowhere(cuda_machine):
    assert supported("torch", [(5, 0)]) == (True, "plain torch runs everywhere")
    with pytest.raises(ValueError, match="unknown backend 'fast', expected one of auto, cuda, triton, torch"):
        supported("fast", [])


def test_tests_of_compiled_kernels_skip_without_them(monkeypatch):
    monkeypatch.setattr(load, "CUDA_LOADED", False)
    monkeypatch.setattr(load, "CUDA_REASON", "no nvcc")
    with pytest.raises(pytest.skip.Exception, match="no nvcc"), compiled():
        pass


def test_triton_needs_its_package_and_a_device(cuda_machine, monkeypatch):
    assert supported("triton", [(9, 0)]) == (True, "triton 3.6.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert supported("triton", []) == (False, "this torch has no CUDA and TRITON_INTERPRET is not 1")
    monkeypatch.setattr(backend, "triton_interpreted", lambda: True)
    assert supported("triton", []) == (True, "Triton's interpreter (TRITON_INTERPRET=1)")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert supported("triton", []) == (False, "triton is not installed")


def test_auto_takes_the_first_that_is_possible(cuda_machine, monkeypatch):
    assert resolved(RMS_NORM, "auto") == ("cuda", "auto: compiled CUDA kernels")
    monkeypatch.setattr(load, "CUDA_LOADED", False)
    monkeypatch.setattr(load, "CUDA_REASON", "no nvcc")
    assert resolved(RMS_NORM, "auto") == ("triton", "auto: triton 3.6.0; not cuda: no nvcc")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert resolved(RMS_NORM, "auto") == (
        "torch",
        "auto: plain torch runs everywhere; not cuda: no nvcc; not triton: triton is not installed",
    )


def test_auto_falls_back_on_an_old_device_and_an_explicit_choice_does_not(cuda_machine, monkeypatch):
    monkeypatch.setattr(backend, "_capabilities", [(7, 5)])
    chosen, why = resolved(RMS_NORM, "auto")
    assert chosen == "torch" and "not cuda: a device has compute capability 7.5" in why
    for name in ("cuda", "triton"):
        with pytest.raises(
            BackendUnavailable, match=f"'{name}' was requested for rms_norm, but a device has"
        ):
            resolved(RMS_NORM, name)
