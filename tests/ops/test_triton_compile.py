# SPDX-License-Identifier: BSD-3-Clause
"""Every Triton launch compiles for every architecture, without a GPU.

The launchers run on CPU tensors with the launch itself replaced by a recorder, so what is compiled is exactly
what they would launch: the same constants, the same specialisation of strides and pointers, the same number
of warps.
"""

# ruff: noqa: E402  (Triton is optional)
import functools
import importlib
import pkgutil

import pytest
import torch
from samples_declared import Sizes, samples_of

triton = pytest.importorskip("triton")

import liger.triton_kernels
from liger.triton_kernels import (
    cross_entropy,
    cross_entropy_stats,
    divergence,
    expert_gate,
    expert_rows,
    fused_linear_ce,
    group_norm,
    qk_norm_rope,
    rescale,
    rms_norm_gated,
    rope,
    valid_rows,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from liger._core.op.declared import declarations
from liger._core.runtime.environment import triton_interpreted
from liger.ops.grouped_experts.routing import Gate

pytestmark = pytest.mark.skipif(
    triton_interpreted(), reason="under TRITON_INTERPRET=1 kernels are Python functions"
)

CAPABILITIES = [80, 90, 100]
DTYPES = [torch.bfloat16, torch.float32]
POINTEES = {
    torch.bool: "i1",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}


# Several rows per program, one row per program, and rows larger than a tile.
WIDTHS = (128, 4096, 40000)


def declared_launches(dtype, tokens=9, *, module):
    """The samples of the declared ops of a family, in several widths."""
    for op in (op for op in declarations() if hasattr(module, op)):
        for width in WIDTHS:
            # The second sample has another layout, and other options.
            leading = (tokens,), (1, tokens)
            sizes = Sizes(leading, ((),) * 2, {"H": width, "I": width, "channels": 8}, dtype)
            for sample in samples_of(op, "cpu", sizes):
                getattr(module, op)(*sample)


def rms_norm_gated_launches(dtype, tokens=9):
    # Several rows per program, one row per program, and rows larger than a tile; whole rows and groups.
    for hidden, group_size in ((128, None), (512, 128), (1024, None), (4096, None), (40000, None)):
        x, weight = torch.zeros(tokens, hidden, dtype=dtype), torch.zeros(hidden, dtype=dtype)
        for form in ((True, "silu"), (False, "sigmoid")):
            for mode, parameter in (("llama", weight), ("gemma", None), ("none", weight)):
                options = 0.0, mode, group_size, *form
                _, rstd = rms_norm_gated.rms_norm_gated(x, x, parameter, 1e-6, *options)
                rms_norm_gated.rms_norm_gated_backward(x, x, x, parameter, rstd, *options, True, True, True)
    rms_norm_gated.rms_norm_gated_backward(x, x, x, weight, rstd, *options, False, False, True)


def group_norm_launches(dtype, tokens=9):
    # Several channels per program, groups of one element, groups of a tile, and groups of more than that.
    for groups, spatial in ((2, ()), (8, ()), (2, (7, 7)), (2, (128, 128))):
        x, parameter = torch.zeros(tokens, 8, *spatial, dtype=dtype), torch.zeros(8, dtype=dtype)
        for weight, bias in ((parameter, parameter), (parameter, None), (None, None)):
            _, mean, rstd = group_norm.group_norm(x, groups, weight, bias)
            group_norm.group_norm_backward(x, x, groups, weight, bias, mean, rstd, True, True, True)


def rope_launches(dtype, tokens=9):
    q, k = (
        torch.zeros(2, tokens, 32, 128, dtype=dtype).transpose(1, 2),
        torch.zeros(2, 8, tokens, 128, dtype=dtype),
    )
    for rotary in (128, 48):
        for interleaved in (False, True):
            rope.rope(q, k, *torch.zeros(2, tokens, rotary, dtype=dtype), interleaved)
            rope.rope_backward(q, k, *torch.zeros(2, 2, tokens, rotary), interleaved)


def expert_rows_launches(dtype, tokens=9):
    for experts, choices, index in ((1, 1, torch.int32), (128, 8, torch.int64), (1023, 2, torch.int64)):
        expert_rows.route(torch.zeros(tokens, choices, dtype=index), experts)
    for hidden, choices in ((33, 2), (4096, 8)):
        rows, inverse = (
            torch.zeros(tokens + 1, hidden, dtype=dtype),
            torch.zeros(tokens, choices, dtype=torch.int64),
        )
        for weights in (None, torch.zeros(tokens, choices), torch.zeros(tokens, choices, dtype=dtype)):
            expert_rows.expert_sum(rows, inverse, weights)


def expert_gate_launches(dtype, tokens=9):
    for width in (100, 2880):
        gate_up, weights = torch.zeros(tokens, 2 * width, dtype=dtype), torch.zeros(tokens, 1)
        for gate in (
            Gate("silu", False, 1.702, None),
            Gate("gelu_tanh", True, 1.702, None),
            Gate("gelu", False, 1.702, 7.0),
            Gate("gpt_oss", True, 1.702, 7.0),
        ):
            grad = expert_gate.product(gate_up, gate)
            expert_gate.backward_(grad, gate_up, weights, gate)


def rescale_launches(dtype, tokens=9):
    for factor in (torch.zeros(()), torch.zeros(1, dtype=dtype)):
        rescale.rescale(torch.zeros(tokens, 4096, dtype=dtype), factor)
        rescale.rescale_(torch.zeros(333, dtype=dtype), factor)


def cross_entropy_launches(dtype, tokens=9):
    # Rows that stay in registers, and longer ones.
    for vocab in (32000, 128256):
        weight = torch.ones(vocab)
        logits, target = torch.zeros(tokens, vocab, dtype=dtype), torch.zeros(tokens, dtype=torch.int64)
        denominator = torch.ones((), dtype=torch.int64)
        options = [
            (None, None, None, -100, 0.0, 0.0, None, "mean", *(False,) * 5),
            (weight, torch.ones(tokens), denominator, 0, 0.1, 1e-4, 30.0, "sum", *(True,) * 5),
            (None, None, None, -100, 0.1, 0.0, None, "none", *(True,) * 5),
        ]
        for option in options:
            *_, stats, used, _ = cross_entropy.cross_entropy_forward(logits, target, *option, False)
            cross_entropy.cross_entropy_forward(logits, target, *option, True)
            cross_entropy.cross_entropy_forward_(logits, target, *option)
            ce_weight, token_weight, _, *numbers = option[:7]
            rest = (logits, target, stats, used, ce_weight, token_weight, *numbers)
            cross_entropy.cross_entropy_backward(torch.ones(()), *rest)
            cross_entropy.cross_entropy_backward_(torch.ones(tokens), *rest)


def cross_entropy_stats_launches(dtype, tokens=9):
    logits, weight = torch.zeros(tokens, 64128, dtype=dtype), torch.ones(64128)
    target, row = torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens)
    for ce_weight, softcap, per_class in ((None, None, False), (None, 30.0, True), (weight, None, True)):
        where = (64128, -100, softcap)
        for squares in (False, True):
            cross_entropy_stats.cross_entropy_stats(logits, target, ce_weight, *where, per_class, squares)
        rest = (logits, target, row, row, row, row if per_class else None, ce_weight, *where)
        for coef_log in (None, row):
            cross_entropy_stats.cross_entropy_stats_backward(*rest, coef_log)
            cross_entropy_stats.cross_entropy_stats_backward_(*rest, coef_log)


def divergence_launches(dtype, tokens=9):
    student, teacher = torch.zeros(2, tokens, 32000, dtype=dtype)
    row = torch.zeros(tokens)
    for kind in ("forward_kl", "reverse_kl", "jsd", "tvd"):
        for target, log_probs in ((None, False), (torch.zeros(tokens, dtype=torch.int64), True)):
            options = (kind, 0.5, 1.0, log_probs, -100)
            weighted = (student, teacher, target, None if log_probs else row, *options, False)
            for need_grad in (False, True):
                _, stats, _ = divergence.divergence_forward(*weighted, need_grad)
            divergence.divergence_forward_(*weighted)
            divergence.divergence_backward(row, student, teacher, target, stats, *options)
        for narrower in {dtype, torch.bfloat16} if dtype == torch.float32 else {dtype}:
            gradient = torch.zeros_like(student, dtype=narrower)
            divergence.divergence_ce_forward_(
                student, teacher, target, row, kind, 0.5, 1.0, 0.7, -100, gradient
            )


def fused_linear_ce_launches(dtype, tokens=9):
    x, weight = torch.zeros(tokens, 16, dtype=dtype), torch.zeros(1000, 16, dtype=dtype)
    target, ones = torch.zeros(tokens, dtype=torch.int32), torch.ones(1000)
    for wanted in (False, True):
        fused_linear_ce.fused_linear_ce_forward(
            x,
            weight,
            target,
            None,
            ones,
            None,
            None,
            -100,
            0.1,
            1e-4,
            30.0,
            "mean",
            None,
            None,
            *(wanted,) * 8,
        )


def valid_rows_launches(dtype, tokens=9):
    for index_dtype in (torch.int32, torch.int64):
        rows = valid_rows.ValidRows(torch.zeros(tokens, dtype=index_dtype), -100)
    for hidden in (33, 4096):
        rows.expand_(torch.zeros(tokens, hidden, dtype=dtype))


def qk_norm_rope_launches(dtype, tokens=9):
    # Full and partial rotation, interleaved, with and without weights and gradients.
    for dim, rotary, interleaved, mode in (
        (128, 128, False, "llama"),
        (96, 64, True, "gemma"),
        (80, 32, False, "none"),
    ):
        q, k = (torch.zeros(2, tokens, h, dim, dtype=dtype).transpose(1, 2) for h in (8, 2))
        table, weight = torch.zeros(tokens, rotary, dtype=dtype), torch.zeros(dim, dtype=dtype)
        for weights in ((weight, weight), (None, weight)):
            arguments = q, k, *weights, table, table, 1e-6, 0.0, mode, interleaved
            qk_norm_rope.qk_norm_rope(*arguments)
            qk_norm_rope.qk_norm_rope_backward(q, k, *arguments, True, False, True, True)


# Families of declared ops need no entry, unless their kernels have more forms than their samples.
LAUNCHES = {
    module: functools.partial(declared_launches, module=module)
    for info in pkgutil.iter_modules(liger.triton_kernels.__path__, "liger.triton_kernels.")
    if declarations().keys() & vars(module := importlib.import_module(info.name)).keys()
}
LAUNCHES |= {
    valid_rows: valid_rows_launches,
    group_norm: group_norm_launches,
    rms_norm_gated: rms_norm_gated_launches,
    rope: rope_launches,
    qk_norm_rope: qk_norm_rope_launches,
    expert_gate: expert_gate_launches,
    expert_rows: expert_rows_launches,
    rescale: rescale_launches,
    cross_entropy: cross_entropy_launches,
    cross_entropy_stats: cross_entropy_stats_launches,
    divergence: divergence_launches,
    fused_linear_ce: fused_linear_ce_launches,
}


def source_and_options(kernel, args, kwargs):
    """What ``kernel[grid](*args, **kwargs)`` would compile: its specialised source and the compiler
    options."""
    names = [p.name for p in kernel.params]
    values = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    options = {k: v for k, v in kwargs.items() if k not in names}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        aligned = False
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[index,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + POINTEES[value.dtype]
            aligned = value.data_ptr() % 16 == 0
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name], constants[index,] = "constexpr", 1
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0 and not parameter.do_not_specialize
        if aligned:
            attributes[index,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes), options


def test_every_kernel_is_launched(monkeypatch):
    """So that no kernel escapes the tests below."""
    kernels = {
        kernel
        for info in pkgutil.iter_modules(liger.triton_kernels.__path__, "liger.triton_kernels.")
        for kernel in vars(importlib.import_module(info.name)).values()
        if isinstance(kernel, JITFunction) and kernel.__name__.endswith("_kernel")
    }
    launched = {kernel for module in LAUNCHES for kernel, _, _ in record(monkeypatch, module, torch.float32)}
    missing = sorted(kernel.__name__ for kernel in kernels - launched)
    assert launched == kernels, f"no function of LAUNCHES in this file launches {missing}"


@pytest.mark.parametrize("tokens", [1, 16, 33])
@pytest.mark.parametrize("module", LAUNCHES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_token_count_does_not_recompile(monkeypatch, module, tokens):
    def variants(**sizes):
        found = []
        for kernel, args, kwargs in record(monkeypatch, module, torch.bfloat16, **sizes):
            source, options = source_and_options(kernel, args, kwargs)
            found.append((kernel.__name__, source.signature, source.constants, source.attrs, options))
        return found

    assert variants(tokens=tokens) == variants()


def test_target_check_compiles(monkeypatch):
    """The form of the row kernel under LIGER_CHECK_TARGETS=1, which launchers use on CUDA tensors only."""
    kernel, args, kwargs = record(monkeypatch, cross_entropy, torch.bfloat16)[0]
    names = [parameter.name for parameter in kernel.params]
    args = [True if name == "CHECK_TARGETS" else value for name, value in zip(names, args, strict=True)]
    source, options = source_and_options(kernel, args, kwargs)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options | {"debug": True})
    assert "__assertfail" in compiled.asm["ptx"] and "vprintf" in compiled.asm["ptx"]


def record(monkeypatch, module, dtype, **sizes):
    launches = []
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *args, grid, warmup, **kwargs: launches.append((self, args, kwargs))
    )
    LAUNCHES[module](dtype, **sizes)
    return launches


# Bytes per block, of compute capability 8.6, 8.9 and 12.0: plans for CPU tensors are the plans of the
# smallest GPU.
SMALLEST_SHARED_MEMORY = 101376

# One launch of every kernel for one of the six kinds in a quick run.
TARGETS = [
    (torch.float32, 80, False),
    *(
        pytest.param(dtype, capability, True, marks=pytest.mark.slow)
        for dtype in DTYPES
        for capability in CAPABILITIES
    ),
]


@pytest.mark.parametrize(("dtype", "capability", "every"), TARGETS, ids=str)
@pytest.mark.parametrize("module", LAUNCHES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_launch_compiles(monkeypatch, module, dtype, capability, every):
    launches = record(monkeypatch, module, dtype)
    if not every:
        launches = {kernel: (kernel, args, kwargs) for kernel, args, kwargs in launches}.values()
    for kernel, args, kwargs in launches:
        source, options = source_and_options(kernel, args, kwargs)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert compiled.asm["cubin"], kernel.__name__
        assert compiled.metadata.shared <= SMALLEST_SHARED_MEMORY, kernel.__name__
