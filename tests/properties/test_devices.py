# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of several devices raise, naming op and argument; meta tensors alone give the shapes of the
results."""

import re
from functools import cache

import pytest
import torch
from public_callables import CASES, arguments, differentiable_outputs, weighted_sum
from samples import SAMPLES

from liger._core.op.kernel_checks import checking_arguments, checking_devices
from liger._core.op.registration import FAMILIES

GPU = torch.cuda.is_available()
# Their products with weights, before any op of liger, are torch's own, which does not look at the device of a
# weight on meta. A module may have such weights until its hooks fetch them.
OF_TORCH = ("tiled", "nn.SwiGLUMLP", "nn.GEGLUMLP")
# Not asked for: what a reference says, without a penalty for leaving it, and the divergence of a loss that
# has none.
UNREAD = [("losses.PPO", "ref_per_token_logps"), ("losses.KTO apo_zero_unpaired", "kl")]


def tensor_names(given):
    return [name for name, value in given.items() if isinstance(value, torch.Tensor)]


def one_elsewhere():
    """{case: arguments}: every tensor of every case whose place another tensor shares."""
    found = {}
    for name in CASES:
        names = tensor_names(arguments(name))
        if len(names) > 1 and name not in OF_TORCH:
            found[name] = [argument for argument in names if (name, argument) not in UNREAD]
    return found


# Devices other than the device of the other tensors; a test without a GPU has the first.
ELSEWHERE = ["meta", *(["cpu"] if GPU else []), *(["cuda:1"] if torch.cuda.device_count() > 1 else [])]


def can_be_moved(elsewhere, tensor):
    """It is not there already, and no number on the CPU, which torch takes with tensors of any device."""
    return tensor.device != torch.device(elsewhere) and not (tensor.dim() == 0 and elsewhere == "cpu")


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
@pytest.mark.parametrize(
    ("name", "tensors"), one_elsewhere().items(), ids=lambda v: v if type(v) is str else ""
)
def test_a_tensor_of_another_device_raises(name, tensors, elsewhere, device):
    given = arguments(name, device)
    for moved in tensors:
        if not can_be_moved(elsewhere, given[moved]):
            continue
        print(moved)
        with pytest.raises(RuntimeError) as raised:
            CASES[name].call(**given | {moved: given[moved].detach().to(elsewhere)})
        where = r"(meta|cpu|cuda:\d)"
        words = rf"\w+: \w+ is on {where}, expected the device of [\w ]+, {where}"
        assert re.match(words, str(raised.value)), str(raised.value)


@cache
def tensors_of_ops():
    """(op, position of an argument): every tensor of the raw ops, whose backends check what public functions
    do not."""
    found = []
    for op in SAMPLES:
        if not op.startswith("check_"):
            sample = SAMPLES[op](torch.device("cpu"))[0]
            places = [i for i, value in enumerate(sample) if isinstance(value, torch.Tensor)]
            found += [(op, i) for i in places if len(places) > 1]
    return found


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
@pytest.mark.parametrize("op", dict(tensors_of_ops()))
def test_a_tensor_of_another_device_raises_in_ops(op, elsewhere, device):
    for place in (place for other, place in tensors_of_ops() if other == op):
        given = list(SAMPLES[op](device)[0])
        if not can_be_moved(elsewhere, given[place]):
            continue
        print(place)
        given[place] = given[place].detach().to(elsewhere)
        # Of Triton it is a ValueError where no check of ours comes first.
        with pytest.raises((RuntimeError, ValueError), match=r"device|cpu tensor"), torch.no_grad():
            getattr(torch.ops.liger, op)(*given)


def tensors_of_forwards():
    """(op, position): of the ops with several backends that public functions call without a check of
    devices."""
    own = {op: family for family in FAMILIES.values() for op in family.torch_kernels}
    # Each backend of rescale has a check of its own; the public functions of the divergences check before the
    # op.
    return [
        (own[op], op, place)
        for op, place in tensors_of_ops()
        if op in own and "backward" not in op and not op.startswith(("rescale", "divergence"))
    ]


@pytest.mark.parametrize(
    ("family", "op", "place"), tensors_of_forwards(), ids=lambda v: getattr(v, "name", v)
)
def test_the_same_words_in_every_backend(family, op, place):
    """The check of the compiled kernels, which the kernels of torch make as well, the check of the dispatcher
    for meta tensors, and the check before Triton kernels where there are several GPUs."""
    given = list(SAMPLES[op](torch.device("cpu"))[0])
    given[place] = given[place].detach().to("meta")
    dispatched, kernel = getattr(torch.ops.liger, op), checking_arguments(op, family.torch_kernels[op])
    said = []
    for call in (dispatched, kernel, checking_devices(op, pytest.fail)):
        with pytest.raises(RuntimeError) as raised, torch.no_grad():
            call(*given)
        said.append(str(raised.value).split("\n")[0])
    assert said == said[:1] * 3 and said[0].startswith(f"{family.name}: ")


def described(results):
    return [(r.shape, r.dtype, r.stride()) for r in as_tuple(results) if r is not None]


@pytest.mark.parametrize("name", CASES)
def test_meta_tensors_give_the_shapes(name):
    given = arguments(name)
    moved = {k: v.detach().to("meta") if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    for key in CASES[name].differentiable:
        moved[key].requires_grad_()
    results = CASES[name].call(**moved)
    assert all(r.is_meta for r in as_tuple(results))
    assert described(results) == described(CASES[name].call(**given))
    if keys := CASES[name].differentiable:
        leaves = [moved[key] for key in keys]
        grads = torch.autograd.grad(weighted_sum(differentiable_outputs(name, moved)), leaves)
        assert all(g.is_meta for g in grads) and [g.shape for g in grads] == [t.shape for t in leaves]
