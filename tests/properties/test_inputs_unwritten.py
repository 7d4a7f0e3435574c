# SPDX-License-Identifier: BSD-3-Clause
"""No call writes a tensor that it was given, whatever it is: an input, a weight, a teacher, a mask or a
target."""

import pytest
import torch
from cases import DTYPES
from public_callables import CASES, arguments, cases, outputs, weighted_sum

from liger._core.runtime.environment import triton_interpreted


def tensors(given):
    return {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}


def bits(tensor):
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def backward(name, given):
    """The gradients of the results, twice: what is done to the first ones does not change the second."""
    loss = weighted_sum([r for r in outputs(name, given) if r.requires_grad])
    wanted = [given[key] for key in CASES[name].differentiable if given[key].requires_grad]
    returned = torch.autograd.grad(loss, wanted, retain_graph=True)
    first = [grad.clone() for grad in returned]
    for grad in returned:
        grad.zero_()
    second = torch.autograd.grad(loss, wanted)
    if CASES[name].loss:
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(loss, wanted)
    return first, second


def expanded(tensor):
    """The second of its first dimension, many times: memory in which a write to one is a write to all."""
    if tensor.dim() == 0 or tensor.shape[0] < 2:
        return tensor
    with torch.no_grad():
        return tensor[1:2].clone().expand(tensor.shape).requires_grad_(tensor.requires_grad)


class Watched:
    """The bytes and versions of tensors, on leaving the same as on entering."""

    def __init__(self, given):
        self.tensors = tensors(given)

    def __enter__(self):
        self.before = {key: bits(t) for key, t in self.tensors.items()}
        self.versions = {key: t._version for key, t in self.tensors.items() if not t.is_inference()}

    def __exit__(self, kind, *_):
        if kind is not None:
            return
        for key, tensor in self.tensors.items():
            assert torch.equal(bits(tensor), self.before[key]), f"{key} was written"
            assert key not in self.versions or tensor._version == self.versions[key], f"version of {key}"


@pytest.mark.parametrize("name", cases())
def test_forward_and_backward(device, name):
    for dtype in DTYPES:
        print(dtype)
        given = arguments(name, device, dtype)
        with Watched(given):
            first, second = backward(name, given)
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", cases())
def test_float64(float64_device, name):
    given = arguments(name, float64_device, torch.float64)
    with Watched(given):
        backward(name, given)


@pytest.mark.parametrize("name", cases())
def test_without_gradients(device, name):
    for dtype in DTYPES:
        print(dtype)
        given = arguments(name, device, dtype, requires_grad=False)
        with Watched(given):
            outputs(name, given)


@pytest.mark.parametrize("name", cases())
def test_in_inference_mode(device, name):
    with torch.inference_mode():
        given = arguments(name, device, requires_grad=False)
        with Watched(given):
            outputs(name, given)


@pytest.mark.skipif(triton_interpreted(), reason="the interpreter takes its time")
@pytest.mark.parametrize("name", cases())
def test_expanded_tensors(device, name):
    """Those that are one row many times give what their copies give."""
    for dtype in DTYPES:
        print(dtype)
        assert_as_copies(name, arguments(name, device, dtype))


def assert_as_copies(name, given):
    given |= {key: expanded(t) for key, t in tensors(given).items() if t.is_floating_point()}
    copies = {
        key: t.detach().clone(memory_format=torch.contiguous_format).requires_grad_(t.requires_grad)
        for key, t in tensors(given).items()
    }
    with Watched(given):
        found = backward(name, given)[0]
    # Expanded weights of experts take other kernels on a GPU than their copies: both round products to the
    # dtype of x, also if routing weights are float32.
    rounds = "experts" in name.lower() and found[0].is_cuda
    coarsest = max(torch.finfo(t.dtype).eps for t in copies.values() if t.is_floating_point())
    # Other strides are other loops on a CPU, and other products.
    for a, b in zip(found, backward(name, given | copies)[0], strict=True):
        # Sums of equal rows may cancel.
        units = 8 * coarsest if rounds else 4 * torch.finfo(b.dtype).eps
        near = 1e-5 + units * b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=0.0, atol=near)


NOT_SAVED = "Inference tensors cannot be saved for backward"


@pytest.mark.parametrize(
    "name", [n for n in cases() if set(tensors(arguments(n))) - set(CASES[n].differentiable)]
)
def test_inference_tensors_beside_those_that_are_trained(device, name):
    """A teacher, a reference or targets that were made in inference mode."""
    given = arguments(name, device)
    with torch.inference_mode():
        made = {key: t.clone() for key, t in tensors(given).items() if key not in CASES[name].differentiable}
    given |= made
    with Watched(given):
        try:
            found = backward(name, given)[0]
        except RuntimeError as error:
            # Where the backward needs them it is torch that refuses.
            assert NOT_SAVED in str(error)
            return
    ordinary = {key: t.clone() for key, t in made.items()}
    for a, b in zip(found, backward(name, given | ordinary)[0], strict=True):
        assert torch.equal(a, b)
