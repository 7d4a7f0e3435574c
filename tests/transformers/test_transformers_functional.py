# SPDX-License-Identifier: BSD-3-Clause
"""Patched models under torch.func: parameters from outside, and gradients by transforms."""

import pytest
import torch
from torch.func import functional_call, grad, grad_and_value

import liger

transformers = pytest.importorskip("transformers")

from tiny_models import assert_same_step, batch, make, step, twin  # noqa: E402


@pytest.fixture(params=[{}, {"tie_word_embeddings": True}], ids=["", "tied"])
def pair(request):
    plain = make("llama", **request.param)
    return liger.patch(twin(plain)), plain


def parameters(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def test_functional_call(pair):
    model, plain = pair
    given = {name: p.clone().requires_grad_() for name, p in parameters(model).items()}
    for m in (model, plain):
        for p in m.parameters():
            p.requires_grad_(False)
    results = []
    for m in (model, plain):
        output = functional_call(m, given, kwargs=batch())
        grads = torch.autograd.grad(output.loss, list(given.values()))
        results.append((output, dict(zip(given, grads, strict=True))))
    assert_same_step(*results)


def test_grad_of_a_functional_call(pair):
    model, plain = pair

    def loss(given):
        return functional_call(model, given, kwargs=batch()).loss

    grads, value = grad_and_value(loss)(parameters(model))
    assert_same_step(({"loss": value}, grads), step(plain, **batch()))


def test_grad_of_embeddings(pair):
    """The weights stay parameters, and only what is differentiated belongs to the transform."""
    embeddings = torch.randn(2, 11, 64)
    inputs = {name: value for name, value in batch().items() if name != "input_ids"}
    found = [grad(lambda e, m=m: m(inputs_embeds=e, **inputs).loss)(embeddings) for m in pair]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5 * found[1].abs().max().item())
