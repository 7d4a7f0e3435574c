# SPDX-License-Identifier: BSD-3-Clause
"""liger_bench.expert_kernels on the CPU: the references and errors; a measurement needs a GPU."""

import importlib.machinery
import sys
from types import ModuleType

import pytest
import torch

from liger_bench import expert_kernels as bench
from liger_bench.harness import Options
from liger_bench.ops.experts import SHAPES, Shape, _inputs


def test_checks():
    """The default path serves the calls here."""
    records = bench.check([(13, 2, 3, 16, 24), (40, 1, 3, 8, 8)], "cpu")
    assert len(records) == 2 * len(bench.ROUTINGS) * len(bench.FORMS) * 2
    assert [record for record in records if record["wrong"]] == []


def test_a_wrong_result_is_found(monkeypatch):
    found = bench.results
    scales = {"kernels": 1.05, "default": 1}
    monkeypatch.setattr(bench, "results", lambda *a: [scales[a[-1]] * t for t in found(*a)])
    records = bench.check([(13, 2, 3, 16, 24)], "cpu")
    assert all("y" in record["wrong"] for record in records)


def groups(ends):
    return enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False))


class Interface(ModuleType):
    """The functions of quack.gemm_interface that the benchmark calls, in plain torch; ``last`` is the result
    of the last GEMM."""

    def __init__(self, name):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    @classmethod
    def gemm(cls, a, b, out, cu_seqlens_m=None, cu_seqlens_k=None, A_idx=None, tuned=True):
        for e, (begin, end) in groups(cu_seqlens_m if cu_seqlens_k is None else cu_seqlens_k):
            if cu_seqlens_k is None:
                rows = a[begin:end] if A_idx is None else a[A_idx[begin:end]]
                out[begin:end] = rows @ b[e]
            else:
                out[e] = a[:, A_idx[begin:end]] @ b[begin:end]
        cls.last = out

    @classmethod
    def gemm_gated_out(cls, a, b, preact, out, **options):
        cls.gemm(a, b, preact, **options)
        out.copy_(torch.nn.functional.silu(preact[:, ::2]) * preact[:, 1::2])

    @classmethod
    def gemm_dgated_out(cls, a, b, preact, dx, out, colvec_scale, colvec_reduce, **options):
        grad = torch.empty_like(out)
        cls.gemm(a, b, grad, **options)
        leaf = preact.detach().requires_grad_()
        product = torch.nn.functional.silu(leaf[:, ::2]) * leaf[:, 1::2] * colvec_scale[:, None]
        dx.copy_(torch.autograd.grad(product, leaf, grad)[0])
        out.copy_(product.detach())


@pytest.fixture
def quack(monkeypatch):
    monkeypatch.setitem(sys.modules, "quack", Interface("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", Interface("quack.gemm_interface"))


def test_the_grouped_gemms_of_quack(quack):
    """They compute what the op computes: the gradients of the matrices."""
    shape = Shape("mixtral", 4, 2, 16, 24)
    inputs = _inputs(Options("cpu", "self-test", dtype=torch.float32), shape, 14)()
    works = bench.working(bench.quack_works(shape, inputs))
    assert len(works) == 6
    leaves = [inputs[n].requires_grad_() for n in ("x", "weights", "gate_up_proj", "down_proj")]
    with bench.on_path("default"):
        y = bench._ours(shape, False, inputs)
    *_, of_gate_up, of_down = torch.autograd.grad(y, leaves, inputs["grad_y"])
    works["grad_down, quack"][0]()
    torch.testing.assert_close(Interface.last, of_down)
    works["grad_gate_up, quack"][0]()
    found = Interface.last.mT
    torch.testing.assert_close(torch.cat((found[:, ::2], found[:, 1::2]), 1), of_gate_up)


def test_what_quack_lacks(quack, monkeypatch, capsys):
    assert bench.quack_works(SHAPES[-1], {}) == {}

    def broken():
        raise RuntimeError("no kernel")

    assert bench.working({"down": (broken, 1), "sum": (int, 0)}) == {"sum": (int, 0)}
    assert "down: RuntimeError: no kernel" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "quack", None)
    assert bench.quack_works(SHAPES[0], {}) == {}
