# SPDX-License-Identifier: BSD-3-Clause
"""Arguments for every op of torch.ops.liger, for the tests that go over all of them."""

import torch
from sample_tensors import floats, transposed
from samples_declared import SAMPLES as DECLARED
from samples_losses import SAMPLES as LOSSES


def _rope(d):
    return [
        (floats(d, 2, 4, 3, 8), floats(d, 2, 2, 3, 8), floats(d, 3, 8), floats(d, 3, 8)),
        (
            floats(d, 2, 3, 4, 8).transpose(1, 2),
            floats(d, 2, 3, 1, 8).transpose(1, 2),
            floats(d, 2, 3, 4),
            floats(d, 2, 3, 4),
            True,
        ),
        (floats(d, 2, 4, 0, 8), floats(d, 2, 2, 0, 8), floats(d, 1, 0, 8), floats(d, 1, 0, 8)),
    ]


def _qk_norm_rope(d):
    plain, strided, empty = _rope(d)
    return [
        (*plain[:2], floats(d, 8), floats(d, 8), *plain[2:]),
        (*strided[:2], None, floats(d, 8), *strided[2:4], 1e-5, 1.0, "gemma", True),
        (*empty[:2], floats(d, 8), None, *empty[2:], 1e-6, 0.0, "none"),
    ]


def _qk_norm_rope_backward(d):
    samples = []
    for i, (q, k, *tensors) in enumerate(arguments[:6] for arguments in _qk_norm_rope(d)):
        options = [(1e-6, 0.0, "llama", False), (1e-5, 1.0, "gemma", True), (1e-6, 0.0, "none", False)][i]
        for needed in ((True, True, True, True), (False, True, True, False)):
            samples.append((torch.randn_like(q), torch.randn_like(k), q, k, *tensors, *options, *needed))
    return samples


def _mlp(d, leading=(2, 3), hidden=8, intermediate=6, packed=False, bias=False):
    """x, the three weights, the three biases."""
    inner = [(2 * intermediate,), None] if packed else [(intermediate,), (intermediate,)]
    weights = [None if rows is None else floats(d, *rows, hidden) for rows in inner]
    biases = [None if rows is None else floats(d, *rows) for rows in inner]
    biases = [*biases, floats(d, hidden)] if bias else [None] * 3
    return floats(d, *leading, hidden), *weights, floats(d, hidden, intermediate), *biases


def _tiled_mlp(d):
    packed = _mlp(d, (7,), packed=True, bias=True)
    return [
        _mlp(d),
        (*_mlp(d, (4, 3), bias=True), "gelu_tanh", 3),
        (*packed, "silu", 2, 1 << 20),
        (transposed(_mlp(d, (3, 4))[0]), *_mlp(d)[1:], "gelu", 5, 700),
        _mlp(d, (0,)),
    ]


def _with_options(arguments):
    return (*arguments, *("silu", None, None)[len(arguments) - 7 :])


def _tiled_mlp_forward(d):
    return [(*_with_options(arguments), keep) for arguments in _tiled_mlp(d) for keep in (True, False)]


def _tiled_mlp_backward(d):
    samples = []
    for arguments in map(_with_options, _tiled_mlp(d)):
        *tensors, down_bias = arguments[:7]
        there = [t is not None for t in (*tensors, down_bias)]
        for needed in (
            there,
            [False, *there[1:]],
            [there[0], *[False] * 6],
            [*[False] * 3, True, *[False] * 3],
        ):
            y, *kept = torch.ops.liger.tiled_mlp_forward(*arguments, True)
            samples.append((torch.randn_like(y), *kept, *tensors, *arguments[7:], *needed))
    return samples


def _experts(d, leading=(7,), choices=2, biased=False, transposed=False, sentinels=False):
    """x, top_k_index, top_k_weights, the two weights and their biases: 3 experts, H = 8, I = 6."""
    experts, hidden, inner = 3, 8, 6
    index = torch.randint(experts + sentinels, (*leading, choices), device=d)
    shapes = [(experts, 2 * inner, hidden), (experts, hidden, inner)]
    weights = [floats(d, e, *(n, m) if transposed else (m, n)) for e, m, n in shapes]
    biases = [floats(d, experts, 2 * inner), floats(d, experts, hidden)] if biased else [None] * 2
    routing = floats(d, *leading, choices).abs()
    return floats(d, *leading, hidden), index, routing, *weights, *biases


def _grouped_experts(d):
    return [
        _experts(d),
        (*_experts(d, (2, 3), biased=True), "gelu", False, True),
        (*_experts(d, biased=True, transposed=True), "gpt_oss", True, True, 1.5, 0.7),
        (transposed(_experts(d, (3, 4))[0]), *_experts(d, (3, 4))[1:], "gelu_tanh", False, False, 1.0, None, True),
        _experts(d, (5,), 1, sentinels=True),
        _experts(d, (0,)),
    ]  # fmt: skip


def _with_gate_options(arguments):
    """All arguments but ``recompute``."""
    return (*arguments, *("silu", False, False, 1.702, None)[len(arguments) - 7 :])[:12]


def _grouped_experts_forward(d):
    # The kept rows of sentinels have unspecified values, which opcheck would compare.
    return [
        (*_with_gate_options(a), keep)
        for a in _grouped_experts(d)
        for keep in ((True, False) if a[1].numel() == 0 or a[1].max() < a[3].shape[0] else (False,))
    ]


def _grouped_experts_backward(d):
    samples = []
    for arguments in map(_with_gate_options, _grouped_experts(d)):
        there = [t is not None for i, t in enumerate(arguments[:7]) if i != 1]
        for needed in (
            there,
            [False, *there[1:]],
            [True, *[False] * 5],
            [False, True, *[False] * 4],
            [*[False] * 3, True, False, False],
        ):
            for keep in (True, False):
                y, kept = torch.ops.liger.grouped_experts_forward(*arguments, keep)
                samples.append((torch.randn_like(y), kept, *arguments, *needed))
    return samples


def _rescale(d):
    return [
        (floats(d, 3, 4), torch.tensor(2.5, device=d)),
        (transposed(floats(d, 3, 4)), torch.tensor([2.5], device=d)),
        (floats(d, 0, 4), torch.tensor(2.5, device=d)),
    ]


class _Samples(dict):
    def __missing__(self, op):
        raise KeyError(f"{op} has no samples: add an entry to SAMPLES in tests/support/samples/samples.py")


SAMPLES = {
    **LOSSES,
    **DECLARED,
    "rope": _rope,
    "rope_backward": _rope,
    "rope_": _rope,
    "qk_norm_rope": _qk_norm_rope,
    "qk_norm_rope_backward": _qk_norm_rope_backward,
    "tiled_mlp": _tiled_mlp,
    "tiled_mlp_forward": _tiled_mlp_forward,
    "tiled_mlp_backward": _tiled_mlp_backward,
    "grouped_experts": _grouped_experts,
    "grouped_experts_forward": _grouped_experts_forward,
    "grouped_experts_backward": _grouped_experts_backward,
    "rescale": _rescale,
    "rescale_": _rescale,
    "check_arguments": lambda d: [
        ("rms_norm", [floats(d, 3, 16), floats(d, 16)], [1e-6, 0.0], ["llama"]),
        ("rms_norm_gated", [floats(d, 3, 16), floats(d, 3, 16), None], [1e-6, 0.0, 4], ["none", "silu"]),
    ],
    "check_rope": lambda d: [(*arguments, False)[:5] for arguments in _rope(d)],
    "check_qk_norm_rope": lambda d: [
        ("qk_norm_rope", *arguments[:6], "llama") for arguments in _qk_norm_rope(d)
    ],
    "check_written": lambda d: [("rope_", ["q", "k", "cos"], [floats(d, 3), floats(d, 3), floats(d, 3)], 2)],
    "check_tiled_mlp": lambda d: [_with_options(arguments) for arguments in _tiled_mlp(d)],
    "build_info": lambda d: [()],
    "declarations": lambda d: [()],
    "default_memory_budget": lambda d: [()],
    "plan_constants": lambda d: [()],
    "plan_split_k_sums_sm90": lambda d: [(1000, 640, 2)],
    "plan_chunks": lambda d: [
        (4096, 2048, 32000, 2, True, True),
        (4096, 2048, 32000, 2, False, True, 1 << 20),
    ],
    "lay_out_chunks": lambda d: [
        (4096, 2048, 32000, 2, True, True, True),
        (4096, 2048, 32000, 2, True, False, True, 1 << 24, 1000, 0),
    ],
    "plan_chunks_sm90": lambda d: [
        (4096, 2048, 32000, True, True, True),
        (4096, 2048, 32000, False, True, True, 1 << 24, 60),
        (4096, 2048, 32000, True, True, True, None, 66, 128),
    ],
    "plan_linear_backward_sm90": lambda d: [
        (4096, 2048, 32000, True, True, 1),
        (4096, 2048, 32000, False, True, 0, 1 << 24, 60, 128),
    ],
}
SAMPLES = _Samples(SAMPLES)
