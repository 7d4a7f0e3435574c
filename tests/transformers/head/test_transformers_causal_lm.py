# SPDX-License-Identifier: BSD-3-Clause
"""Which models compute the loss in their lm_head: forwards that a trial must tell apart."""

import pytest
import torch
from torch import nn

import liger

transformers = pytest.importorskip("transformers")

from tiny_models import VOCAB, assert_same_step, batch, config, make, step, twin  # noqa: E402
from transformers.modeling_outputs import CausalLMOutput  # noqa: E402

import liger.transformers as lt  # noqa: E402
from liger.transformers.attention.rotary import recognise, rotary_function  # noqa: E402
from liger.transformers.head.causal_lm import CHANGED, CHANGED_LABELS  # noqa: E402


class Llama(transformers.LlamaForCausalLM):
    """The plain form; the others below override a part of it."""

    def hidden(self, outputs):
        return outputs.last_hidden_state

    def logits(self, hidden):
        return self.lm_head(hidden)

    def loss(self, logits, labels, kwargs):
        return self.loss_function(logits=logits, labels=labels, vocab_size=VOCAB, **kwargs)

    def forward(self, input_ids=None, labels=None, attention_mask=None, **kwargs):
        hidden = self.hidden(self.model(input_ids, attention_mask=attention_mask))
        logits = self.logits(hidden)
        return CausalLMOutput(loss=self.loss(logits, labels, kwargs), logits=logits)


class DropsTheCount(Llama):
    def loss(self, logits, labels, kwargs):
        return self.loss_function(logits=logits, labels=labels, vocab_size=VOCAB)


class MasksLabels(Llama):
    def loss(self, logits, labels, kwargs):
        return super().loss(logits, labels.masked_fill(labels == 7, -100), kwargs)


class SecondHead(Llama):
    def loss(self, logits, labels, kwargs):
        return super().loss(logits, labels, kwargs) + 0.1 * self.lm_head(self.kept).square().mean()

    def hidden(self, outputs):
        self.kept = outputs.last_hidden_state
        return self.kept


class OwnCount(Llama):
    def loss(self, logits, labels, kwargs):
        return super().loss(logits, labels, {"num_items_in_batch": 4})


class ScalesLoss(Llama):
    def loss(self, logits, labels, kwargs):
        return 2 * super().loss(logits, labels, kwargs) + 0.25


class UsesLogits(Llama):
    def loss(self, logits, labels, kwargs):
        return super().loss(logits, labels, kwargs) + 1e-3 * logits.logsumexp(-1).square().mean()


class ReadsFirstLogits(Llama):
    def loss(self, logits, labels, kwargs):
        return super().loss(logits, labels, kwargs) + 1e-3 * logits[:, 0].square().mean()


class ReadsShape(Llama):
    def loss(self, logits, labels, kwargs):
        return self.loss_function(logits, labels, logits.shape[-1], **kwargs)


class CountsWithAMask(Llama):
    """The mask changes the logits."""

    def forward(self, input_ids=None, labels=None, attention_mask=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        if attention_mask is not None:
            logits = logits * attention_mask.to(logits.dtype).mean()
        return CausalLMOutput(loss=self.loss(logits, labels, kwargs), logits=logits)


class Cap(nn.Module):
    def __init__(self, cap):
        super().__init__()
        self.cap = cap

    def forward(self, x):
        return self.cap * torch.tanh(x / self.cap)


class CapsByAModule(Llama):
    def __init__(self, settings):
        super().__init__(settings)
        self.cap = Cap(3.0)

    def logits(self, hidden):
        return self.cap(self.lm_head(hidden))


class ScalesByAParameter(Llama):
    def __init__(self, settings):
        super().__init__(settings)
        self.scale = nn.Parameter(torch.tensor(3.0))

    def logits(self, hidden):
        return self.lm_head(hidden) * self.scale


class ScalesBeforeTheHead(Llama):
    def hidden(self, outputs):
        return self.lm_head.weight.dtype.itemsize * outputs.last_hidden_state.tanh()


class HeadInAModule(Llama):
    """As in BERT: the head is part of a module that transforms hidden states first."""

    class Head(nn.Module):
        def __init__(self, head):
            super().__init__()
            self.transform, self.decoder = nn.Linear(64, 64), head

        def forward(self, x):
            return self.decoder(nn.functional.gelu(self.transform(x)))

    def __init__(self, settings):
        super().__init__(settings)
        self.cls = self.Head(self.lm_head)
        del self.lm_head

    def get_output_embeddings(self):
        return self.cls.decoder

    def logits(self, hidden):
        return self.cls(hidden)


def compare(cls, **inputs):
    """(patched model, its output) after one step that agrees with the unpatched one."""
    torch.manual_seed(1)
    plain = cls(config("llama"))
    model = liger.patch(twin(plain))
    ours, theirs = step(model, **{**batch(), **inputs}), step(plain, **{**batch(), **inputs})
    assert_same_step(ours, theirs)
    return model, ours[0]


FUSED = [Llama, DropsTheCount, ScalesLoss, ReadsShape, CapsByAModule, ScalesBeforeTheHead, HeadInAModule]
COUNTS = [{}, {"num_items_in_batch": 5}, {"shift_labels": batch()["labels"].roll(2, 1)}]


@pytest.mark.parametrize("cls", FUSED)
@pytest.mark.parametrize("inputs", COUNTS, ids=["plain", "count", "shift_labels"])
def test_forwards_whose_head_computes_the_loss(cls, inputs):
    model, output = compare(cls, **inputs)
    assert lt.patch_report(model).replaced[""] == "fused_linear_cross_entropy"
    assert output.logits is None


LEFT = {
    MasksLabels: CHANGED_LABELS,
    SecondHead: CHANGED,
    OwnCount: "it gives its loss function arguments of its own",
    UsesLogits: CHANGED,
    ReadsFirstLogits: "between head and loss it",
    CountsWithAMask: "with attention_mask it computes another loss than its head would",
    ScalesByAParameter: "its forward needs more than a trial can give it",
}


@pytest.mark.parametrize("cls", LEFT)
def test_forwards_that_keep_their_logits(cls):
    model, output = compare(cls)
    assert LEFT[cls] in lt.patch_report(model).left[""]
    assert output.logits is not None


def test_labels_that_change_after_patching_raise():
    model = liger.patch(Llama(config("llama")))
    loss = model.loss
    model.loss = lambda logits, labels, kwargs: loss(logits, labels.masked_fill(labels == 7, -100), kwargs)
    with pytest.raises(RuntimeError, match="calls its loss function with other labels or arguments"):
        model.train()(**batch())
    assert model(**batch(), skip_logits=False).logits is not None


def test_the_auxiliary_loss_of_a_tuple():
    plain = make("Mixtral", num_local_experts=4)
    model = liger.patch(twin(plain))
    inputs = {**batch(), "output_router_logits": True}
    named, given = model(**inputs), model(**inputs, return_dict=False)
    assert torch.equal(given[1], named.aux_loss) and len(given) == len(plain(**inputs, return_dict=False)) - 1


def test_the_auxiliary_loss_beside_a_loss_function_of_the_caller():
    plain = make("Mixtral", num_local_experts=4)
    model = liger.patch(twin(plain))
    for each in (plain, model):
        each.config.output_router_logits = True
        each.loss_function = lambda logits, *rest, **kwargs: logits.float().square().mean()
    ours, theirs = (each.train()(**batch(), return_dict=False) for each in (model, plain))
    torch.testing.assert_close(ours[1], theirs[1])


def test_a_model_within_a_model():
    """The outer model has the head of the inner one, and computes the loss from its logits."""

    class Outer(Llama):
        def __init__(self, settings):
            super().__init__(settings)
            self.language_model = transformers.LlamaForCausalLM(settings)
            del self.model, self.lm_head

        def get_input_embeddings(self):
            return self.language_model.get_input_embeddings()

        def get_output_embeddings(self):
            return self.language_model.lm_head

        def forward(self, input_ids=None, labels=None, attention_mask=None, **kwargs):
            logits = self.language_model(input_ids, attention_mask=attention_mask).logits
            return CausalLMOutput(loss=self.loss(logits, labels, kwargs), logits=logits)

    model, output = compare(Outer)
    replaced = lt.patch_report(model).replaced
    assert (
        replaced[""] == replaced["language_model"] == "fused_linear_cross_entropy" and output.logits is None
    )
    assert model.language_model(**batch()).logits is None
    assert model.language_model(batch()["input_ids"]).logits.shape == (2, 11, VOCAB)
    liger.unpatch(model)
    assert type(model.language_model.lm_head) is nn.Linear


def test_rotating_queries_alone():
    def rotate(x, cos, sin):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def theirs(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate(q, cos, sin) if k is None else (rotate(q, cos, sin), rotate(k, cos, sin))

    ours = rotary_function(theirs, recognise(theirs))
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    tables = {"cos": torch.randn(1, 3, 8), "sin": torch.randn(1, 3, 8)}
    torch.testing.assert_close(ours(q, **tables), theirs(q, **tables))
    torch.testing.assert_close(ours(q, k, **tables), theirs(q, k, **tables))
