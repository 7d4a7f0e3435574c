# SPDX-License-Identifier: BSD-3-Clause
"""Checks of a model and its patched copy. A check raises :class:`Differs`, or :class:`NotRun` with a
reason."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from liger.transformers.checkpointing import methods
from liger.transformers.patching import patch

from .comparison import Differs, NotRun, both, copied, patched_copy, step
from .inputs import ERRORS, SOUNDS, batch_for, image_batch, packed, parameters_of
from .models import NotBuilt, build


def training(plain, patched, model_type, class_name):
    both(plain, patched, batch_for(plain))
    both(plain, patched, batch_for(plain, padded=False))


def large_weights(plain, patched, model_type, class_name):
    with _scaled((plain, patched), 6.0):
        # Rounding errors grow with the weights, in both models.
        both(plain, patched, batch_for(plain), factor=30)


def dropout(plain, patched, model_type, class_name):
    try:
        model = build(model_type, class_name, dropout=0.2)
    except NotBuilt as error:
        raise NotRun("the model cannot be built with dropout") from error
    both(model, patched_copy(model), batch_for(model), seed=5)


def checkpointing(plain, patched, model_type, class_name):
    if not plain.supports_gradient_checkpointing:
        raise NotRun("the model does not support it")
    for reentrant in (False, True):
        try:
            for model in (plain, patched):
                methods.enable(model, use_reentrant=reentrant)
            if reentrant:
                for model in (plain, patched):
                    model.enable_input_require_grads()
            both(plain, patched, batch_for(plain))
        finally:
            for model in (plain, patched):
                methods.disable(model)
                if reentrant:
                    model.disable_input_require_grads()


def generate(plain, patched, model_type, class_name):
    if not plain.can_generate():
        raise NotRun("the model does not generate")
    batch = {
        k: v
        for k, v in batch_for(plain, padded=False).items()
        if k in ("input_ids", "mm_token_type_ids", *SOUNDS)
    }
    if "input_ids" in batch:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    arguments = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if not torch.equal(*_in_evaluation(plain, patched, lambda model: model.generate(**batch, **arguments))):
        raise Differs("other tokens")


def evaluation(plain, patched, model_type, class_name):
    """Logits and loss in evaluation, where the patched model returns logits, too."""
    batch = batch_for(plain)
    with torch.no_grad():
        expected, actual = _in_evaluation(plain, patched, lambda model: model(**batch))
    for name in ("loss", "logits"):
        if isinstance(expected.get(name), torch.Tensor):
            scale = expected[name].abs().max().item()
            if not torch.allclose(actual[name], expected[name], rtol=0, atol=2e-5 * max(scale, 1e-3)):
                raise Differs(f"other {name}")


def _in_evaluation(plain, patched, function):
    """A function of both models in evaluation mode. What the unpatched model refuses, the check does not
    run."""
    results = []
    for model in (plain, patched):
        model.eval()
        try:
            results.append(function(model))
        except ERRORS as error:
            if model is plain:
                raise NotRun(f"the model raises {type(error).__name__}") from error
            raise
        finally:
            model.train()
    return results


def unpatch(plain, patched, model_type, class_name):
    restored = patch.unpatch(copied(patched))
    for (name, module), other in zip(restored.named_modules(), plain.modules(), strict=True):
        if type(module) is not type(other):
            raise Differs(f"{name} has another class")
    batch = batch_for(plain)
    try:
        expected, expected_grads = step(plain, batch)
    except ERRORS as error:
        raise NotRun(f"the model raises {type(error).__name__}") from error
    loss, grads = step(restored, batch)
    if not torch.equal(loss, expected) or any(
        not torch.equal(grads[n], g) for n, g in expected_grads.items()
    ):
        raise Differs("other numbers than before")


def bfloat16(plain, patched, model_type, class_name):
    """Both models in bfloat16 against float32: the error of the patched one is at most twice the error of the
    other."""
    narrow = [copied(model).to(torch.bfloat16) for model in (plain, patched)]
    found = [_bfloat16_difference(plain, narrow, batch_for(plain, seed=seed)) for seed in range(3)]
    # A rounding may send a token to another expert, in either model, but not in every batch.
    if None not in found:
        raise Differs(found[0])


def _bfloat16_difference(exact_model, narrow, batch):
    """What is wrong with two bfloat16 models (plain, patched) vs. a float32 one; None if all is well."""
    errors: list[tuple[float, float]] = []
    try:
        exact_loss, exact = step(exact_model, batch)
        for model in narrow:
            loss, grads = step(model, batch)
            squares = [(g.float() - exact[n]).square().sum().item() for n, g in grads.items() if n in exact]
            errors.append(((loss.float() - exact_loss).abs().item(), sum(squares) ** 0.5))
    except ERRORS as error:
        if not errors:
            raise NotRun(f"the model raises {type(error).__name__}") from error
        raise
    norm = sum(g.square().sum().item() for g in exact.values()) ** 0.5
    for what, scale, ours, reference in zip(
        ("loss", "gradients"), (exact_loss.abs().item(), norm), errors[1], errors[0], strict=True
    ):
        if not ours <= 2 * reference + 0.01 * scale:
            return f"the error of the {what} is {ours:.2g}, the error of the model {reference:.2g}"
    return None


def packed_positions(plain, patched, model_type, class_name):
    if "position_ids" not in parameters_of(plain):
        raise NotRun("the model takes no position_ids")
    both(plain, patched, packed(batch_for(plain)))


def resized_vocabulary(plain, patched, model_type, class_name):
    """Resized before and after patching."""
    first = copied(plain)
    try:
        size = plain.get_input_embeddings().weight.shape[0] + 7
        first.resize_token_embeddings(size, mean_resizing=False)
    except ERRORS as error:
        raise NotRun(f"the model raises {type(error).__name__}") from error
    second = copied(patched)
    second.resize_token_embeddings(size, mean_resizing=False)
    # New rows are random.
    second.load_state_dict(first.state_dict())
    both(first, second, batch_for(plain))
    both(first, patched_copy(first), batch_for(plain))


def images(plain, patched, model_type, class_name):
    if not {"pixel_values", "flattened_patches"} & parameters_of(plain):
        raise NotRun("the model takes no images")
    batch = image_batch(plain)
    if batch is None:
        raise NotRun("no layout of images that the scan knows fits the model")
    both(plain, patched, batch)


def arguments(plain, patched, model_type, class_name):
    """Every argument that the loss, the head or the output depends on."""
    batch = batch_for(plain)
    shifted = batch["labels"].roll(-1, 1)
    given: list[dict[str, Any]] = [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(5)},
        {"shift_labels": shifted},
        {"logits_to_keep": 3, "shift_labels": shifted[:, -3:]},
        {"ignore_index": int(batch["labels"][1, 1])},
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"output_router_logits": True},
        {"return_dict": False},
        {"return_dict": False, "output_router_logits": True},
        {"use_cache": True},
    ]
    ran = 0
    for more in given:
        with contextlib.suppress(NotRun):
            both(plain, patched, {**batch, **more})
            ran += 1
    if not ran:
        raise NotRun("the model takes none of them")


def ignored_labels(plain, patched, model_type, class_name):
    """One row without a single label."""
    batch = batch_for(plain)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][1] = -100
    both(plain, patched, batch)


Check = Callable[[nn.Module, nn.Module, str, str], None]
CHECKS: dict[str, Check] = {
    "training": training,
    "arguments": arguments,
    "ignored labels": ignored_labels,
    "evaluation": evaluation,
    "generate": generate,
    "images": images,
    "packed positions": packed_positions,
    "dropout": dropout,
    "checkpointing": checkpointing,
    "large weights": large_weights,
    "bfloat16": bfloat16,
    "resized vocabulary": resized_vocabulary,
    "unpatch": unpatch,
}


@contextlib.contextmanager
def _scaled(models, factor: float) -> Iterator[None]:
    """Matrices of every model times a factor."""
    before = [copy.deepcopy(model.state_dict()) for model in models]
    try:
        for model in models:
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.mul_(factor)
        yield
    finally:
        for model, state in zip(models, before, strict=True):
            model.load_state_dict(state)
