# SPDX-License-Identifier: BSD-3-Clause
"""What the tests of the engine for compute capability 9.0 share: shapes that it takes, and what results are
held to."""

import contextlib
import os
from dataclasses import dataclass, replace

import pytest
import torch
from cases import poison_memory
from cross_entropy_reference import random_layer, reference
from torch.nn.functional import linear

import liger

MIB = 1 << 20
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
# A summed loss, relative; results of single rows, relative to the largest; a gradient, as the norm of its
# error relative to its own: each is rounded to bfloat16 from two factors that were.
LOSS, ROWS, GRADIENT = 2e-6, 1e-5, 3e-3
# The last one for float16, beyond one rounding of the exact gradient, which is larger where elements are
# below 2^-14.
GRADIENT_FLOAT16 = 4e-4
OBSERVED = {"metrics": ("entropy", "argmax", "token_accuracy")}


def clusters():
    """Pairs of blocks that run at a time; without a device, the pairs of an H200."""
    if not torch.cuda.is_available():
        return 66
    return torch.cuda.get_device_properties().multi_processor_count // 2


@dataclass(frozen=True)
class Shape:
    rows: int
    hidden: int
    vocab: int
    budget: int = 512 * MIB
    accum_dtype: torch.dtype | None = None

    def of(self, dtype):
        """The same for a dtype: what may be summed in the dtype of the operands is summed in this one."""
        return self if self.accum_dtype is None else replace(self, accum_dtype=dtype)

    def plan(self, need_grad_input=True, need_grad_weight=True):
        """(rows of the chunks, split-K of the chunks, rows in the weight gradient, scale_bytes) if the engine
        runs, which is asserted."""
        _, rows, k_splits, in_grad_weight, _, scale_bytes, _ = torch.ops.liger.plan_chunks_sm90(
            self.rows, self.hidden, self.vocab, need_grad_input, need_grad_weight,
            self.accum_dtype in (None, torch.float32), self.budget, clusters(),
        )  # fmt: skip
        assert rows, f"the generic engine would run: {self}"
        return rows, k_splits, in_grad_weight, scale_bytes

    def layer(self, device, ignored=0.25, scale=1.0, dtype=BFLOAT16):
        """input and weight whose logits have a standard deviation of about 2 * scale, and a target."""
        x, weight, _, _ = random_layer(self.rows, self.hidden, self.vocab, device)
        target = torch.randint(self.vocab, (self.rows,), device=device)
        order = torch.randperm(self.rows, device=device)
        target[order[: round(ignored * self.rows)]] = -100
        return (scale * x).to(dtype), weight.to(dtype), target


# Terms of the loss that kernel instances of their own compute, and with which others they are combined.
TERMS = {
    "bias": ("bias",),
    "softcap": ("softcap",),
    "smoothing": ("label_smoothing",),
    "half smoothing": ("half_smoothing",),
    "bias and softcap": ("bias", "softcap"),
    "bias and smoothing": ("bias", "label_smoothing"),
    "smoothing and class weights": ("label_smoothing", "ce_weight"),
    "bias, smoothing, weights": ("bias", "label_smoothing", "ce_weight", "token_weight", "lse_square_scale"),
    "bias, softcap, weights": ("bias", "softcap", "ce_weight", "token_weight", "lse_square_scale"),
}


def chosen_terms(name, shape, device, dtype=BFLOAT16):
    """The keywords of fused_linear_ce for an entry of TERMS."""
    made = {
        "bias": lambda: torch.randn(shape.vocab, device=device).to(dtype),
        "softcap": lambda: 5.0,
        "label_smoothing": lambda: 0.1,
        "half_smoothing": lambda: 0.5,
        "ce_weight": lambda: torch.rand(shape.vocab, device=device) + 0.1,
        "token_weight": lambda: torch.rand(shape.rows, device=device) + 0.1,
        "lse_square_scale": lambda: 1e-2,
    }
    return {key.replace("half", "label"): made[key]() for key in TERMS[name]}


BESIDE = Shape(900, 512, 4224)
SUMS = Shape(1900, 256, 1152, MIB)
SUMS_BF16 = Shape(5000, 256, 2048, 8 * MIB, BFLOAT16)
PARTS = Shape(256, 256, 16384)
PARTS_OF_CHUNKS = Shape(900, 256, 8192, 8 * MIB)
# A hidden size that is no multiple of 256, and a vocabulary that is none of 128.
PARTIAL_SUMS = Shape(1900, 320, 1153, MIB)
DTYPES = pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
KINDS = pytest.mark.parametrize(
    "shape",
    [BESIDE, SUMS, SUMS_BF16, PARTIAL_SUMS],
    ids=["one chunk", "sums", "bf16 allowed", "partial tiles"],
)
SHAPES = {
    "in the weight gradient": Shape(500, 512, 2048),
    "beside it": BESIDE,
    "sums": SUMS,
    "sums, larger": Shape(3000, 768, 8192, 8 * MIB),
    "sums, whole waves": Shape(6000, 2048, 1024, 4 * MIB),
    "sums, more panels": Shape(2500, 512, 4224, 4 * MIB),
    "bf16 allowed": SUMS_BF16,
    "parts": PARTS,
    "parts of chunks": PARTS_OF_CHUNKS,
    "fewest rows": Shape(256, 256, 256),
    "one row more": Shape(257, 256, 256),
    "some rows more": Shape(300, 256, 256, MIB),
    "one panel": Shape(300, 256, 128),
    "partial, in the weight gradient": Shape(500, 640, 2049),
    "partial, beside it": Shape(900, 576, 4223),
    "partial, sums": PARTIAL_SUMS,
    "partial, sums, larger": Shape(3000, 832, 8250, 8 * MIB),
    "partial, sums, whole waves": Shape(6000, 2000, 1023, 4 * MIB),
    "partial, sums, 224 columns": Shape(2500, 448, 4160, 4 * MIB),
    "sums, 240 columns": Shape(2500, 480, 4224, 4 * MIB),
    "partial, sums, 240 columns": Shape(3000, 1168, 8250, 16 * MIB),
    "sums, 192 columns": Shape(3000, 1152, 8250, 16 * MIB),
    "sums, 320 columns": Shape(2500, 640, 8250, 8 * MIB),
    "parts, 320 columns": Shape(256, 640, 16385),
    "partial, parts, 320 columns": Shape(300, 640, 8193),
    "partial, 240 columns": Shape(700, 720, 2049),
    "partial, bf16 allowed": Shape(5000, 384, 2047, 8 * MIB, BFLOAT16),
    "partial, parts": Shape(256, 192, 16385),
    "partial, few columns": Shape(1000, 64, 3000, MIB),
    "partial, few classes": Shape(700, 128, 37),
}
# Hidden sizes that are no multiple of 64: the last k-block is partial, and the last tile of columns.
HIDDEN_SIZES = {
    "hidden 16": Shape(300, 16, 1000),
    "hidden 48, sums": Shape(1000, 48, 3000, MIB),
    "hidden 80": Shape(700, 80, 2049),
    "hidden 176, parts": Shape(256, 176, 16384),
    "hidden 208, beside it": Shape(900, 208, 4223),
    "hidden 336, sums": Shape(1900, 336, 1153, MIB),
    "hidden 528, in the weight gradient": Shape(500, 528, 2048),
    "hidden 784, sums": Shape(3000, 784, 8250, 8 * MIB),
    "hidden 1040, bf16 allowed": Shape(5000, 1040, 2047, 8 * MIB, BFLOAT16),
    "hidden 2032, sums, whole waves": Shape(6000, 2032, 1024, 4 * MIB),
}
SHAPES |= HIDDEN_SIZES


# --- comparing ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def engine(generic):
    """The engine that computes; LIGER_WGMMA is read at each call. The generic one is of one thread's tests
    only."""
    if not generic:
        yield
        return
    before = os.environ.get("LIGER_WGMMA")
    os.environ["LIGER_WGMMA"] = "0"
    try:
        yield
    finally:
        del os.environ["LIGER_WGMMA"]
        if before is not None:
            os.environ["LIGER_WGMMA"] = before


def run(shape, x, weight, target, trained=(True, True), upstream=None, generic=False, bias=None, **chosen):
    """(output, gradients in float64) by this engine, or by the generic one; the last gradient belongs to a
    bias."""
    summed = chosen.get("reduction", "mean") != "none"
    if summed or not any(trained):
        shape.plan(*trained)
    else:
        # The gradients of losses per row come from a second pass, over their sum.
        shape.plan(False, False)
        shape.plan(*trained)
    poison_memory()
    x, weight = (t.detach().requires_grad_(want) for t, want in zip((x, weight), trained, strict=True))
    bias = None if bias is None else bias.detach().requires_grad_(any(trained))
    leaves = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
    with engine(generic):
        output = liger.fused_linear_ce(
            x, weight, target, bias,
            memory_budget=shape.budget, accum_dtype=shape.accum_dtype,
            **{**chosen, "metrics": ("logprobs", "z_loss", *chosen.get("metrics", ()))},
        )  # fmt: skip
        return output, list(torch.autograd.grad(output.loss, leaves, upstream)) if leaves else []


def exact(x, weight, target, trained=(True, True), upstream=None, bias=None, **chosen):
    """The same by the formulas, in float64."""
    x, weight = (
        t.detach().double().requires_grad_(want) for t, want in zip((x, weight), trained, strict=True)
    )
    bias = None if bias is None else bias.detach().double().requires_grad_(any(trained))
    values = reference(linear(x, weight, bias), target, **chosen)
    leaves = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
    if upstream is not None:
        upstream = upstream.double()
    return values, torch.autograd.grad(values["loss"], leaves, upstream) if leaves else ()


def assert_close_to_exact(actual, expected, tolerance, name):
    error = (actual.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    assert error <= tolerance, f"{name}: error {error.item():.3g}, allowed {tolerance:.3g}"


def gradient_tolerance(expected, dtype):
    if dtype == BFLOAT16:
        return GRADIENT
    return GRADIENT_FLOAT16 + ((expected.to(dtype).double() - expected).norm() / expected.norm()).item()


def rounding(shape, trained, expected, dtype):
    """Of a result to dtype. The sum of the chunks has 11 bits: in float16 every chunk rounds as the result
    does."""
    chunks = len(shape.plan(*trained)[0]) if dtype == FLOAT16 else 1
    return chunks * torch.finfo(dtype).eps / 2 * expected.abs()


def check(
    shape, x, weight, target, trained=(True, True), loss_tolerance=LOSS, tolerance=None, upstream=None, **chosen
):  # fmt: skip
    """Results against float64, and each element of a gradient against the worst that the generic engine has.

    Args:
        tolerance: of gradients; GRADIENT, or for float16 GRADIENT_FLOAT16 and one rounding.
        upstream: of losses per row, instead of random numbers from 0 to 1.
    """
    per_row = chosen.get("reduction") == "none"
    if upstream is None and per_row:
        upstream = torch.rand(shape.rows, device=x.device)
    arguments = shape, x, weight, target, trained, upstream
    output, grads = run(*arguments, **chosen)
    _, generic_grads = run(*arguments, generic=True, **chosen)
    values, exact_grads = exact(*arguments[1:], **chosen)

    for name in ("loss", "z_loss"):
        assert_close_to_exact(
            getattr(output, name), values[name].detach(), ROWS if per_row else loss_tolerance, name
        )
    assert_close_to_exact(output.logprobs, values["logprobs"].detach(), ROWS, "logprobs")
    ignored = target == chosen.get("ignore_index", -100)
    assert not output.logprobs[ignored].any()

    names = [name for name, want in zip(("input", "weight"), trained, strict=True) if want]
    names += ["bias"] if chosen.get("bias") is not None and names else []
    for name, actual, theirs, expected in zip(names, grads, generic_grads, exact_grads, strict=True):
        assert actual.dtype == x.dtype and actual.isfinite().all(), name
        error = actual.double() - expected
        relative = (error.norm() / expected.norm()).item()
        most = gradient_tolerance(expected, x.dtype) if tolerance is None else tolerance
        assert relative <= most, f"gradient of {name}: error {relative:.3g}, allowed {most:.3g}"
        allowed = 2 * (theirs.double() - expected).abs().max() + rounding(shape, trained, expected, x.dtype)
        assert (error.abs() <= allowed).all(), f"gradient of {name}: an element is worse than any by cuBLAS"
        if name == "input":
            assert not actual[ignored].any()


def assert_observed(x, weight, target, entropy, predicted, temperature=1.0):
    """Entropies and most probable classes against float64: as exact as the logits, sums of products in
    float32."""
    logits = linear(x.double(), weight.double()) / temperature
    error = ROWS * logits.abs().max().item()
    live = target != -100
    assert (entropy[~live] == 0).all() and (predicted[~live] == -1).all()
    logp = logits.log_softmax(-1)
    expected = -(logp.exp() * logp).sum(-1)
    torch.testing.assert_close(entropy[live].double(), expected[live], rtol=0, atol=error)
    assert ((predicted >= 0) & (predicted < weight.shape[0]))[live].all()
    below = logits.max(-1).values - logits.gather(1, predicted.clamp_min(0).unsqueeze(1)).squeeze(1)
    assert (below[live] <= error).all()


def uses_the_engine(step):
    """True if a step launches GEMMs of the engine: a plan says what should run; the profiler, what did. Skips
    the test where the profiler sees no kernels."""
    step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    if not names:
        pytest.skip("the profiler sees no kernels here")
    return any("sm90::gemm_kernel" in name for name in names)


def assert_same_bits(runs):
    for results in zip(*([*output, *grads] for output, grads in runs), strict=True):
        first, *others = results
        for other in others:
            assert (first is None and other is None) or torch.equal(first, other)
