# SPDX-License-Identifier: BSD-3-Clause
"""Models that call torch's cross entropy themselves: encoder-decoders and masked language models."""

import functools
import types

import pytest
import torch
from torch import nn

import liger

transformers = pytest.importorskip("transformers", minversion="5.0")

from tiny_models import VOCAB, fill, first_is_quick, step, twin  # noqa: E402
from transformers.modeling_outputs import MaskedLMOutput  # noqa: E402

import liger.transformers as lt  # noqa: E402
from liger.transformers.head import loss_call  # noqa: E402
from liger.transformers.head.causal_lm import CHANGED, CHANGED_LABELS, ITSELF  # noqa: E402
from model_scan.comparison import compare as compare_steps  # noqa: E402

BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
BART = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64, "decoder_start_token_id": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
T5 = {
    "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
ESM = {
    "position_embedding_type": "rotary",
    "pad_token_id": 0,
    "mask_token_id": 3,
    "max_position_embeddings": 64,
}
WHISPER = {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 64, "suppress_tokens": None}
# A scaled head, one with a bias of the model, heads in modules with a transform, a bias after the head, the
# loss by another name or as a module, other inputs, and another name of the vocabulary.
MODELS = {
    "T5ForConditionalGeneration": T5,
    "BartForConditionalGeneration": BART,
    "BertForMaskedLM": BERT,
    "RobertaForMaskedLM": {**BERT, "pad_token_id": 0},
    "EsmForMaskedLM": {**BERT, **ESM},
    "ElectraForMaskedLM": {**BERT, "embedding_size": 16},
    "DistilBertForMaskedLM": {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 48},
    "MarianMTModel": {**BART, "decoder_vocab_size": VOCAB, "share_encoder_decoder_embeddings": True},
    "WhisperForConditionalGeneration": {**BART, **WHISPER},
}
NO_DROPOUT = ("dropout", "dropout_rate", "attention_dropout", "activation_dropout", "hidden_dropout_prob",
              "attention_probs_dropout_prob")  # fmt: skip


def assert_same_step(ours, theirs):
    """Not the model of tiny_models: the gradient of a bias of keys is nothing but roundings."""
    compare_steps(*((output[0].loss.detach(), output[1]) for output in (ours, theirs)))


@functools.cache
def _made(name):
    cls = getattr(transformers, name)
    config = cls.config_class(vocab_size=VOCAB, **MODELS[name])
    for key in NO_DROPOUT:
        if hasattr(config, key):
            setattr(config, key, 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = cls(config)
        fill(model)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model.train()


def make(name):
    return twin(_made(name))


def batch(model):
    """Other lengths of inputs and labels where the model takes both; three quarters of the labels are
    ignored."""
    generator = torch.Generator().manual_seed(3)
    encoder_decoder = model.config.is_encoder_decoder
    labels = torch.randint(4, VOCAB, (2, 7 if encoder_decoder else 11), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < (0.2 if encoder_decoder else 0.7)] = -100
    if hasattr(model.config, "num_mel_bins"):
        return {"input_features": torch.randn(2, 8, 16, generator=generator), "labels": labels}
    ids = torch.randint(4, VOCAB, (2, 11), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def counted(monkeypatch):
    """The rows that the fused loss is called with."""
    calls, op = [], loss_call.fused_linear_ce

    def fused_linear_ce(rows, *args, **kwargs):
        calls.append(rows)
        return op(rows, *args, **kwargs)

    monkeypatch.setattr(loss_call, "fused_linear_ce", fused_linear_ce)
    return calls


@pytest.mark.parametrize("name", MODELS)
def test_the_head_computes_the_loss(name, monkeypatch):
    calls, plain = counted(monkeypatch), make(name)
    model = liger.patch(twin(plain))
    calls.clear()
    assert lt.patch_report(model).replaced[""] == "fused_linear_cross_entropy"
    inputs = batch(plain)
    ours, theirs = step(model, **inputs), step(plain, **inputs)
    assert len(calls) == 1 and ours[0].logits is None
    assert_same_step(ours, theirs)
    given, expected = model(**inputs, return_dict=False), plain(**inputs, return_dict=False)
    assert len(given) == len(expected) - 1
    assert not any(hasattr(value, "call") for value in given)
    torch.testing.assert_close(given[0], expected[0])
    # Everything but the loss of a training step.
    calls.clear()
    for arguments in ({"skip_logits": False}, {}):
        if not arguments:
            model.eval(), plain.eval()
        torch.testing.assert_close(model(**inputs, **arguments).logits, plain(**inputs).logits)
    assert model(**inputs, skip_logits=True).logits is None and len(calls) == 1
    liger.unpatch(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


@pytest.mark.parametrize("name", first_is_quick("BartForConditionalGeneration", "T5ForConditionalGeneration"))
def test_generation_is_unchanged(name):
    plain = make(name).eval()
    model, ids = liger.patch(twin(plain)), batch(plain)["input_ids"]
    for arguments in ({}, {"num_beams": 2}):
        given = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, **arguments}
        assert torch.equal(model.generate(ids, **given), plain.generate(ids, **given))


@pytest.mark.parametrize("name", first_is_quick("EsmForMaskedLM", "ElectraForMaskedLM", "DistilBertForMaskedLM",
                                                "T5ForConditionalGeneration"))  # fmt: skip
def test_compiled_without_graph_breaks(name):
    plain = make(name)
    model, inputs = liger.patch(twin(plain)), batch(plain)
    torch._dynamo.reset()
    # torch 2.10 leaves its hook on new buffers behind where an earlier trace in this process has failed.
    torch.nn.modules.module._global_buffer_registration_hooks.clear()
    try:
        loss = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).loss
    except torch._dynamo.exc.Unsupported:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(plain, fullgraph=True, backend="aot_eager")(**inputs)
        pytest.skip("neither does the model's own forward compile with these versions")
    loss.backward()
    _, expected = step(plain, **inputs)
    for parameter, grad in expected.items():
        torch.testing.assert_close(model.get_parameter(parameter).grad, grad, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_bias_after_the_head():
    """It is a parameter of the module around the head."""
    model = liger.patch(make("EsmForMaskedLM"))
    _, grads = step(model, **batch(model))
    assert grads["lm_head.bias"].abs().sum() > 0


def test_main_grad_of_a_weight_that_three_layers_share():
    plain = make("T5ForConditionalGeneration")
    model = liger.patch(twin(plain), accumulate_grad_weight=True)
    weight, inputs = model.lm_head.weight, batch(plain)
    assert model.shared.weight is model.encoder.embed_tokens.weight is weight
    weight.main_grad = torch.zeros_like(weight)
    model(**inputs).loss.backward()
    _, expected = step(plain, **inputs)
    torch.testing.assert_close(weight.main_grad, expected["shared.weight"], rtol=1e-5, atol=1e-6)


def test_a_resized_vocabulary():
    plain = make("BartForConditionalGeneration")
    model, inputs = liger.patch(twin(plain)), batch(plain)
    for each in (plain, model):
        each.resize_token_embeddings(VOCAB + 9, mean_resizing=False)
    model.load_state_dict(plain.state_dict())
    output = step(model, **inputs)
    assert output[0].logits is None
    assert_same_step(output, step(plain, **inputs))


def test_wrappers_of_modules_see_the_loss():
    """fully_shard looks for the tensors in the output of each module, for hooks on their gradients."""
    model, seen = liger.patch(make("BertForMaskedLM")), []

    def hook(module, args, output):
        leaves = torch.utils._pytree.tree_leaves(output)
        seen.extend(leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        return torch.utils._pytree.tree_map(lambda leaf: leaf, output)

    model.cls.register_forward_hook(hook)
    output = model(**batch(model))
    assert len(seen) == 1 and seen[0].numel() == 1 and output.logits is None
    output.loss.backward()


class Bert(transformers.BertForMaskedLM):
    """The plain form; the others below override a part of it."""

    def loss(self, logits, labels):
        return nn.functional.cross_entropy(logits.view(-1, self.config.vocab_size), labels.view(-1))

    def forward(self, input_ids=None, labels=None, attention_mask=None):
        logits = self.cls(self.bert(input_ids, attention_mask=attention_mask).last_hidden_state)
        return MaskedLMOutput(loss=self.loss(logits, labels), logits=logits)


class Scales(Bert):
    def loss(self, logits, labels):
        return 0.5 * super().loss(0.25 * logits, labels)


class Clamps(Bert):
    def loss(self, logits, labels):
        return super().loss(logits, labels.clamp_min(0))


class OtherIndex(Bert):
    def loss(self, logits, labels):
        loss = nn.CrossEntropyLoss(ignore_index=5)
        return loss(logits.view(-1, self.config.vocab_size), labels.masked_fill(labels < 0, 5).view(-1))


class Smooths(Bert):
    def loss(self, logits, labels):
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        return loss(logits.view(-1, self.config.vocab_size), labels.view(-1))


class Sums(Bert):
    def loss(self, logits, labels):
        loss = nn.CrossEntropyLoss(reduction="sum")
        return loss(logits.view(-1, self.config.vocab_size), labels.view(-1))


class Caps(Bert):
    def loss(self, logits, labels):
        return super().loss(3 * torch.tanh(logits / 3), labels)


class MasksLabels(Bert):
    def loss(self, logits, labels):
        return super().loss(logits, labels.masked_fill(labels == 7, -100))


class MasksLabelsInPlace(Bert):
    def loss(self, logits, labels):
        return super().loss(logits, labels.masked_fill_(labels == 7, -100))


class Shifts(Bert):
    def loss(self, logits, labels):
        return super().loss(logits[:, :-1].contiguous(), labels[:, 1:].contiguous())


class UsesLogits(Bert):
    def loss(self, logits, labels):
        return super().loss(logits, labels) + 1e-3 * logits.logsumexp(-1).square().mean()


class ReadsTwice(Bert):
    def loss(self, logits, labels):
        return super().loss(logits, labels) + super().loss(2 * logits, labels)


OPTIONS = "it gives the cross entropy options of its own"
LEFT = {
    Clamps: CHANGED_LABELS,
    OtherIndex: CHANGED_LABELS,
    Smooths: OPTIONS,
    Sums: OPTIONS,
    Caps: CHANGED,
    MasksLabels: CHANGED_LABELS,
    MasksLabelsInPlace: CHANGED_LABELS,
    Shifts: CHANGED_LABELS,
    UsesLogits: "between head and loss it",
    ReadsTwice: CHANGED,
}


def compare(cls):
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **BERT
    )
    torch.manual_seed(1)
    plain = cls(config).train()
    model = liger.patch(twin(plain))
    ids = torch.randint(4, VOCAB, (2, 11))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.5, -100)
    labels[0, 0] = 7
    ours, theirs = (step(each, input_ids=ids, labels=labels.clone()) for each in (model, plain))
    assert_same_step(ours, theirs)
    return model, ours[0]


@pytest.mark.parametrize("cls", [Bert, Scales])
def test_forwards_whose_head_computes_the_loss(cls):
    model, output = compare(cls)
    assert lt.patch_report(model).replaced[""] == "fused_linear_cross_entropy"
    assert output.logits is None


@pytest.mark.parametrize("cls", LEFT)
def test_forwards_that_keep_their_logits(cls):
    model, output = compare(cls)
    assert LEFT[cls] in lt.patch_report(model).left[""]
    assert output.logits is not None


def test_the_loss_from_logits_alone_says_what_it_does_not_replace():
    model = liger.patch(make("BertForMaskedLM"), fused_linear_cross_entropy=False, cross_entropy=True)
    assert lt.patch_report(model).left[""] == ITSELF


@pytest.mark.parametrize(
    "loss",
    [
        lambda self, logits, labels: nn.functional.cross_entropy(logits.view(-1, VOCAB), labels.view(-1)[:9]),
        lambda self, logits, labels: logits.logsumexp(-1).mean(),
        lambda self, logits, labels: nn.functional.cross_entropy(logits.view(-1, 2 * VOCAB), labels.view(-1)),
        lambda self, logits, labels: torch.zeros((), requires_grad=True),
    ],
    ids=["fewer labels", "another function", "another view", "no loss"],
)
def test_code_that_changes_after_patching_raises(loss):
    model, _ = compare(Bert)
    model.loss = types.MethodType(loss, model)
    with pytest.raises((RuntimeError, AttributeError), match="its head computes the loss without logits"):
        model(torch.ones(2, 11, dtype=torch.long), torch.ones(2, 11, dtype=torch.long))
