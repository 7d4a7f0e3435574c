# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of another shape or dtype than the others, tensors without a gradient that require one, and targets
that are no class: the error names the callable and the tensor."""

import re

import pytest
import torch
from declared_calls import DECLARED, is_of_batch, shapes
from errors import error_about
from public_callables import CASES, arguments
from public_callables.case import IGNORED, VOCAB
from public_options import public
from samples import SAMPLES


def other_shapes_and_dtypes(tensor):
    """(what was changed, the tensor with it)"""
    if tensor.dim():
        yield "shorter rows", tensor[..., :-1]
        yield "fewer rows", tensor[:-1]
        yield "one more dimension", tensor.unsqueeze(0)
    yield "another integer", tensor.to(torch.int64 if tensor.is_floating_point() else torch.int16)
    yield "float16", tensor.half()


ROWS_OF_ANY_NUMBER = {"fewer rows", "one more dimension"}
ANY_NUMBER = {"another integer", "float16"}
HALF = {"float16"}
# Changes that leave a valid call: numbers and weights of tokens, teachers and factors of other dtypes.
TAKEN_AS = {
    **dict.fromkeys(("advantages", "mask", "preference_labels", "kl", "vllm_is_ratio"), ANY_NUMBER),
    **dict.fromkeys(("ref_per_token_logps", "old_per_token_logps", "ref_logps"), ANY_NUMBER),
    **dict.fromkeys(("token_weight", "ce_weight", "top_k_weights", "lora_a", "lora_b"), HALF),
    **dict.fromkeys(("student", "teacher", "teacher_logits", "teacher_logprobs"), HALF),
}


def taken_by(op):
    """Of the only tensor of a declared op that is no parameter: parameters may be float32, and rows are
    independent of each other."""
    of_op = shapes(op, (2, 4, 16))
    main, *others = (name for name in of_op if not DECLARED[op].is_parameter(name))
    if others:
        return {}
    last = DECLARED[op].dims[-1]
    fixed = last[0] == "2" or any((last,) == DECLARED[op].shapes[name].dims for name in of_op if name != main)
    rows = {"fewer rows"} if is_of_batch(op) else ROWS_OF_ANY_NUMBER
    return {main: {"float16", *rows, *(() if fixed else ("shorter rows",))}}


# A tensor alone, or with parameters of its last dimension, and fewer classes.
TAKEN_BY = {
    **{op: taken_by(op) for op in DECLARED},
    "complex_rope": {"freqs_cis": {"shorter rows", "one more dimension"}},
    "tiled_mlp": {"x": ROWS_OF_ANY_NUMBER},
    "cross_entropy": {"logits": {"shorter rows", "float16"}},
    "fused_linear_ce": {"weight": {"fewer rows"}},
    "losses.FusedLinearORPOLoss": {"target": {"another integer"}},
}


OF_FUNCTIONS_AND_LOSSES = [
    name for name, case in CASES.items() if not case.public.startswith("nn.") and case.public != "tiled"
]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("name", OF_FUNCTIONS_AND_LOSSES)
def test_shapes_and_dtypes(device, name):
    """One tensor of another shape or dtype: the error names the callable, a tensor and what it expects."""
    found, case = public(CASES[name].public), CASES[name]
    call, op = (case.call, found.__name__) if isinstance(found, type) else (found, case.public)
    given = arguments(name, device, requires_grad=False)
    tensors = [argument for argument, value in given.items() if isinstance(value, torch.Tensor)]
    words = rf"{op}: (?=.*\b({'|'.join(tensors)}|batch)\b).*expected "
    for argument in tensors:
        taken = set()
        for change, value in other_shapes_and_dtypes(given[argument]):
            try:
                call(**{**given, argument: value})
            except (RuntimeError, ValueError) as error:
                message = str(error).splitlines()[0]
                if "target at row" not in message:  # Of fewer classes.
                    assert re.match(words, message), f"{argument} with {change}: {message}"
                    assert isinstance(error, error_about(message)), f"{argument} with {change}: {error!r}"
                    continue
            taken.add(change)
        assert taken <= TAKEN_BY.get(case.public, {}).get(argument, TAKEN_AS.get(argument, set())), argument


@pytest.mark.parametrize("name", OF_FUNCTIONS_AND_LOSSES)
def test_tensors_without_a_gradient(name):
    """All but the head of a reference, which may be the head of the policy."""
    given, op = arguments(name), CASES[name].public.rpartition(".")[2]
    for argument, value in given.items():
        floats = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
        if floats and not value.requires_grad and argument not in ("ref_weight", "ref_bias"):
            with pytest.raises(RuntimeError, match=rf"^{op}: .*\b{argument}\b.* requires grad"):
                CASES[name].call(**{**given, argument: value.clone().requires_grad_()})


def with_classes():
    """Not the divergences, whose targets only say which rows are ignored."""
    return [
        name
        for name in OF_FUNCTIONS_AND_LOSSES
        if "target" in arguments(name) and not re.search("kl_div|jsd|tvd", name)
    ]


@pytest.mark.parametrize("name", with_classes())
def test_targets_that_are_no_class(name):
    """On the CPU. On a GPU, where it is NaN: test_cross_entropy_bad_input.py."""
    given = arguments(name, requires_grad=False)
    counted = (given["mask"] if "mask" in given else given["target"] != IGNORED).view(-1).clone()
    if "cu_seqlens" in given:
        counted[: given["cu_seqlens"][0]] = False  # of no sequence
    op = CASES[name].public.rpartition(".")[2]
    for number in (VOCAB, -1, 2**40):
        given["target"].view(-1)[counted.nonzero()[0]] = number
        words = rf"{op}: target at .* is {number}, expected 0 <= target < {VOCAB}"
        with pytest.raises(RuntimeError, match=words):
            CASES[name].call(**given)


# These run under ops that have checked what they pass on, or are checked by the products in them.
UNCHECKED = ("rope", "qk_norm_rope", "tiled_mlp", "grouped_experts", "fused_linear_logprobs")
BACKWARD = [op for op in SAMPLES if re.search("_backward_?$", op) and not op.startswith(UNCHECKED)]


@pytest.mark.parametrize("op", BACKWARD)
def test_gradients_of_ops(device, op):
    """An upstream gradient of another shape or dtype, in the ops that run under autograd."""
    schema = getattr(torch.ops.liger, op).default._schema.arguments
    sample = list(SAMPLES[op](device)[0])
    places = [i for i, a in enumerate(schema) if re.match("grad_|coef_|reference", a.name)]
    for i in (i for i in places if i < len(sample) and sample[i] is not None and sample[i].dim()):
        for value in (sample[i][..., :-1], sample[i].half()):
            given = [a.clone() if isinstance(a, torch.Tensor) else a for a in sample]
            given[i] = value.clone()
            # The op that writes over its arguments may speak in the name of the other.
            words = rf"{op.removesuffix('_')}_?: {schema[i].name} has .*(shape|dtype).*expected"
            with pytest.raises(RuntimeError, match=words):
                getattr(torch.ops.liger, op)(*given)
