# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy, log-probabilities and divergences, over logits and over a projection, with all their
options."""

import formulas
import torch
import torch.nn.functional as F
from engine import Numbers, compare, dtypes, fuzz, leading, maybe, one_of
from hypothesis import strategies as st
from lm_head import budget, differentiable

import liger

# Of one class every result is 0, and what is found is rounding.
classes = st.sampled_from([2, 3, 5, 8, 17, 33, 64])
METRICS = ("z_loss", "token_accuracy", "argmax", "logprobs", "entropy")


def rows_of(draw):
    """(leading sizes of the logits, sizes of the target)"""
    return tuple(leading(draw)) or (draw(st.sampled_from([1, 2, 7])),)


def flat(formula, tensors):
    """A formula of rows, for tensors with any leading sizes; results per row get theirs back."""

    def call(**given):
        front = given["target"].shape
        rows = {n: t.flatten(0, len(front) - 1) if n in tensors else t for n, t in given.items()}
        results = formula(**rows)
        rows_count = front.numel()
        return {
            n: r.reshape(front) if r.dim() == 1 and r.shape[0] == rows_count and n != "token_accuracy" else r
            for n, r in results.items()
        }

    return call


def ce_options(draw, numbers, front, vocab):
    """(tensors, options) of cross entropy."""
    ignore_index = one_of(draw, -100, -100, -1, 0, vocab - 1)
    options = {
        "ignore_index": ignore_index,
        "label_smoothing": one_of(draw, 0.0, 0.0, 0.1, 1.0),
        "lse_square_scale": one_of(draw, 0.0, 0.0, 1e-4, 0.1),
        "softcap": maybe(draw, 1.5, 30.0),
        "reduction": one_of(draw, "mean", "sum", "none"),
    }
    tensors = {"target": numbers.classes(vocab, *front, ignored=(ignore_index,))}
    if draw(st.booleans()):
        tensors["ce_weight"] = numbers.uniform(vocab, low=0.2, high=2.0, dtype=torch.float32)
    if draw(st.booleans()):
        tensors["token_weight"] = numbers.uniform(*front, low=-0.5, high=2.0, dtype=torch.float32)
    if options["reduction"] != "none" and draw(st.booleans()):
        tensors["denominator"] = numbers.uniform(1, low=1.0, high=9.0, dtype=torch.float32)[0]
    return tensors, options


def ce_results(output, wanted):
    if not wanted:
        return {"loss": output}
    return {"loss": output.loss, **{n: getattr(output, n) for n in wanted}}


@fuzz(10)
def test_cross_entropy(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    front, vocab = rows_of(draw), draw(classes)
    tensors, options = ce_options(draw, numbers, front, vocab)
    tensors["logits"] = numbers.normal(*front, vocab, scale=one_of(draw, 0.3, 3.0, 20.0))
    wanted = draw(st.lists(st.sampled_from(METRICS), unique=True))
    inplace = draw(st.booleans())
    how = {**options, "metrics": wanted, "inplace": inplace}
    compare(
        lambda logits, **given: ce_results(
            liger.cross_entropy(logits * 1 if inplace else logits, **given, **how), wanted
        ),
        flat(
            lambda **given: formulas.cross_entropy(**given, **options), ("logits", "target", "token_weight")
        ),
        tensors,
        ["logits"],
    )


def layer(draw, numbers, front, vocab):
    hidden = one_of(draw, 1, 3, 8, 16)
    tensors = {
        "input": numbers.normal(*front, hidden),
        "weight": numbers.normal(vocab, hidden, scale=one_of(draw, 0.3, 2.0) * hidden**-0.5, alike=False),
    }
    if draw(st.booleans()):
        tensors["bias"] = numbers.normal(vocab)
    return tensors


@fuzz(9)
def test_fused_linear_ce(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    front, vocab = rows_of(draw), draw(classes)
    tensors, options = ce_options(draw, numbers, front, vocab)
    of_layer = layer(draw, numbers, front, vocab)
    # Which logit of two that are rounded alike is the largest is no question with one answer.
    exact = numbers.dtype in (torch.float32, torch.float64)
    names = [n for n in METRICS if exact or n not in ("token_accuracy", "argmax")]
    wanted = draw(st.lists(st.sampled_from(names), unique=True))
    how = {
        **options, "metrics": wanted, "memory_budget": budget(draw, vocab, numbers.dtype),
        "accum_dtype": maybe(draw, torch.float32) if numbers.dtype != torch.float64 else None,
    }  # fmt: skip
    rule = flat(
        lambda **given: formulas.cross_entropy(**given, **options), ("logits", "target", "token_weight")
    )

    def formula(input, weight, bias=None, **given):
        return rule(logits=F.linear(input, weight, bias), **given)

    compare(
        lambda **given: ce_results(liger.fused_linear_ce(**given, **how), wanted),
        formula,
        tensors | of_layer,
        differentiable(draw, *of_layer),
        vary=list(of_layer),
    )


@fuzz(6)
def test_fused_linear_logprobs(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    front, vocab = rows_of(draw), draw(classes)
    ignore_index = one_of(draw, -100, -1, 0)
    tensors = layer(draw, numbers, front, vocab)
    names = [n for n in ("input", "weight", "bias") if n in tensors]
    tensors["target"] = numbers.classes(vocab, *front, ignored=(ignore_index,))
    softcap, temperature = maybe(draw, 1.5, 30.0), one_of(draw, 1.0, 0.5, 1.7)
    entropy = draw(st.booleans())
    how = {
        "softcap": softcap, "temperature": temperature, "ignore_index": ignore_index,
        "metrics": ("entropy",) if entropy else (), "memory_budget": budget(draw, vocab, numbers.dtype),
    }  # fmt: skip

    def ours(**given):
        result = liger.fused_linear_logprobs(**given, **how)
        return {"logprobs": result.logprobs, "entropy": result.entropy} if entropy else {"logprobs": result}

    def formula(input, weight, target, bias=None):
        live = target != ignore_index
        values = formulas.token_scores(
            input.flatten(0, -2), weight, bias, target.flatten(), temperature, softcap
        )
        both = dict(zip(("logprobs", "entropy"), values, strict=True))
        if not entropy:
            del both["entropy"]
        return {n: torch.where(live, v.reshape(live.shape), 0.0) for n, v in both.items()}

    compare(ours, formula, tensors, differentiable(draw, *names), vary=names)


# --- divergences --------------------------------------------------------------------------------------------


def divergence_options(draw, numbers, front, vocab):
    """(kind, tensors, options)"""
    kind = one_of(draw, "forward_kl", "reverse_kl", "jsd", "jsd", "tvd")
    options = {"temperature": one_of(draw, 1.0, 0.6, 2.0), "ignore_index": one_of(draw, -100, 0)}
    options["reduction"] = one_of(draw, "mean", "sum", "none", "batchmean")
    if kind == "jsd":
        options["beta"] = one_of(draw, 0.0, 0.1, 0.5, 0.9, 1.0)
    tensors = {}
    if draw(st.booleans()):
        tensors["target"] = numbers.classes(vocab, *front, ignored=(options["ignore_index"],))
    if draw(st.booleans()):
        tensors["token_weight"] = numbers.uniform(*front, low=-0.5, high=2.0, dtype=torch.float32)
    if options["reduction"] != "none" and draw(st.booleans()):
        tensors["denominator"] = numbers.uniform(1, low=1.0, high=9.0, dtype=torch.float32)[0]
    return kind, tensors, options


def divergence_of(prefix, kind):
    """The public function, and what it takes beside the options."""
    if kind in ("forward_kl", "reverse_kl"):
        return getattr(liger, f"{prefix}kl_div"), {"reverse": kind == "reverse_kl"}
    return getattr(liger, prefix + kind), {}


def distance(
    kind, student, teacher, options, log_probs=False, target=None, token_weight=None, denominator=None
):
    return formulas.distance(
        kind, student, teacher, target, token_weight, denominator, options.get("beta", 0.5), options["temperature"],
        log_probs, options["ignore_index"], options["reduction"],
    )  # fmt: skip


@fuzz(9)
def test_divergences(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    front, vocab = tuple(leading(draw)), draw(classes)
    kind, tensors, options = divergence_options(draw, numbers, front, vocab)
    function, more = divergence_of("", kind)
    scale = one_of(draw, 0.3, 3.0)
    student = numbers.normal(*front, vocab, scale=scale)
    if draw(st.booleans()):
        # A student near its teacher.
        teacher = (student.double() + numbers.normal(*front, vocab, scale=0.1, dtype=torch.float64)).to(
            numbers.dtype
        )
    else:
        teacher = numbers.normal(*front, vocab, scale=scale)
    log_probs = numbers.dtype in (torch.float32, torch.float64) and draw(st.booleans())
    if log_probs:
        options["temperature"] = 1.0
        student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    compare(
        lambda **given: function(**given, **options, **more, log_probs=log_probs),
        lambda student, teacher, **given: distance(kind, student, teacher, options, log_probs, **given),
        {**tensors, "student": student, "teacher": teacher},
        ["student"],
    )


@fuzz(7)
def test_fused_linear_divergences(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, draw(dtypes))
    front, vocab = rows_of(draw), draw(classes)
    kind, tensors, options = divergence_options(draw, numbers, front, vocab)
    if kind == "tvd":
        return
    function, more = divergence_of("fused_linear_", kind)
    of_student = layer(draw, numbers, front, vocab)
    if draw(st.booleans()):
        width = one_of(draw, 1, 5, 16)
        of_teacher = {
            "teacher_input": numbers.normal(*front, width),
            "teacher_weight": numbers.normal(vocab, width, scale=width**-0.5, alike=False),
        }
        if draw(st.booleans()):
            of_teacher["teacher_bias"] = numbers.normal(vocab)
    else:
        of_teacher = {"teacher_logits": numbers.normal(*front, vocab, scale=2.0)}
    how = {"memory_budget": budget(draw, vocab, numbers.dtype)}

    def formula(
        input, weight, bias=None, teacher_input=None, teacher_weight=None, teacher_bias=None, teacher_logits=None,
        **given,
    ):  # fmt: skip
        teacher = teacher_logits
        if teacher is None:
            teacher = F.linear(teacher_input, teacher_weight, teacher_bias)
        return distance(kind, F.linear(input, weight, bias), teacher, options, **given)

    compare(
        lambda **given: function(**given, **options, **more, **how),
        formula,
        {**tensors, **of_student, **of_teacher},
        differentiable(draw, *of_student),
        vary=list(of_student),
    )
