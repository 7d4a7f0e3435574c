# SPDX-License-Identifier: BSD-3-Clause
"""Arguments of the ops of losses: see samples.py."""

import torch
from sample_tensors import floats, transposed


def _target(d, rows, classes, ignored=1):
    target = torch.randint(classes, (rows,), device=d)
    target[:ignored] = -100
    return target


def _cross_entropy(d):
    return [
        (floats(d, 2, 3, 11), _target(d, 6, 11).view(2, 3)),
        (
            floats(d, 5, 11), _target(d, 5, 11), floats(d, 11).abs(), floats(d, 5).abs(), None, -100, 0.1,
            1e-3, 5.0, "none",
        ),
        (
            floats(d, 5, 11), _target(d, 5, 11), None, None, torch.tensor(7, device=d), -100, 0.0, 0.0, None,
            "sum",
        ),
    ]  # fmt: skip


def _cross_entropy_forward_(d):
    logits, target = floats(d, 6, 11), _target(d, 6, 11)
    none, every = (False,) * 5, (True,) * 5
    weights = floats(d, 11).abs(), floats(d, 6).abs()
    denominator = torch.tensor(4.0, device=d)
    return [
        (logits, target, None, None, None, -100, 0.0, 0.0, None, "mean", *none),
        (transposed(logits), target, *weights, None, -100, 0.1, 1e-3, 5.0, "none", *every),
        (floats(d, 6, 22)[:, :11], target, None, None, denominator, -100, 0.0, 0.0, None, "sum", *every),
    ]  # fmt: skip


def _cross_entropy_forward(d):
    return [
        (*arguments, need_grad) for arguments in _cross_entropy_forward_(d) for need_grad in (False, True)
    ]


def _cross_entropy_backward(d):
    logits, target = floats(d, 6, 11), _target(d, 6, 11)
    stats = torch.stack((logits.amax(-1), torch.full_like(logits[:, 0], 3.0)))
    one = torch.tensor(5.0, device=d)
    return [
        (torch.tensor(2.0, device=d), logits, target, stats, one, None, None, -100, 0.0, 0.0, None),
        (
            floats(d, 6), transposed(floats(d, 6, 11)), target, stats, torch.ones_like(one),
            floats(d, 11).abs(), floats(d, 6).abs(), -100, 0.1, 1e-3, 5.0,
        ),
    ]  # fmt: skip


def _fused_linear_ce(d):
    return [
        (floats(d, 2, 3, 8), floats(d, 11, 8), _target(d, 6, 11).view(2, 3)),
        (
            floats(d, 6, 8), floats(d, 11, 8), _target(d, 6, 11), floats(d, 11), floats(d, 11).abs(),
            floats(d, 6).abs(), None, -100, 0.1, 1e-3, 5.0, "none",
        ),
    ]  # fmt: skip


def _fused_linear_ce_forward(d):
    tensors = floats(d, 6, 8), floats(d, 11, 8), _target(d, 6, 11)
    weights = floats(d, 11).abs(), floats(d, 6).abs()
    none, every = (False,) * 5, (True,) * 5
    plain = (None, None, None, None, -100, 0.0, 0.0, None)
    return [
        (*tensors, *plain, "mean", None, None, *none, True, True, False),
        (*tensors, *plain, "mean", None, 64, *none, True, True, False),
        (*tensors, *plain, "sum", torch.float32, None, *none, False, True, False),
        (*tensors, *plain, "mean", None, None, *none, True, False, False),
        (
            *tensors, floats(d, 11), *weights, None, -100, 0.1, 1e-3, 5.0, "sum", None, None, *every, True,
            True, True,
        ),
        (
            *tensors, floats(d, 11), *weights, None, -100, 0.1, 1e-3, 5.0, "none", None, None, *every,
            *none[:3],
        ),
    ]  # fmt: skip


def _fused_linear_logprobs_forward(d):
    tensors = floats(d, 6, 8), floats(d, 11, 8), _target(d, 6, 11)
    return [
        (*tensors, None, 1.0, -100, None, None, False, False),
        (*tensors, floats(d, 11), 0.7, -100, 5.0, 64, True, True),
        (*tensors, None, 1.0, -100, None, None, True, False),
        (floats(d, 0, 8), tensors[1], tensors[2][:0], None, 2.0, -100, None, None, True, True),
        (*tensors, floats(d, 11), 0.7, -100, 5.0, 64, True, True, True, True, "logits", True),
        (*tensors, None, 1.0, -100, None, None, False, False, False, True, "logits", False),
        (
            *tensors,
            floats(d, 11),
            0.7,
            -100,
            None,
            64,
            True,
            True,
            True,
            False,
            "nothing",
            False,
            torch.float32,
        ),
        (
            *tensors,
            floats(d, 11),
            0.7,
            -100,
            5.0,
            64,
            True,
            True,
            False,
            False,
            "logits",
            True,
            torch.float32,
        ),
        (*tensors, None, 0.7, -100, None, 64, False, False, True, True, "nothing", True, None, torch.float32),
    ]


def _factors(d):
    """(lora_a, lora_b, down): either the first or the last, which are for 6 rows."""
    a, b, down = floats(d, 3, 8), floats(d, 11, 3), floats(d, 6, 3)
    return (a, b, None), (None, b, down)


def _fused_linear_ce_lora_forward(d):
    tensors, weights = (floats(d, 6, 8), floats(d, 11, 8), _target(d, 6, 11)), (None, None, None)
    plain, options = (
        (0.7, -100, 0.0, 0.0, None, "mean", None, None),
        (floats(d, 11).abs(), floats(d, 6).abs()),
    )
    with_a, with_down = _factors(d)
    every, none, no_rows = (True,) * 5, (False,) * 5, (tensors[0][:0], tensors[1], tensors[2][:0])
    rest = -0.3, -100, 0.1, 1e-3, 5.0
    return [
        (*tensors, None, *with_a, *weights, *plain, *none, *(True,) * 6),
        (*tensors, floats(d, 11), *with_down, *weights, *plain, *every, *(True,) * 6),
        (*tensors, floats(d, 11), *with_a, *options, None, *rest, "sum", None, 64, *every, *(True,) * 6),
        (*tensors, floats(d, 11), *with_a, *options, None, *rest, "none", None, 64, *every, *(False,) * 6),
        (*tensors, None, *with_down, *weights, *plain, *none, False, True, False, False, True, False),
        (*no_rows, None, *with_a, *weights, *rest, "sum", None, None, *none, *(True,) * 6),
    ]


def _fused_linear_logprobs_lora_forward(d):
    tensors, (with_a, with_down) = (floats(d, 6, 8), floats(d, 11, 8), _target(d, 6, 11)), _factors(d)
    no_rows = tensors[0][:0], tensors[1], tensors[2][:0]
    return [
        (*tensors, None, *with_a, 0.7, 1.0, -100, None, None, False, False, False, False, None, None),
        (
            *tensors,
            floats(d, 11),
            *with_down,
            1.0,
            0.7,
            -100,
            5.0,
            64,
            True,
            True,
            True,
            True,
            None,
            torch.float32,
        ),
        (
            *tensors,
            floats(d, 11),
            *with_a,
            -0.7,
            2.0,
            -100,
            5.0,
            64,
            True,
            False,
            False,
            True,
            torch.float32,
            None,
        ),
        (*no_rows, None, *with_a, 0.7, 1.0, -100, None, None, True, True, True, True, None, None),
    ]


def _fused_linear_logprobs_lora_backward(d):
    samples = []
    for arguments in _fused_linear_logprobs_lora_forward(d):
        tensors, (*options, entropy, _, _, _, logits_dtype, accum_dtype) = arguments[:7], arguments[7:]
        rows = len(tensors[0])
        grads = floats(d, rows), floats(d, rows) if entropy else None
        for needed in ((True,) * 6, (False, True, False, False, True, False)):
            samples.append((*grads, *tensors, *options, *needed, logits_dtype, accum_dtype))
    return samples


def _fused_linear_logprobs_backward(d):
    samples = []
    for arguments in _fused_linear_logprobs_forward(d):
        tensors, (budget, entropy), options = arguments[:7], arguments[7:9], arguments[12:]
        rows = len(tensors[0])
        kept = ()
        if options:
            keep, _, *logits_dtype = options[:3]
            kept_tensors = torch.ops.liger.fused_linear_logprobs_forward(*arguments)[5:]
            kept = keep, *kept_tensors, *logits_dtype
        grads = floats(d, rows), floats(d, rows) if entropy else None
        for needed in ((True, True, True), (False, True, False), (True, False, False)):
            samples.append((*grads, *tensors, None, budget, *needed, *kept))
    return samples


def _fused_linear_ce_add_grad_weight_(d):
    tensors = floats(d, 6, 8), floats(d, 11, 8), _target(d, 6, 11)
    plain, upstream = (-100, 0.0, 0.0, None), torch.tensor(0.5, device=d)
    count = torch.tensor(5, device=d)
    return [
        (floats(d, 11, 8), upstream, *tensors, None, None, None, None, *plain, "mean", None),
        (
            floats(d, 11, 8), floats(d, 6), *tensors, floats(d, 11), floats(d, 11).abs(), floats(d, 6).abs(), None,
            -100, 0.1, 1e-3, 5.0, "none", 64,
        ),
        (floats(d, 11, 8), upstream, *tensors, None, None, None, count, *plain, "sum", 64),
    ]  # fmt: skip


def _fused_linear_logprobs_add_grad_weight_(d):
    tensors = floats(d, 6, 8), floats(d, 11, 8), _target(d, 6, 11)
    return [
        (floats(d, 11, 8), floats(d, 6), None, *tensors, None, 1.0, -100, None, None),
        (
            floats(d, 11, 8), floats(d, 6), floats(d, 6), *tensors, floats(d, 11), 0.7, -100, 5.0, 64,
            torch.float32,
        ),
    ]  # fmt: skip


def _cross_entropy_stats(d):
    logits, target = floats(d, 6, 11), _target(d, 6, 30)
    return [
        (logits, target, None, 10, -100, None, False),
        (transposed(logits), target.int(), None, 0, -100, 5.0, True),
        (floats(d, 6, 22)[:, ::2], target, floats(d, 11).abs(), 10, 2, None, True),
        (floats(d, 0, 11), target[:0], None, 10, -100, None, False),
        (transposed(logits), target, None, 0, -100, 5.0, True, True),
        (floats(d, 6, 22)[:, ::2], target, None, 10, 2, None, False, True),
    ]


def _cross_entropy_stats_backward(d):
    samples = []
    for logits, target, ce_weight, start, ignore_index, softcap, per_class, *_ in _cross_entropy_stats(d):
        coef_exp, coef_target, coef_class = (floats(d, len(target)) for _ in range(3))
        coefficients = (floats(d, len(target)) + 3, coef_exp, coef_target, coef_class if per_class else None)
        rest = (ce_weight, start, ignore_index, softcap)
        samples += [(logits, target, *coefficients, *rest, log) for log in (None, floats(d, len(target)))]
    return samples


def _divergence_forward_(d):
    student, teacher, target = floats(d, 6, 11), floats(d, 6, 11), _target(d, 6, 11)
    logs, weight = [t.log_softmax(-1) for t in (student, teacher)], torch.rand(6, device=d)
    return [
        (student, teacher, None, None, "forward_kl", 0.5, 1.0, False, -100, False),
        (transposed(student), teacher, target.int(), weight, "jsd", 0.3, 2.0, False, -100, False),
        (student, floats(d, 6, 22)[:, ::2], target, weight, "tvd", 0.5, 0.5, False, 3, True),
        (*logs, None, weight[:1].expand(6), "reverse_kl", 0.5, 1.0, True, -100, False),
        (student, teacher, target, weight[0], "reverse_kl", 0.5, 1.0, False, -100, False),
        (floats(d, 0, 11), floats(d, 0, 11), target[:0], None, "jsd", 0.5, 1.0, False, -100, False),
    ]


def _divergence_ce_forward_(d):
    samples = []
    for (
        student,
        teacher,
        target,
        weight,
        divergence,
        beta,
        temperature,
        log_probs,
        *_,
    ) in _divergence_forward_(d):
        hard = 0.7 if target is not None and temperature == 1.0 else 0.0
        rest = (target, weight, divergence, beta, temperature, hard, -100)
        if not log_probs:
            samples.append((student, teacher, *rest, torch.empty_like(student)))
        if student.dtype == torch.float32:
            samples.append((student, teacher, *rest, torch.empty_like(student, dtype=torch.bfloat16)))
    return samples


def _divergence_forward(d):
    return [(*arguments, need_grad) for arguments in _divergence_forward_(d) for need_grad in (False, True)]


def _divergence_backward(d):
    samples = []
    for student, teacher, target, weight, *options, _ in _divergence_forward_(d):
        _, stats, _ = torch.ops.liger.divergence_forward(
            student, teacher, target, weight, *options, True, False
        )
        for grad_loss in (floats(d, len(student)), torch.tensor(2.0, device=d)):
            samples.append((grad_loss, student, teacher, target, stats, *options))
    return samples


def _pair(d):
    """Student and teacher logits with a target and a token weight each."""
    return floats(d, 6, 11), floats(d, 6, 11), _target(d, 6, 11), floats(d, 6).abs()


def _divergence_of(*option):
    """Samples of a public op with one option of its own, or none, between the denominator and the
    temperature."""

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
    """Hidden states and weights of the student and of the teacher."""
    return floats(d, 6, 8), floats(d, 11, 8), floats(d, 6, 5), floats(d, 11, 5)


def _fused_linear_divergence_of(option):
    def samples(d):
        tensors, (target, token_weight) = _linear_pair(d), (_target(d, 6, 11), torch.rand(6, device=d))
        head, teacher, biases = tensors[:2], tensors[2:], torch.randn(2, 11, device=d)
        return [
            (*head, None, None, *teacher),
            (*head, target, None, None, None, None, floats(d, 6, 11)),
            (
                *head,
                target,
                biases[0],
                *teacher,
                biases[1],
                None,
                option,
                token_weight,
                None,
                -100,
                "none",
                None,
                64,
                2.0,
            ),
        ]

    return samples


def _fused_linear_divergence_forward(d):
    tensors, (target, row_weight) = _linear_pair(d), (_target(d, 6, 11), torch.rand(6, device=d))
    every, biases = (True, True, True), torch.randn(2, 11, device=d).unbind()
    small = (None, 3 * 48 * 4)  # two rows of the student and one of the teacher
    logits, (logp, indices) = floats(d, 6, 11), floats(d, 6, 11).log_softmax(-1).topk(3)
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


def _on_logits(d):
    return [(floats(d, 6, 11), _target(d, 6, 11), floats(d, 11), None, None, 0.1, 5.0, "mean")]


def _on_input(d):
    tensors = floats(d, 6, 8), floats(d, 11, 8), _target(d, 6, 11)
    return [(*tensors, None, None, None, None, 0.0, None, "mean", torch.float32, 1024)]


SAMPLES = {
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
    "fused_linear_ce_lora_forward": _fused_linear_ce_lora_forward,
    "fused_linear_logprobs_lora_forward": _fused_linear_logprobs_lora_forward,
    "fused_linear_logprobs_lora_backward": _fused_linear_logprobs_lora_backward,
    "fused_linear_logprobs_backward": _fused_linear_logprobs_backward,
    "fused_linear_ce_add_grad_weight_": _fused_linear_ce_add_grad_weight_,
    "fused_linear_logprobs_add_grad_weight_": _fused_linear_logprobs_add_grad_weight_,
    "check_divergence_gradient": lambda d: [
        ("divergence_ce_forward_", arguments[0], arguments[2], arguments[6], arguments[7], arguments[9])
        for arguments in _divergence_ce_forward_(d)
    ],
    "check_divergence": lambda d: [("jsd", *arguments[:-2]) for arguments in _divergence_forward_(d)],
    "check_fused_linear_divergence": lambda d: [
        (*arguments[:14], *arguments[16:18]) for arguments in _fused_linear_divergence_forward(d)
    ],
    "check_cross_entropy": lambda d: [("cross_entropy", *arguments) for arguments in _on_logits(d)],
    "check_fused_linear_ce": _on_input,
}
