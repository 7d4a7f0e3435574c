# SPDX-License-Identifier: BSD-3-Clause
"""Memory that patched models reuse: one gradient for a weight that embedding and head share, the MLP's
product."""

import copy

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import liger

transformers = pytest.importorskip("transformers")

from graph_nodes import count_nodes  # noqa: E402
from tiny_models import VOCAB, assert_same_step, batch, make, step, twin  # noqa: E402

import liger.transformers as lt  # noqa: E402
from liger.transformers.checkpointing import methods  # noqa: E402
from liger.transformers.mlp import recipe  # noqa: E402
from liger.transformers.recipe import reuse  # noqa: E402
from liger.transformers.recipe.reuse import linear_over  # noqa: E402

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(autouse=True)
def tiny_is_large(monkeypatch):
    """The products of tiny models count as worth reusing."""
    monkeypatch.setattr(reuse, "WORTH_REUSING", 0)


class Ops(TorchDispatchMode):
    """Names and result shapes of the ops that run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.seen.append((func.overloadpacket.__name__, tuple(result.shape)))
        return result


def tied(**overrides):
    return make("llama", tie_word_embeddings=True, **overrides)


def apart(model):
    """The same model whose embedding has a hook, as those that gather weights have: autograd adds two
    gradients."""
    model = twin(model)
    model.model.embed_tokens.register_forward_pre_hook(lambda module, inputs: None)
    return model


def dense_gradients(model, **inputs):
    """How often a backward makes a gradient of the embedding's size for the lookup."""
    loss = model(**inputs).loss
    with Ops() as ops:
        loss.backward()
    return ops.seen.count(("embedding_dense_backward", (VOCAB, 64)))


@pytest.mark.parametrize("tokens", [11, 64], ids=["by rows", "many tokens"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shared_weight_has_the_same_gradient(device, dtype, tokens):
    model = liger.patch(tied(device=device, dtype=dtype))
    inputs = batch(device, rows=3, tokens=tokens)
    inputs["input_ids"][:, 2:7] = 5  # many of one token, and some padding
    inputs["input_ids"][1, -3:] = model.config.pad_token_id
    (_, ours), (_, theirs) = step(model, **inputs), step(apart(model), **inputs)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert torch.equal(ours[name], expected), name
    assert dense_gradients(model, **inputs) == (2 * 3 * tokens >= VOCAB)
    assert dense_gradients(apart(model), **inputs) == 1


@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_added_to_rows(device, dtype, padding):
    """More tokens than one block sums on a GPU, and ids that occur never, once and a thousand times."""
    ids = torch.randint(0, 20000, (4, 1250), device=device)
    ids[:, :300] = 7
    ids[0, :20] = 3
    grads = torch.randn(4, 1250, 16, dtype=dtype, device=device)
    total = torch.randn(20000, 16, dtype=dtype, device=device)
    expected = total + torch.ops.aten.embedding_dense_backward(grads, ids, len(total), padding, False)
    reuse._add_to_rows(total, grads, ids, padding)
    assert torch.equal(total, expected)
    reuse._add_to_rows(total, grads[:0], ids[:0], padding)
    assert torch.equal(total, expected)


def test_shared_weight_like_the_unpatched_model():
    plain = tied()
    model = liger.patch(twin(plain))
    assert_same_step(step(model, **batch()), step(plain, **batch()))
    with Ops() as ops:
        step(model, **batch())
    assert ops.seen.count(("add", (VOCAB, 64))) == 0
    assert liger.unpatch(model).state_dict().keys() == plain.state_dict().keys()
    assert type(model.model.embed_tokens) is nn.Embedding


def test_shared_weight_that_hooks_gather():
    """As ZeRO-3 does: the weight is there in the calls of embedding and head, and in the backward. Nothing
    keeps what was gathered for a call."""
    plain = tied()
    model = liger.patch(twin(plain))
    weight, gathered = model.lm_head.weight, []
    full, weight.ds_id = weight.data.clone(), 0

    def gather(module, inputs):
        weight.data = full.clone()
        gathered.append(StorageWeakRef(weight.untyped_storage()))

    def release(module, inputs, output):
        weight.data = full.new_empty(0)

    release.__module__ = "deepspeed.runtime.zero"
    for module in (model.model.embed_tokens, model.lm_head):
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(release)
    release(None, None, None)
    output = model(**batch())
    assert len(gathered) == 2 and all(storage.expired() for storage in gathered)
    weight.data = full
    with Ops() as ops:
        output.loss.backward()
    assert not {("embedding_dense_backward", (VOCAB, 64)), ("add", (VOCAB, 64))} & set(ops.seen)
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert_same_step((output, grads), step(plain, **batch()))


@pytest.mark.parametrize("way", ["inputs_embeds", "frozen", "evaluation", "no loss"])
def test_calls_in_which_nothing_is_shared(way):
    plain = tied()
    model, inputs = liger.patch(twin(plain)), batch()
    for m in (plain, model):
        if way == "frozen":
            m.lm_head.weight.requires_grad_(False)
        elif way == "evaluation":
            m.eval()
    if way == "inputs_embeds":
        inputs["inputs_embeds"] = plain.model.embed_tokens(inputs.pop("input_ids")).detach()
    if way == "no loss":
        del inputs["labels"]
        torch.testing.assert_close(model(**inputs).logits, plain(**inputs).logits)
        return
    assert_same_step(step(model, **inputs), step(plain, **inputs))


def test_only_the_gradient_of_the_head_or_of_the_lookup():
    """The lookup has none where the hidden states are detached, the head has none where the loss is not
    used."""
    model = liger.patch(tied())
    hidden = model.model.norm.register_forward_hook(lambda module, args, output: output.detach())
    head = step(model, **batch())[1]
    hidden.remove()
    assert head.keys() == {EMBEDDING}
    expected = twin(model)
    expected.model.embed_tokens.weight.requires_grad_(False)
    expected.model.embed_tokens.weight = nn.Parameter(
        expected.model.embed_tokens.weight.detach().clone(), False
    )
    expected.lm_head.weight.requires_grad_(True)
    torch.testing.assert_close(head[EMBEDDING], step(expected, **batch())[1]["lm_head.weight"])

    model.lm_head.weight.grad = None
    rows = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: rows.append(output))
    model(**batch())
    rows[0].sum().backward()
    counts = torch.bincount(batch()["input_ids"].flatten(), minlength=VOCAB).float()
    counts[model.config.pad_token_id] = 0
    torch.testing.assert_close(model.lm_head.weight.grad, counts[:, None].expand(-1, 64))


def test_shared_weight_of_models_made_later(tmp_path):
    plain = tied()
    plain.save_pretrained(tmp_path)
    lt.patch_future("llama")
    try:
        made = tied()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation="eager"
        ).train()
    finally:
        lt.unpatch_future("llama")
    for model in (made, loaded, copy.deepcopy(made)):
        assert dense_gradients(model, **batch()) == 0
        assert_same_step(step(model, **batch()), step(plain, **batch()))


class Scaled(nn.Embedding):
    """As in Gemma."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.embed_scale = nn.Buffer(torch.tensor(3.0), persistent=False)

    def forward(self, ids):
        return super().forward(ids) * self.embed_scale.to(self.weight.dtype)


class WithoutSuper(Scaled):
    def forward(self, ids):
        return nn.functional.embedding(ids, self.weight, self.padding_idx) * self.embed_scale


class Twice(Scaled):
    def forward(self, ids):
        return super().forward(ids) + nn.Embedding.forward(self, ids) + super().forward(ids)


class Failing(Scaled):
    def forward(self, ids):
        return super().forward(ids) + self.no_such_attribute


class WithMatrix(Scaled):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.embed_scale = nn.Parameter(torch.ones(64))


def tied_with(embedding):
    model = tied()
    old = model.model.embed_tokens
    new = embedding(VOCAB, 64, padding_idx=old.padding_idx)
    new.weight = old.weight
    model.set_input_embeddings(new)
    model.lm_head.weight = new.weight
    return model


def test_an_embedding_that_scales_the_rows(tmp_path):
    plain = tied_with(Scaled)
    model = liger.patch(twin(plain))
    assert_same_step(step(model, **batch()), step(plain, **batch()))
    assert dense_gradients(model, **batch()) == 0 and dense_gradients(plain, **batch()) == 1
    torch.save(model, tmp_path / "model.pt")
    for copied in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert isinstance(copied.model.embed_tokens, Scaled)
        assert dense_gradients(copied, **batch()) == 0
        assert_same_step(step(copied, **batch()), step(plain, **batch()))
    assert type(liger.unpatch(model).model.embed_tokens) is Scaled
    assert dense_gradients(model, **batch()) == 1


def test_the_embedding_of_gemma():
    from combinations import inputs_of, tiny

    plain, given = tiny("gemma3_text", tie_word_embeddings=True), inputs_of("gemma3_text")
    model = liger.patch(twin(plain))
    assert_same_step(step(model, **given), step(plain, **given))
    names = count_nodes(model(**given).loss)
    assert "_SharedLookupBackward" in names and "EmbeddingBackward0" not in names


@pytest.mark.parametrize("embedding", [WithoutSuper, Twice, Failing, WithMatrix])
def test_embeddings_that_are_left_alone(embedding):
    model = liger.patch(tied_with(embedding))
    assert type(model.model.embed_tokens) is embedding


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    plain = tied()
    methods.enable(plain, use_reentrant=reentrant)
    model = liger.patch(twin(plain))
    assert_same_step(step(model, **batch()), step(plain, **batch()))
    assert dense_gradients(model, **batch()) == 0


# --- the product of an MLP ----------------------------------------------------------------------------------


def layer_and_input(bias, dtype=torch.float32, device="cpu"):
    layer = nn.Linear(12, 8, bias=bias, dtype=dtype, device=device)
    return layer, torch.randn(2, 5, 12, dtype=dtype, device=device, requires_grad=True)


def gradients(call, layer, leaf, **options):
    """(result, gradients, whether the gradient of the input lies in the memory of the input)"""
    layer.zero_grad()
    leaf.grad, places = None, []
    x = leaf * 1.5
    x.register_hook(lambda grad: places.append(grad.data_ptr()))
    before = x.data_ptr()
    y = call(layer, x)
    (y * torch.linspace(-1, 1, 8, dtype=y.dtype, device=y.device)).sum().backward(**options)
    return y, [leaf.grad, *(p.grad for p in layer.parameters())], places == [before]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_over(device, bias, dtype):
    layer, leaf = layer_and_input(bias, dtype, device)
    y, grads, over = gradients(linear_over, layer, leaf)
    expected_y, expected, elsewhere = gradients(lambda layer, x: layer(x), layer, leaf)
    assert over and not elsewhere
    assert torch.equal(y, expected_y)
    assert all(map(torch.equal, grads, expected))
    _, kept, over = gradients(linear_over, layer, leaf, retain_graph=True)
    assert not over and all(map(torch.equal, kept, expected))


def test_linear_over_leaves_others_alone():
    layer, leaf = layer_and_input(True)
    seen = []
    handle = layer.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    assert not gradients(linear_over, layer, leaf)[2] and seen
    handle.remove()
    layer.weight.requires_grad_(False)
    _, (grad, weight_grad, bias_grad), over = gradients(linear_over, layer, leaf)
    assert over and weight_grad is None and grad is not None and bias_grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_over(layer, leaf).dtype == torch.bfloat16
    with torch.no_grad():
        assert not linear_over(layer, leaf).requires_grad
    lora = nn.Sequential(layer)
    assert not gradients(linear_over, lora, leaf)[2]


def test_linear_over_has_second_derivatives():
    layer, leaf = layer_and_input(True, torch.float64)
    torch.autograd.gradgradcheck(lambda x: linear_over(layer, x * 1.5), leaf)


def test_small_inputs_are_left_to_autograd(monkeypatch):
    layer, leaf = layer_and_input(False)
    for limit, expected in ((leaf.nbytes, False), (leaf.nbytes - 1, True)):
        monkeypatch.setattr(reuse, "WORTH_REUSING", limit)
        assert gradients(linear_over, layer, leaf)[2] == expected


def test_an_mlp_gives_up_its_product_only_where_it_may(monkeypatch):
    calls = []
    monkeypatch.setattr(recipe, "linear_over", lambda layer, x: calls.append(layer) or layer(x))
    x = torch.randn(3, 64, requires_grad=True)
    for inplace in (False, True):
        mlp = liger.patch(make("llama"), inplace=inplace).model.layers[0].mlp
        calls.clear()  # patching has tried the MLP
        mlp(x)
        assert calls == [mlp.down_proj] * inplace


def test_checkpointing_does_not_compute_the_product_again():
    plain = make("llama")
    methods.enable(plain)

    def products(model):
        with Ops() as ops:
            step(model, **batch())
        return sum(shape[-2:] == (22, 64) for name, shape in ops.seen if name in ("mm", "addmm"))

    assert products(liger.patch(twin(plain))) <= products(plain)


def test_checkpoint_around_an_mlp():
    plain = make("llama").model.layers[0].mlp
    patched = liger.patch(twin(plain))
    x = torch.randn(3, 7, 64)
    results = []
    for mlp in (patched, plain):
        leaf = x.clone().requires_grad_()
        checkpoint(mlp, leaf, use_reentrant=False).square().sum().backward()
        results.append([leaf.grad, *(p.grad for p in mlp.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
