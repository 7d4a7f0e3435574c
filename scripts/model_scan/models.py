# SPDX-License-Identifier: BSD-3-Clause
"""The language model classes of the installed transformers, and tiny instances of them."""

from __future__ import annotations

import copy

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from .configs import tiny_config
from .inputs import ERRORS, image_batch, sound_batch, text_batch

_MAPPINGS = (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)


class NotBuilt(Exception):
    """A model type that has no tiny model here, and the reason."""


def model_classes() -> list[tuple[str, str]]:
    """(model type, class name) of every causal, image-text, encoder-decoder, masked and speech model,
    sorted."""
    found = set()
    for mapping in _MAPPINGS:
        for model_type, names in mapping.items():
            found |= {(model_type, name) for name in ([names] if isinstance(names, str) else names)}
    return sorted(found)


def build(model_type: str, class_name: str, dropout: float = 0.0) -> nn.Module:
    """A tiny model in training mode, float32, with the same weights at every call.

    Raises:
        NotBuilt: a package is missing, no tiny configuration fits, or no known input gives a loss.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        try:
            model = _construct(model_type, class_name, dropout)
        except ImportError as error:
            raise NotBuilt(f"needs another package: {_first_line(error)}") from error
        except ERRORS as error:
            raise NotBuilt(
                f"no tiny configuration fits: {type(error).__name__}: {_first_line(error)}"
            ) from error
        _fill(model)
    # A copy, because a recurrent model saves its state.
    probe = copy.deepcopy(model)
    try:
        output = probe(**text_batch(model))
    except ERRORS as error:
        # Models that need an image, or cannot pad.
        batch = image_batch(probe) or sound_batch(probe)
        if batch is None:
            raise NotBuilt(f"no known input fits: {type(error).__name__}: {_first_line(error)}") from error
        output = probe(**batch)
    loss = output.get("loss") if isinstance(output, dict) else output[0]
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        raise NotBuilt("it computes no loss from labels")
    return model


def _construct(model_type, class_name, dropout):
    config = tiny_config(model_type)
    cls = getattr(transformers, class_name, None)
    if cls is None:
        raise AttributeError(f"transformers has no {class_name}")
    if not isinstance(config, cls.config_class):
        # The text model of a type whose configuration has parts.
        config = next((part for part in vars(config).values() if isinstance(part, cls.config_class)), config)
    _set_dropout(config, dropout)
    return cls(config).float().train()


def _set_dropout(config, probability):
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            _set_dropout(value, probability)
        elif (
            ("dropout" in name or name.endswith("pdrop"))
            and type(value) in (int, float)
            and value != probability
        ):
            setattr(config, name, probability)


def _fill(model):
    """Norm weights and biases that are not trivial."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and parameter.is_floating_point():
            if "norm" in name.lower() and name.endswith("weight"):
                nn.init.uniform_(parameter, 0.5, 1.5)
            elif name.endswith("bias"):
                nn.init.normal_(parameter, std=0.05)


def _first_line(error):
    return " ".join(str(error).split())[:100]
