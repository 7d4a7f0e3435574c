# SPDX-License-Identifier: BSD-3-Clause
"""Helpers that other projects import: devices, versions, Triton settings; metrics' output classes."""

import operator

import pytest
import torch


def test_versions_and_devices(monkeypatch):
    from liger_kernel import utils
    from liger_kernel.ops.utils import compare_version

    assert utils.infer_device() == ("cuda" if torch.cuda.is_available() else utils.infer_device())
    assert compare_version("torch", operator.ge, "2.0.0") and not compare_version(
        "torch", operator.ge, "99.0"
    )
    assert not compare_version("no_such_package", operator.ge, "0.1")
    pytest.importorskip("transformers")
    assert (
        utils.transformers_version_dispatch("4.0.0", lambda: "old", lambda x: x, after_args=("new",)) == "new"
    )
    assert (
        utils.transformers_version_dispatch("99.0", lambda x: x, lambda: "new", before_kwargs={"x": 1}) == 1
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    utils.infer_device_arch.cache_clear()
    assert utils.infer_device() == "cuda" and utils.infer_device_arch() == "hopper"
    utils.infer_device_arch.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="the device is cpu, expected cuda or xpu"):
        utils.get_total_gpu_memory()
    assert utils.infer_comm_backend() in ("nccl", "xccl", "mpi", "gloo")


@pytest.mark.parametrize(
    "n, expected", [(1, (1, 4)), (1000, (1024, 4)), (2048, (2048, 8)), (65536, (65536, 32))]
)
def test_settings_of_triton_kernels(n, expected):
    from liger_kernel.ops.utils import calculate_settings

    assert calculate_settings(n) == expected


def test_a_row_that_is_too_long_for_one_block():
    from liger_kernel.ops.utils import calculate_settings

    with pytest.raises(RuntimeError, match="n is 65537, expected at most 65536"):
        calculate_settings(65537)


def test_decorators_of_autograd_functions():
    from liger_kernel.ops.utils import amp_custom_bwd, amp_custom_fwd, device_context, ensure_contiguous

    class Sum(torch.autograd.Function):
        @staticmethod
        @amp_custom_fwd
        @ensure_contiguous
        def forward(ctx, x, *, weight=None):
            assert x.is_contiguous()
            return x.sum()

        @staticmethod
        @amp_custom_bwd
        @ensure_contiguous
        def backward(ctx, grad):
            return grad.expand(3, 2)

    x = torch.randn(2, 3).t().requires_grad_()
    with device_context("cpu"):
        Sum.apply(x).backward()
    assert torch.equal(x.grad, torch.ones(3, 2))


def test_dtypes_of_triton():
    triton = pytest.importorskip("triton.language")
    from liger_kernel.ops.utils import torch_to_triton_dtype

    assert torch_to_triton_dtype[torch.bfloat16] == triton.bfloat16


def test_nothing_is_to_be_configured():
    from liger_kernel.ops.configure import FusedLinearCrossEntropyConfig, MoEConfig, configure

    flsce = FusedLinearCrossEntropyConfig(max_tokens=8, hidden_size=4, local_vocab_size=16, group="tp")
    moe = MoEConfig(8, 4, num_experts=2, top_k=1, num_hosts=1, gpus_per_host=1)
    assert configure(process_groups={"tp": None}, device="cpu", flsce=flsce, moe=moe) is False


def test_output_classes():
    pytest.importorskip("transformers")
    from liger_kernel.transformers.model.output_classes import LigerCausalLMOutputWithPast

    output = LigerCausalLMOutputWithPast(loss=torch.tensor(1.0), token_accuracy=torch.tensor(0.5))
    assert output.to_tuple() == (output.loss, output.token_accuracy)


def test_functions_of_torch_that_the_op_lacks():
    """liger_cross_entropy may replace torch.nn.functional.cross_entropy."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    logits, target = torch.randn(4, 5, 3), torch.randint(0, 5, (4, 3))
    probabilities = torch.randn(4, 5).softmax(-1)
    for arguments in ((logits, target), (logits[..., 0], probabilities), (logits[0, :, 0], target[0, 0])):
        expected = torch.nn.functional.cross_entropy(*arguments)
        torch.testing.assert_close(liger_cross_entropy(*arguments), expected)
    with pytest.raises(ValueError, match=r"input has shape \(4, 5, 3\).*expected \(rows, classes\)"):
        liger_cross_entropy(logits, target, softcap=5.0)


def test_errors_name_the_argument():
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss
    from liger_kernel.functional import rms_norm
    from liger_kernel.ops import fused_linear_cross_entropy_forward, rms_norm_forward
    from liger_kernel.transformers import (
        LigerFusedLinearKLDivLoss,
        LigerRMSNorm,
        LigerVocabParallelCrossEntropy,
    )
    from liger_kernel.transformers.functional import liger_group_norm, liger_tvd
    from liger_kernel.transformers.rms_norm import LigerRMSNormForGemma4

    x, w, t = torch.randn(4, 2, 8), torch.randn(5, 8), torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="impl is 'nvidia-cutile', expected None"):
        rms_norm(x, torch.ones(8), impl="nvidia-cutile")
    with pytest.raises(ValueError, match="init_fn is 'random', expected 'ones' or 'zeros'"):
        LigerRMSNorm(8, init_fn="random")
    with pytest.raises(ValueError, match="LigerRMSNormForGemma4: no dim, expected one"):
        LigerRMSNormForGemma4()
    with pytest.raises(
        ValueError, match="casting_mode is 2, expected one of -1 or 'none', 0 or 'llama', 1 or"
    ):
        rms_norm_forward(x, torch.ones(8), 1e-6, 0.0, 2, None)
    with pytest.raises(ValueError, match="X has 2 channels, expected num_channels, 4"):
        liger_group_norm(x, torch.ones(2), torch.zeros(2), 4, 2, 1e-6)
    with pytest.raises(ValueError, match="liger_tvd: reduction is 'max', expected 'none', 'sum'"):
        liger_tvd(x[0], x[1], reduction="max")
    with pytest.raises(ValueError, match="reduction is 'none', expected 'mean' or 'sum'"):
        fused_linear_cross_entropy_forward(x[0], w, t[0], reduction="none")
    with pytest.raises(ValueError, match="label_smoothing_formula is 'megatron', expected pytorch"):
        LigerVocabParallelCrossEntropy(label_smoothing_formula="megatron")(x, t)
    with pytest.raises(ValueError, match="reduction is 'none', expected"):
        LigerFusedLinearKLDivLoss("none")(x[0], w, torch.ones(2, 5) / 5)
    with pytest.raises(ValueError, match="no reference"):
        LigerFusedLinearDPOLoss()(w, x, t)
    with pytest.raises(ValueError, match="unknown loss_type 'x'"):
        LigerFusedLinearDPOLoss(loss_type="x", use_ref_model=False)(w, x, t)


def test_norms_in_two_dtypes():
    """A weight of another 16-bit dtype is read in float32; the reciprocals have the dtype of their casting
    mode."""
    from liger_kernel.ops import rms_norm_forward
    from liger_kernel.transformers.functional import liger_rms_norm

    x, weight = torch.randn(3, 8).half(), torch.rand(8).bfloat16()
    assert torch.equal(liger_rms_norm(x, weight, 1e-6), liger_rms_norm(x, weight.float(), 1e-6))
    for number, name, dtype in ((-1, "none", x.dtype), (0, "llama", torch.float32)):
        results = [rms_norm_forward(x, weight.half(), 1e-6, 0.0, mode, None) for mode in (number, name)]
        assert torch.equal(results[0][0], results[1][0]) and results[0][5:] == results[1][5:] == (number,)
        assert all(rstd.dtype == dtype for _, _, rstd, *_ in results)


def test_the_fused_loss_of_a_program(monkeypatch):
    """A function that a program has put in place of liger_fused_linear_cross_entropy computes the loss."""
    pytest.importorskip("transformers")
    from liger_kernel.transformers import functional
    from liger_kernel.transformers.model.loss_utils import (
        fixed_fused_linear_cross_entropy,
        unpack_cross_entropy_result,
    )

    calls, ours = [], functional.liger_fused_linear_cross_entropy

    def own(*tensors, **options):
        calls.append(options["reduction"])
        return ours(*tensors, **options)

    monkeypatch.setattr(functional, "liger_fused_linear_cross_entropy", own)
    x, weight, target = torch.randn(4, 8), torch.randn(5, 8), torch.tensor([1, -100, 4, 0])
    total = torch.nn.functional.cross_entropy(x @ weight.T, target, reduction="sum")
    torch.testing.assert_close(fixed_fused_linear_cross_entropy(x, weight, target), total / 3)
    output = fixed_fused_linear_cross_entropy(x, weight, target, 7, return_predicted_tokens=True)
    loss, z_loss, accuracy, predicted = unpack_cross_entropy_result(output)
    torch.testing.assert_close(loss, total / 7)
    assert z_loss is accuracy is None and predicted[0] == (x[0] @ weight.T).argmax()
    assert calls == ["mean", "sum"]


def test_what_norms_print():
    from liger_kernel.transformers import LigerLayerNorm, LigerRMSNorm
    from liger_kernel.transformers.group_norm import LigerGroupNorm

    expected = "LigerRMSNorm((8,), eps=1e-06, offset=0.0, casting_mode='llama')"
    assert repr(LigerRMSNorm(8)) == expected
    assert repr(LigerLayerNorm(8, eps=1e-5)) == "LigerLayerNorm(8, eps=1e-05)"
    assert repr(LigerGroupNorm(8, 4)) == "LigerGroupNorm(num_channels=8, num_groups=4, eps=1e-06)"


def test_temperature_of_16_bit_logits():
    """Divided in float32: rounded once more, they would be other logits."""
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax

    logits, ids = (10 * torch.randn(2, 9, 500)).bfloat16(), torch.randint(500, (2, 8))
    expected = (logits[:, :-1].double() / 0.9).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(fused_selective_log_softmax(logits, ids).double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kl_divergence_from_probabilities(dtype):
    """Whose logarithms have more digits than their dtype."""
    from liger_kernel.transformers.functional import liger_fused_linear_kl_div, liger_kl_div

    probabilities = (3 * torch.randn(7, 300)).softmax(-1).to(dtype)
    logp = (3 * torch.randn(7, 300)).log_softmax(-1).to(dtype).requires_grad_()
    loss = liger_kl_div(logp, probabilities, reduction="batchmean")
    wide = logp.detach().double().requires_grad_()
    expected = torch.nn.functional.kl_div(wide, probabilities.double(), reduction="batchmean")
    torch.testing.assert_close(loss.double(), expected, rtol=2e-6, atol=0)
    (grad,) = torch.autograd.grad(loss, logp)
    assert grad.dtype == dtype
    (exact,) = torch.autograd.grad(expected, wide)
    assert (grad.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm()

    x, weight = torch.randn(7, 16).to(dtype), (0.2 * torch.randn(300, 16)).to(dtype)
    student = (x.double() @ weight.double().T).to(dtype).double().log_softmax(-1)
    total = probabilities.double().sum(-1, keepdim=True)
    expected = torch.nn.functional.kl_div(student, probabilities.double() / total, reduction="batchmean")
    found = liger_fused_linear_kl_div(x, weight, probabilities)
    torch.testing.assert_close(
        found.double(), expected, rtol=2e-4 if dtype != torch.float32 else 1e-5, atol=0
    )
