# SPDX-License-Identifier: BSD-3-Clause
"""liger.patch(model, accumulate_grad_weight=True): micro-batches add to main_grad or grad of the head's
weight."""

import copy

import pytest
import torch

import liger

pytest.importorskip("transformers")

from tiny_models import VOCAB, assert_same_step, batch, make, step, twin

HEAD = {False: "lm_head.weight", True: "model.embed_tokens.weight"}
tied_or_not = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def micro_batches():
    """Of different sizes, and the number of tokens of both."""
    first, second = batch(rows=3), batch(rows=2, tokens=7)
    count = sum((b["labels"][:, 1:] != -100).sum() for b in (first, second))
    return (first, second), count


def model_of(tied, **overrides):
    return make("llama", tie_word_embeddings=tied, **overrides)


def train(model, batches, count):
    """{name: gradient} of both batches."""
    total = 0.0
    for inputs in batches:
        loss = model(**inputs, num_items_in_batch=count).loss
        loss.backward()
        total += loss.detach()
    return {"loss": total}, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@tied_or_not
def test_grad(tied):
    plain = model_of(tied)
    batches, count = micro_batches()
    expected = train(twin(plain), batches, count)
    patched = liger.patch(twin(plain), accumulate_grad_weight=True)
    assert_same_step(train(patched, batches, count), expected)


@tied_or_not
def test_main_grad(tied):
    plain = model_of(tied)
    batches, count = micro_batches()
    loss, expected = train(twin(plain), batches, count)
    patched = liger.patch(twin(plain), accumulate_grad_weight=True)
    weight = patched.get_parameter(HEAD[tied])
    weight.main_grad = torch.zeros_like(weight)
    mine, grads = train(patched, batches, count)
    assert HEAD[tied] not in grads
    assert_same_step((mine, {**grads, HEAD[tied]: weight.main_grad}), (loss, expected))


@tied_or_not
def test_bfloat16_against_float32(tied):
    """The sum in float32 of a model in bfloat16: within one rounding of its gradient for each micro-batch."""
    plain = model_of(tied, dtype=torch.bfloat16)
    batches, count = micro_batches()
    exact = train(twin(plain).float(), batches, count)[1][HEAD[tied]]
    patched = liger.patch(twin(plain), accumulate_grad_weight=True)
    weight = patched.get_parameter(HEAD[tied])
    weight.main_grad = torch.zeros(weight.shape)
    train(patched, batches, count)
    ordinary = train(liger.patch(twin(plain)), batches, count)[1][HEAD[tied]]
    mine, other = ((g.float() - exact).norm() / exact.norm() for g in (weight.main_grad, ordinary))
    assert mine < 0.03 and mine < 1.02 * other


def test_the_embedding_makes_no_dense_gradient():
    """Neither the head nor the lookup of a tied weight makes a gradient of its size."""
    from test_transformers_memory import Ops

    model = liger.patch(model_of(True), accumulate_grad_weight=True)
    weight = model.get_input_embeddings().weight
    weight.main_grad = torch.zeros_like(weight)
    loss = model(**batch()).loss
    with Ops() as ops:
        loss.backward()
    # addmm_out returns the sum itself.
    made = [name for name, shape in ops.seen if shape == tuple(weight.shape)]
    assert set(made) <= {"addmm", "t", "detach", "index_copy_", "view", "slice"}, made


def test_tied_weight_with_a_hook_of_the_embedding():
    model = liger.patch(model_of(True), accumulate_grad_weight=True)
    embedding = model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda module, inputs: None)
    expected = step(twin(model_of(True)), **batch())
    assert_same_step(step(model, **batch()), expected)  # autograd adds to grad, too
    embedding.weight.main_grad = torch.zeros_like(embedding.weight)
    with pytest.raises(
        RuntimeError, match="accumulate_grad_weight with an embedding that is tied to the head and has"
    ):
        model(**batch())


def test_tied_weight_with_a_backward_hook_of_the_head():
    """The head returns logits, so autograd adds to grad; both summands of the gradient must be there."""
    model = liger.patch(model_of(True), accumulate_grad_weight=True)
    model.lm_head.register_full_backward_hook(lambda module, grads_in, grads_out: None)
    assert_same_step(step(model, **batch()), step(twin(model_of(True)), **batch()))
    model.lm_head.weight.main_grad = torch.zeros_like(model.lm_head.weight)
    with pytest.raises(RuntimeError, match="accumulate_grad_weight with an embedding that is tied"):
        model(**batch())


def test_tied_embedding_that_scales_the_rows():
    """The embedding of Gemma 3: its forward calls nn.Embedding's."""
    from combinations import inputs_of, tiny

    given = inputs_of("gemma3_text")
    models = [tiny("gemma3_text", tie_word_embeddings=True) for _ in range(2)]
    model = liger.patch(models[0], accumulate_grad_weight=True)
    expected = step(models[1], **given)
    assert_same_step(step(model, **given), expected)
    model.zero_grad()
    weight = model.get_input_embeddings().weight
    weight.main_grad = torch.zeros_like(weight)
    model(**given).loss.backward()
    assert weight.grad is None
    (name,) = [n for n, p in model.named_parameters() if p is weight]
    torch.testing.assert_close(weight.main_grad, expected[1][name], rtol=1e-5, atol=1e-6)


def test_tied_embedding_with_a_forward_of_its_own():
    """Autograd adds its gradient to grad, where main_grad would miss it."""
    from test_transformers_memory import WithoutSuper, tied_with

    plain, given = tied_with(WithoutSuper), batch()
    model = liger.patch(twin(plain), accumulate_grad_weight=True)
    assert_same_step(step(model, **given), step(plain, **given))
    model.zero_grad()
    weight = model.get_input_embeddings().weight
    weight.main_grad = torch.zeros_like(weight)
    with pytest.raises(RuntimeError, match="tied to the head and has hooks, a forward of its own"):
        model(**given)
    weight.requires_grad_(False)
    model(**given)


def test_unpatch_and_copies():
    plain = model_of(False)
    expected = step(twin(plain), **batch())
    patched = liger.patch(twin(plain), accumulate_grad_weight=True)
    duplicate = copy.deepcopy(patched)
    duplicate.lm_head.weight.main_grad = torch.zeros(VOCAB, 64)
    duplicate(**batch()).loss.backward()
    assert duplicate.lm_head.weight.grad is None
    torch.testing.assert_close(duplicate.lm_head.weight.main_grad, expected[1]["lm_head.weight"])
    liger.transformers.unpatch(patched)
    patched.lm_head.weight.main_grad = torch.zeros(VOCAB, 64)
    assert_same_step(step(patched, **batch()), expected)


def test_options():
    with pytest.raises(
        ValueError, match="accumulate_grad_weight is True, expected False without fused_linear_cross"
    ):
        liger.patch(model_of(False), accumulate_grad_weight=True, fused_linear_cross_entropy=False)
