# SPDX-License-Identifier: BSD-3-Clause
"""Names of kernels, and the table, of liger_bench.heads.kernels; the measurement needs a GPU."""

import pytest

from liger_bench.heads import kernels as bench

PREFIX = "void liger::sm90::gemm_kernel"
TIMES = [
    (f"{PREFIX}_pingpong<liger::lm_head::ExpEpilogue<__nv_bfloat16, ...> >(...)", 6000.0),
    (f"{PREFIX}<liger::lm_head::GradInputEpilogue<__nv_bfloat16, true, 224> >(...)", 9000.0),
    (f"{PREFIX}<liger::lm_head::GradWeightEpilogue<__nv_bfloat16, true, 224> >(...)", 12000.0),
    (f"{PREFIX}<liger::lm_head::GradWeightEpilogue<__nv_bfloat16, false, 256> >(...)", 3000.0),
    ("void liger::lm_head::gather<__nv_bfloat16>(...)", 300.0),
    ("Memset (Device)", 30.0),
]


def test_kernels_by_name():
    found = bench.kernel_ms(TIMES, 3)
    assert found == pytest.approx({"logits": 2.0, "grad_input": 3.0, "grad_weight": 5.0, "others": 0.11})


def test_table():
    theirs = {"logits": 2.0, "grad_input": 2.0, "grad_weight": 4.0}
    record = {"name": "tiny", "liger": bench.kernel_ms(TIMES, 3), "cublas": theirs}
    assert bench.markdown([record]).splitlines()[2:] == ["| tiny | 1.00 | 1.50 | 1.25 | 1.1% |"]
