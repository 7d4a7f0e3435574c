# SPDX-License-Identifier: BSD-3-Clause
"""The fused head beside the logits of every model class of transformers: the same log-probabilities, or a
refusal."""

import pytest
import tiny_models
import torch
import trl_trainers as made

from liger.trl._head import FusedHead
from liger.trl._transform import Transform
from model_scan import inputs, models

# Scales, softcaps, a text configuration whose scale is not used, a decoder that is called instead of the base
# model, a model within a model.
QUICK = (
    "aya_vision", "cohere", "falcon_h1", "gemma2", "granite", "llama", "llama4_text", "mamba", "minicpm3", "mllama",
    "opt", "qwen2_vl",
)  # fmt: skip
CLASSES = [
    pytest.param(*pair, id="-".join(pair), marks=() if pair[0] in QUICK else pytest.mark.slow)
    for pair in models.model_classes()
]


@pytest.mark.parametrize(("model_type", "class_name"), CLASSES)
def test_equal_or_refused(model_type, class_name):
    try:
        model = models.build(model_type, class_name).eval()
        batch = inputs.batch_for(model)
        labels = batch.pop("labels")
        with torch.no_grad():
            logits = model(**batch).logits
    except (models.NotBuilt, *inputs.ERRORS) as reason:
        assert model_type not in QUICK, reason
        pytest.skip(str(reason)[:100])
    if model_type not in QUICK and logits.shape[:-1] != labels.shape:
        pytest.skip(f"logits of shape {tuple(logits.shape)}")
    target = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    expected = logits.float().log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    expected = torch.where(target != -100, expected, 0.0)[:, :-1]
    try:
        FusedHead(model)
    except ValueError as refusal:
        assert model_type not in QUICK
        assert str(refusal).startswith(f"liger.trl: {class_name} "), refusal
        return
    try:
        with torch.no_grad():
            scores = model(**batch, labels=labels, fused_lm_head=True)
    except RuntimeError as refusal:
        # A head of another class, which only its call can tell from an adapter's.
        assert model_type not in QUICK
        assert str(refusal).startswith("liger.trl: the head is a "), refusal
        return
    torch.testing.assert_close(scores.log_probs.float(), expected, rtol=1e-4, atol=1e-4)


REFUSED = {
    "modernbert-decoder": "ModernBertDecoderForCausalLM",  # a layer before the head
    "inkling_text": "InklingForCausalLM",  # logits that are cut
    "chameleon": "ChameleonForConditionalGeneration",  # logits that are masked
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("model_type", REFUSED)
def test_refused(model_type, dtype):
    class_name = REFUSED[model_type]
    model = models.build(model_type, class_name).to(dtype)
    with pytest.raises(ValueError, match=f"{class_name} does more than scale and cap"):
        Transform.of(model, 1.0)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("head", made.HEADS)
def test_transforms_of_the_forward(head, dtype):
    name, overrides = made.HEADS[head]
    model = tiny_models.make(name, **overrides).to(dtype)
    modules = dict(model.named_modules())
    transform = Transform.of(model, 2.0)
    # Granite divides its logits by 0.5.
    assert transform[:2] == {"softcap": (2.0, 5.0), "scale": (1.0, None), "tied": (2.0, None)}[head]
    # The modules are where they were.
    assert dict(model.named_modules()) == modules


def test_a_scale_that_is_ignored_by_the_forward():
    """Aya Vision has the text configuration of Cohere, whose logits are scaled; its own are not."""
    model = models.build("aya_vision", "AyaVisionForConditionalGeneration")
    assert model.config.get_text_config().logit_scale != 1.0
    assert Transform.of(model, 1.0) == Transform()


@pytest.mark.parametrize("embeds", (lambda m: m.get_input_embeddings(), lambda m: m.model.embed_tokens))
def test_embeddings_that_the_forward_computes(embeds):
    """The base model gets no token ids, so a call of it with them may be another model."""
    model = made.model()

    class Embedding(type(model)):
        def forward(self, input_ids, **kwargs):
            return super().forward(inputs_embeds=2.0 * embeds(self)(input_ids), **kwargs)

    model.__class__ = Embedding
    with pytest.raises(
        ValueError, match=r"Embedding does .* or computes the embeddings that its base model gets"
    ):
        Transform.of(model, 1.0)


def test_a_sharded_model_is_not_read():
    """No weight and no hook is touched: the weights of a model under ZeRO-3 or FSDP2 are not there."""
    model = made.model()

    def touched(module, *_):
        raise AssertionError(f"{type(module).__name__} was called")

    for module in (model.model, model.lm_head):
        module.register_forward_pre_hook(touched)
    for parameter in model.parameters():
        parameter.data = parameter.new_empty(0)
    assert Transform.of(model, 1.0) == Transform()
