"""Names of kernels, and the table, of liger_bench.bench_head_kernels; the measurement needs a GPU."""

import pytest

from liger_bench import bench_head_kernels as bench

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


def test_chosen_heads():
    """Without bias, softcap and smoothing, in bfloat16, of aligned vocabularies."""
    names = [head.name for head in bench.chosen([])]
    assert len(names) == len(set(names)) >= 10
    assert not any(
        word in name for name in names for word in ("float16", "bias", "softcap", "smoothing", "budget")
    )
    assert all(head.vocabulary % 8 == 0 for head in bench.chosen([]))
    assert [head.model for head in bench.chosen(["gemma-3"])] == ["gemma-3-270m", "gemma-3-1b"]


@pytest.mark.parametrize(
    ("arguments", "said"), [(["none such"], "no head"), (["--rounds", "0"], "expected at least 1")]
)
def test_wrong_arguments(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench.main([]) == 2 and "capability 9.0" in capsys.readouterr().err
