"""Arguments for every op of torch.ops.liger, for the tests that go over all of them."""

import torch


def _float(device, *shape, scale=1.0):
    return torch.randn(shape, device=device) * scale


def _transposed(tensor):
    """The same values, laid out with the first two dimensions exchanged."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def _rms_norm(d):
    return [
        (_float(d, 3, 16), _float(d, 16)),
        (_transposed(_float(d, 3, 4, 16)), None, 1e-5, 1.0, "gemma"),
        (_float(d, 0, 16), _float(d, 16), 1e-6, 0.0, "none"),
    ]


def _rms_norm_backward(d):
    x, weight = _float(d, 2, 3, 16), _float(d, 16)
    return [
        (_float(d, 2, 3, 16), _transposed(x), weight, _float(d, 2, 3).abs(), 0.0, "llama", True, True),
        (_float(d, 2, 3, 16), x, weight, _float(d, 6).abs(), 1.0, "gemma", False, True),
        (_float(d, 2, 3, 16), x, None, _float(d, 6).abs(), 0.0, "none", True, False),
    ]


def _fused_add_rms_norm(d):
    return [
        (_float(d, 3, 16), _float(d, 3, 16), _float(d, 16)),
        (_transposed(_float(d, 2, 3, 16)), _float(d, 2, 3, 16), None, 1e-5, 0.0, "none"),
    ]


def _fused_add_rms_norm_backward(d):
    x, weight, rstd = _float(d, 2, 3, 16), _float(d, 16), _float(d, 2, 3).abs()
    return [
        (_float(d, 2, 3, 16), _float(d, 2, 3, 16), _transposed(x), weight, rstd, 0.0, "llama", True, True),
        (_float(d, 2, 3, 16), None, x, weight, rstd, 1.0, "gemma", True, False),
        (_float(d, 2, 3, 16), None, x, None, rstd, 0.0, "none", False, False),
    ]


def _layer_norm(d):
    return [
        (_float(d, 3, 16), _float(d, 16), _float(d, 16)),
        (_transposed(_float(d, 3, 4, 16)), _float(d, 16), None, 1e-3),
        (_float(d, 0, 16), None, _float(d, 16)),
    ]


def _layer_norm_backward(d):
    x, weight, bias = _float(d, 2, 3, 16), _float(d, 16), _float(d, 16)
    mean, rstd = _float(d, 2, 3), _float(d, 2, 3).abs()
    return [
        (_float(d, 2, 3, 16), _transposed(x), weight, bias, mean, rstd, True, True, True),
        (_float(d, 2, 3, 16), x, weight, None, mean, rstd, False, True, False),
        (_float(d, 2, 3, 16), x, None, bias, mean, rstd, True, False, True),
        (_float(d, 2, 3, 16), x, weight, bias, mean, rstd, True, False, False),
    ]


def _group_norm(d):
    return [
        (_float(d, 2, 6, 5), 3, _float(d, 6), _float(d, 6)),
        (_transposed(_float(d, 2, 4, 3, 3)), 2, None, _float(d, 4), 1e-3),
        (_float(d, 3, 4), 4, _float(d, 4)),
        (_float(d, 0, 4, 2), 2),
    ]


def _group_norm_backward(d):
    x, weight, bias = _float(d, 2, 6, 5), _float(d, 6), _float(d, 6)
    mean, rstd = _float(d, 2, 3), _float(d, 2, 3).abs()
    return [
        (_float(d, 2, 6, 5), _transposed(x), 3, weight, bias, mean, rstd, True, True, True),
        (_float(d, 2, 6, 5), x, 3, weight, None, mean, rstd, False, True, False),
        (_float(d, 2, 6, 5), x, 3, None, bias, mean, rstd, True, False, True),
    ]


def _rope(d):
    return [
        (_float(d, 2, 4, 3, 8), _float(d, 2, 2, 3, 8), _float(d, 3, 8), _float(d, 3, 8)),
        (
            _float(d, 2, 3, 4, 8).transpose(1, 2),
            _float(d, 2, 3, 1, 8).transpose(1, 2),
            _float(d, 2, 3, 4),
            _float(d, 2, 3, 4),
            True,
        ),
        (_float(d, 2, 4, 0, 8), _float(d, 2, 2, 0, 8), _float(d, 1, 0, 8), _float(d, 1, 0, 8)),
    ]


def _gate_and_up(d):
    return [
        (_float(d, 3, 16), _float(d, 3, 16)),
        (_transposed(_float(d, 2, 3, 10)), _float(d, 2, 3, 20)[..., ::2]),
        (_float(d, 0, 16), _float(d, 0, 16)),
    ]


def _rows(d):
    """x of an op over rows or elements, or gate and up side by side."""
    return [(_float(d, 3, 16),), (_transposed(_float(d, 2, 3, 10)),), (_float(d, 0, 16),)]


_packed = _rows


def _approximated(samples):
    return lambda d: [*samples(d), *((*inputs, "tanh") for inputs in samples(d))]


def _after_gradient(samples, product_of, *options):
    """Samples of a backward op: the upstream gradient, the inputs, the options."""
    return lambda d: [(torch.randn_like(product_of(*inputs)), *inputs, *options) for inputs in samples(d)]


def _first(gate, up):
    return gate


def _itself(x):
    return x


def _first_half(gate_up):
    return gate_up[..., : gate_up.shape[-1] // 2]


def _mlp(d, leading=(2, 3), hidden=8, intermediate=6, packed=False, bias=False):
    """x, the three weights, the three biases."""
    inner = [(2 * intermediate,), None] if packed else [(intermediate,), (intermediate,)]
    weights = [None if rows is None else _float(d, *rows, hidden) for rows in inner]
    biases = [None if rows is None else _float(d, *rows) for rows in inner]
    biases = [*biases, _float(d, hidden)] if bias else [None] * 3
    return _float(d, *leading, hidden), *weights, _float(d, hidden, intermediate), *biases


def _tiled_mlp(d):
    packed = _mlp(d, (7,), packed=True, bias=True)
    return [
        _mlp(d),
        (*_mlp(d, (4, 3), bias=True), "gelu_tanh", 3),
        (*packed, "silu", 2, 1 << 20),
        (_transposed(_mlp(d, (3, 4))[0]), *_mlp(d)[1:], "gelu", 5, 700),
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


def _target(d, rows, classes, ignored=1):
    target = torch.randint(classes, (rows,), device=d)
    target[:ignored] = -100
    return target


def _cross_entropy(d):
    return [
        (_float(d, 2, 3, 11), _target(d, 6, 11).view(2, 3)),
        (
            _float(d, 5, 11),
            _target(d, 5, 11),
            _float(d, 11).abs(),
            _float(d, 5).abs(),
            None,
            -100,
            0.1,
            1e-3,
            5.0,
            "none",
        ),
        (
            _float(d, 5, 11),
            _target(d, 5, 11),
            None,
            None,
            torch.tensor(7, device=d),
            -100,
            0.0,
            0.0,
            None,
            "sum",
        ),
    ]


def _cross_entropy_forward_(d):
    logits, target = _float(d, 6, 11), _target(d, 6, 11)
    none, every = (False,) * 5, (True,) * 5
    weights = _float(d, 11).abs(), _float(d, 6).abs()
    denominator = torch.tensor(4.0, device=d)
    return [
        (logits, target, None, None, None, -100, 0.0, 0.0, None, "mean", *none),
        (_transposed(logits), target, *weights, None, -100, 0.1, 1e-3, 5.0, "none", *every),
        (_float(d, 6, 22)[:, :11], target, None, None, denominator, -100, 0.0, 0.0, None, "sum", *every),
    ]  # fmt: skip


def _cross_entropy_forward(d):
    return [
        (*arguments, need_grad) for arguments in _cross_entropy_forward_(d) for need_grad in (False, True)
    ]


def _cross_entropy_backward(d):
    logits, target = _float(d, 6, 11), _target(d, 6, 11)
    lse = logits.logsumexp(-1)
    one = torch.tensor(5.0, device=d)
    return [
        (torch.tensor(2.0, device=d), logits, target, lse, one, None, None, -100, 0.0, 0.0, None),
        (
            _float(d, 6),
            _transposed(_float(d, 6, 11)),
            target,
            lse,
            torch.ones_like(one),
            _float(d, 11).abs(),
            _float(d, 6).abs(),
            -100,
            0.1,
            1e-3,
            5.0,
        ),
    ]


def _fused_linear_ce(d):
    return [
        (_float(d, 2, 3, 8), _float(d, 11, 8), _target(d, 6, 11).view(2, 3)),
        (
            _float(d, 6, 8),
            _float(d, 11, 8),
            _target(d, 6, 11),
            _float(d, 11),
            _float(d, 11).abs(),
            _float(d, 6).abs(),
            None,
            -100,
            0.1,
            1e-3,
            5.0,
            "none",
        ),
    ]


def _fused_linear_ce_forward(d):
    tensors = _float(d, 6, 8), _float(d, 11, 8), _target(d, 6, 11)
    weights = _float(d, 11).abs(), _float(d, 6).abs()
    none, every = (False,) * 5, (True,) * 5
    plain = (None, None, None, None, -100, 0.0, 0.0, None)
    return [
        (*tensors, *plain, "mean", None, None, *none, True, True, False),
        (*tensors, *plain, "mean", None, 64, *none, True, True, False),
        (*tensors, *plain, "sum", torch.float32, None, *none, False, True, False),
        (*tensors, *plain, "mean", None, None, *none, True, False, False),
        (
            *tensors,
            _float(d, 11),
            *weights,
            None,
            -100,
            0.1,
            1e-3,
            5.0,
            "sum",
            None,
            None,
            *every,
            True,
            True,
            True,
        ),
        (
            *tensors,
            _float(d, 11),
            *weights,
            None,
            -100,
            0.1,
            1e-3,
            5.0,
            "none",
            None,
            None,
            *every,
            *none[:3],
        ),
    ]


def _fused_linear_logprobs_forward(d):
    tensors = _float(d, 6, 8), _float(d, 11, 8), _target(d, 6, 11)
    return [
        (*tensors, None, 1.0, -100, None, None, False, False),
        (*tensors, _float(d, 11), 0.7, -100, 5.0, 64, True, True),
        (*tensors, None, 1.0, -100, None, None, True, False),
        (_float(d, 0, 8), tensors[1], tensors[2][:0], None, 2.0, -100, None, None, True, True),
    ]


def _fused_linear_logprobs_backward(d):
    samples = []
    for tensors in _fused_linear_logprobs_forward(d):
        rows, entropy = len(tensors[0]), tensors[-2]
        grads = _float(d, rows), _float(d, rows) if entropy else None
        for needed in ((True, True, True), (False, True, False), (True, False, False)):
            samples.append((*grads, *tensors[:-3], None, tensors[-3], *needed))
    return samples


def _cross_entropy_stats(d):
    logits, target = _float(d, 6, 11), _target(d, 6, 30)
    return [
        (logits, target, None, 10, -100, None, False),
        (_transposed(logits), target.int(), None, 0, -100, 5.0, True),
        (_float(d, 6, 22)[:, ::2], target, _float(d, 11).abs(), 10, 2, None, True),
        (_float(d, 0, 11), target[:0], None, 10, -100, None, False),
    ]


def _cross_entropy_stats_backward(d):
    samples = []
    for logits, target, ce_weight, start, ignore_index, softcap, per_class in _cross_entropy_stats(d):
        of_exp, of_target, of_class = (_float(d, len(target)) for _ in range(3))
        coefficients = (_float(d, len(target)) + 3, of_exp, of_target, of_class if per_class else None)
        samples.append((logits, target, *coefficients, ce_weight, start, ignore_index, softcap))
    return samples


def _divergence_forward_(d):
    student, teacher, target = _float(d, 6, 11), _float(d, 6, 11), _target(d, 6, 11)
    logs, weight = [t.log_softmax(-1) for t in (student, teacher)], torch.rand(6, device=d)
    return [
        (student, teacher, None, None, "forward_kl", 0.5, 1.0, False, -100, False),
        (_transposed(student), teacher, target.int(), weight, "jsd", 0.3, 2.0, False, -100, False),
        (student, _float(d, 6, 22)[:, ::2], target, weight, "tvd", 0.5, 0.5, False, 3, True),
        (*logs, None, weight[:1].expand(6), "reverse_kl", 0.5, 1.0, True, -100, False),
        (student, teacher, target, weight[0], "reverse_kl", 0.5, 1.0, False, -100, False),
        (_float(d, 0, 11), _float(d, 0, 11), target[:0], None, "jsd", 0.5, 1.0, False, -100, False),
    ]


def _divergence_ce_forward_(d):
    return [
        (student, teacher, target, weight, divergence, beta, 0.7, -100)
        for student, teacher, target, weight, divergence, beta, *_ in _divergence_forward_(d)
        if target is not None
    ]


def _divergence_forward(d):
    return [(*arguments, need_grad) for arguments in _divergence_forward_(d) for need_grad in (False, True)]


def _divergence_backward(d):
    samples = []
    for student, teacher, target, weight, *options, _ in _divergence_forward_(d):
        _, stats, _ = torch.ops.liger.divergence_forward(
            student, teacher, target, weight, *options, True, False
        )
        for grad_loss in (_float(d, len(student)), torch.tensor(2.0, device=d)):
            samples.append((grad_loss, student, teacher, target, stats, *options))
    return samples


def _pair(d):
    """Student and teacher logits with a target and a token weight each."""
    return _float(d, 6, 11), _float(d, 6, 11), _target(d, 6, 11), _float(d, 6).abs()


def _divergence_of(*option):
    """Samples of a public op with one option of its own, or none, between the denominator and the temperature."""

    def samples(d):
        *pair, target, token_weight = _pair(d)
        count = torch.tensor(7, device=d)
        return [
            tuple(t.view(2, 3, 11) for t in pair),
            (*pair, target, token_weight, None, *option, 2.0, False, -100, "none"),
            (*pair, None, None, count, *option, 1.0, False, -100, "batchmean"),
        ]

    return samples


def _linear_pair(d):
    """Hidden states and weight of the student, those of the teacher."""
    return _float(d, 6, 8), _float(d, 11, 8), _float(d, 6, 5), _float(d, 11, 5)


def _fused_linear_divergence_of(option):
    def samples(d):
        tensors, (target, token_weight) = _linear_pair(d), (_target(d, 6, 11), torch.rand(6, device=d))
        return [
            tensors,
            (*tensors[:2], _float(d, 6, 11), None, target),
            (*tensors, target, *torch.randn(2, 11, device=d), token_weight, None, option, 2.0, -100, "none"),
        ]

    return samples


def _fused_linear_divergence_forward(d):
    tensors, (target, row_weight) = _linear_pair(d), (_target(d, 6, 11), torch.rand(6, device=d))
    every, biases = (True, True, True), torch.randn(2, 11, device=d).unbind()
    small = (None, 3 * 48 * 4)  # two rows of the student and one of the teacher
    logits, (logp, indices) = _float(d, 6, 11), _float(d, 6, 11).log_softmax(-1).topk(3)
    return [
        (*tensors, *(None,) * 5, "jsd", 0.5, 1.0, 1.0, 0.0, -100, False, None, None, True, True, False),
        (*tensors, None, target, *biases, row_weight, "jsd", 0.1, 2.0, 0.7, 0.3, -100, False, *small, *every),
        (*tensors, None, target, *biases, row_weight, "tvd", 0.1, 2.0, 1.0, 0.0, -100, True, *small, *(False,) * 3),
        (*tensors[:2], logits, *(None,) * 6, "forward_kl", 0.5, 1.0, 1.0, 0.0, -100, False, *small, False, True, True),
        (*tensors, None, target, None, None, row_weight, "cosine", 0.5, 1.0, 1.0, 2.0, -100, False, *small, *every),
        (*tensors[:2], logp, None, indices, target, biases[0], None, row_weight, "topk_tail", 0.5, 1.0, 1.0, 2.0, -100,
         False, *small, *every),
        (*tensors, None, target, *biases, None, "jsd", 0.5, 1.0, 0.0, 1.0, -100, False, *small, *every),
    ]  # fmt: skip


def _rescale(d):
    return [
        (_float(d, 3, 4), torch.tensor(2.5, device=d)),
        (_transposed(_float(d, 3, 4)), torch.tensor([2.5], device=d)),
        (_float(d, 0, 4), torch.tensor(2.5, device=d)),
    ]


def _on_logits(d):
    return [(_float(d, 6, 11), _target(d, 6, 11), _float(d, 11), None, None, 0.1, 5.0, "mean")]


def _on_input(d):
    tensors = _float(d, 6, 8), _float(d, 11, 8), _target(d, 6, 11)
    return [(*tensors, None, None, None, None, 0.0, None, "mean", torch.float32, 1024)]


SAMPLES = {
    "rms_norm": _rms_norm,
    "rms_norm_backward": _rms_norm_backward,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "fused_add_rms_norm_backward": _fused_add_rms_norm_backward,
    "layer_norm": _layer_norm,
    "layer_norm_backward": _layer_norm_backward,
    "group_norm": _group_norm,
    "group_norm_backward": _group_norm_backward,
    "rope": _rope,
    "rope_backward": _rope,
    "rope_": _rope,
    "swiglu": _gate_and_up,
    "swiglu_backward": lambda d: [
        *_after_gradient(_gate_and_up, _first)(d),
        *_after_gradient(_gate_and_up, _first, True)(d),
    ],
    "swiglu_backward_": _after_gradient(_gate_and_up, _first),
    "swiglu_backward_product_": _after_gradient(_gate_and_up, _first),
    "swiglu_packed": _packed,
    "swiglu_packed_backward": lambda d: [
        *_after_gradient(_packed, _first_half)(d),
        *_after_gradient(_packed, _first_half, True)(d),
    ],
    "swiglu_packed_backward_": _after_gradient(_packed, _first_half),
    "geglu": _approximated(_gate_and_up),
    "geglu_backward": lambda d: [
        *_after_gradient(_gate_and_up, _first)(d),
        *_after_gradient(_gate_and_up, _first, True, "tanh")(d),
    ],
    "geglu_backward_": _after_gradient(_gate_and_up, _first, "tanh"),
    "geglu_backward_product_": _after_gradient(_gate_and_up, _first, "none"),
    "geglu_packed": _approximated(_packed),
    "geglu_packed_backward": lambda d: [
        *_after_gradient(_packed, _first_half)(d),
        *_after_gradient(_packed, _first_half, True, "tanh")(d),
    ],
    "geglu_packed_backward_": _after_gradient(_packed, _first_half, "tanh"),
    "relu_squared": _rows,
    "relu_squared_backward": _after_gradient(_rows, _itself),
    "softmax": _rows,
    "softmax_backward": _after_gradient(_rows, _itself),
    "cross_entropy": _cross_entropy,
    "cross_entropy_forward": _cross_entropy_forward,
    "cross_entropy_forward_": _cross_entropy_forward_,
    "cross_entropy_backward": _cross_entropy_backward,
    "cross_entropy_backward_": _cross_entropy_backward,
    "cross_entropy_stats": _cross_entropy_stats,
    "cross_entropy_stats_backward": _cross_entropy_stats_backward,
    "cross_entropy_stats_backward_": _cross_entropy_stats_backward,
    "fused_linear_ce": _fused_linear_ce,
    "fused_linear_ce_forward": _fused_linear_ce_forward,
    "kl_div": _divergence_of(True),
    "jsd": _divergence_of(0.3),
    "tvd": _divergence_of(),
    "divergence_forward": _divergence_forward,
    "divergence_forward_": _divergence_forward_,
    "divergence_ce_forward_": _divergence_ce_forward_,
    "divergence_backward": _divergence_backward,
    "fused_linear_kl_div": _fused_linear_divergence_of(True),
    "fused_linear_jsd": _fused_linear_divergence_of(0.3),
    "fused_linear_divergence_forward": _fused_linear_divergence_forward,
    "fused_linear_logprobs_forward": _fused_linear_logprobs_forward,
    "fused_linear_logprobs_backward": _fused_linear_logprobs_backward,
    "tiled_mlp": _tiled_mlp,
    "tiled_mlp_forward": _tiled_mlp_forward,
    "tiled_mlp_backward": _tiled_mlp_backward,
    "rescale": _rescale,
    "rescale_": _rescale,
    "check_rms_norm": lambda d: [("rms_norm", _float(d, 3, 16), None, _float(d, 16), "llama")],
    "check_layer_norm": lambda d: [("layer_norm", *arguments[:3]) for arguments in _layer_norm(d)],
    "check_group_norm": lambda d: [
        ("group_norm", *(*arguments, None, None)[:4]) for arguments in _group_norm(d)
    ],
    "check_rope": lambda d: [(*arguments, False)[:5] for arguments in _rope(d)],
    "check_rowwise": lambda d: [("softmax", "x", _float(d, 3, 16), None)],
    "check_approximate": lambda d: [("geglu", "none"), ("geglu", "tanh")],
    "check_gated": lambda d: [("swiglu", *arguments, None) for arguments in _gate_and_up(d)],
    "check_tiled_mlp": lambda d: [_with_options(arguments) for arguments in _tiled_mlp(d)],
    "check_divergence": lambda d: [("jsd", *arguments[:-2]) for arguments in _divergence_forward_(d)],
    "check_fused_linear_divergence": lambda d: [
        (*arguments[:14], *arguments[16:18]) for arguments in _fused_linear_divergence_forward(d)
    ],
    "default_memory_budget": lambda d: [()],
    "check_cross_entropy": lambda d: [("cross_entropy", *arguments) for arguments in _on_logits(d)],
    "check_fused_linear_ce": _on_input,
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
    ],
}
