# SPDX-License-Identifier: BSD-3-Clause
"""Errors of the distillation losses: options, tensors, labels and indices that are no class."""

import pytest
import torch
from distillation_cases import DISTANCES, LENGTH, SEQUENCES, VOCAB, call, make, parts, teacher_arguments
from losses_cases import leaf

from liger import losses


@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**32 + 5])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name", DISTANCES)
def test_label_that_is_no_class(device, name, temperature, wrong):
    """An error on the CPU; on a GPU, where nothing is waited for, the row is nan, as with
    liger.cross_entropy."""
    tensors = make(device)
    module = DISTANCES[name][0](**DISTANCES[name][1], temperature=temperature)
    tensors["labels"][0, 1] = wrong
    tensors["x"] = leaf(tensors["x"])
    if device.type == "cpu":
        with pytest.raises(
            RuntimeError,
            match=f"FusedLinear.*Loss: target at row 1 is {wrong}, expected 0 <= target < {VOCAB}",
        ):
            call(name, module, tensors)
    else:
        loss, soft, hard = parts(name, module, tensors)
        (grad,) = torch.autograd.grad(loss, tensors["x"])
        nan = grad.isnan().any(-1)
        assert loss.isnan() and hard.isnan() and soft.isfinite()
        assert nan.nonzero().tolist() == [[0, 1]]
    # Without cross entropy they say no more than which tokens count.
    options = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0, "metrics": ("entropy",)}
    soft = DISTANCES[name][0](**DISTANCES[name][1], **options)
    assert call(name, soft, tensors).isfinite()


@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**32 + 5])
@pytest.mark.parametrize("name", ["top k", "top k renormalised"])
def test_index_of_a_teacher_that_is_no_class(device, name, wrong):
    tensors, module = make(device), DISTANCES[name][0](**DISTANCES[name][1])
    of_teacher = teacher_arguments(name, tensors)
    log_p, indices = of_teacher["teacher_logprobs"], of_teacher["teacher_indices"]
    indices[0, 1, 2] = wrong
    x = leaf(tensors["x"])

    def run(labels=tensors["labels"]):
        return module(x, tensors["weight"], labels, tensors["bias"], **of_teacher)[0]

    if device.type == "cpu":
        message = (
            rf"FusedLinearTopKLoss: teacher_indices at index \(1, 2\) is {wrong}, expected 0 <= .* < {VOCAB}"
        )
        with pytest.raises(RuntimeError, match=message):
            run()
    else:
        loss = run()
        (grad,) = torch.autograd.grad(loss, x)
        assert loss.isnan() and grad.isnan().any(-1).nonzero().tolist() == [[0, 1]]
    # At an ignored token, and where the log-probability is -inf, the index means nothing.
    ignored = tensors["labels"].clone()
    ignored[0, 1] = -100
    assert run(ignored).isfinite()
    log_p[0, 1, 2] = -torch.inf
    assert run().isfinite()


def test_options():
    for message, cls, options in (
        ("beta is 1.5, expected a value between 0 and 1", losses.FusedLinearJSDLoss, {"beta": 1.5}),
        ("beta is 0, expected a positive, finite value", losses.FusedLinearCosineSimilarityLoss, {"beta": 0}),
        ("not both 0", losses.FusedLinearJSDLoss, {"weight_hard_loss": 0, "weight_soft_loss": 0}),
        ("unknown rest 'nothing', expected one of tail, renormalize", losses.FusedLinearTopKLoss, {"rest": "nothing"}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            cls(**options)
    with pytest.raises(TypeError):
        losses.FusedLinearJSDLoss(chunk_size=4)


def test_bad_input(device):
    tensors = make(device)

    def refuses(error, match, change=(), name="jsd", **how):
        with pytest.raises(error, match=match):
            call(name, DISTANCES[name][0](), tensors | dict(change), **how)

    short = {"teacher_weight": tensors["teacher_weight"][:50], "teacher_bias": None}
    refuses(RuntimeError, "FusedLinearJSDLoss: teacher_weight has 50 classes, expected 57", short)
    logits, none = (
        torch.zeros(SEQUENCES, LENGTH, 60, device=device),
        dict.fromkeys(("teacher_x", "teacher_weight", "teacher_bias")),
    )
    refuses(RuntimeError, "teacher_logits has 60 classes, expected 57", none, teacher_logits=logits)
    refuses(
        ValueError,
        "FusedLinearJSDLoss: no teacher was given, expected teacher_input and teacher_weight",
        none,
    )
    refuses(ValueError, "teacher_input and teacher_logits were given, expected one", teacher_logits=logits)
    bias_alone = none | {"teacher_bias": tensors["teacher_bias"]}
    refuses(ValueError, "teacher_bias and teacher_logits were given", bias_alone, teacher_logits=logits)
    no_weight = {"teacher_weight": None, "teacher_bias": None}
    refuses(ValueError, "teacher_input was given, expected teacher_input and teacher_weight, or", no_weight)
    refuses(ValueError, "FusedLinearJSDLoss: no target, expected one for the cross entropy", {"labels": None})
    refuses(RuntimeError, r"mask has shape \(3,\)", mask=tensors["labels"][:, 0])
    refuses(RuntimeError, "denominator has shape", denominator=tensors["labels"])

    log_p, indices = teacher_arguments("top k", tensors).values()
    given = {"teacher_logprobs": log_p[..., :0], "teacher_indices": indices[..., :0]}
    with pytest.raises(RuntimeError, match="at least one class"):
        losses.FusedLinearTopKLoss()(tensors["x"], tensors["weight"], tensors["labels"], **given)


def test_bad_arguments_of_the_op(device):
    """What no module passes."""
    tensors = make(device)
    x, teacher = (tensors[name].flatten(0, 1) for name in ("x", "teacher_x"))
    of_heads = [x, tensors["weight"], teacher, tensors["teacher_weight"]]

    def refuses(match, divergence="jsd", indices=None, soft=1.0, hard=0.0, heads=of_heads):
        with pytest.raises(RuntimeError, match=match):
            torch.ops.liger.fused_linear_divergence_forward(
                *heads, indices, *(None,) * 4, divergence, 0.5, 1.0, soft, hard, -100, False, None, None, *(False,) * 3
            )  # fmt: skip

    refuses("divergence is 'hellinger'", "hellinger")
    refuses("soft is -1 and hard is 0", soft=-1.0)
    refuses("soft is 0 and hard is 0", soft=0.0)
    refuses("no target", hard=1.0)
    refuses("teacher_indices was given with divergence 'jsd'", indices=teacher.long())
    refuses("no teacher_indices", "topk", heads=[*of_heads[:3], None])
    refuses("teacher_weight or teacher_bias was given", "topk", indices=teacher.long())
