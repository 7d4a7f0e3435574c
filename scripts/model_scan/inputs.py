# SPDX-License-Identifier: BSD-3-Clause
"""Inputs for tiny models: tokens and labels for every type, and images for those that take them."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from .configs import FIRST_SPECIAL

# What configuration classes, constructors and forwards of transformers raise for sizes or inputs that do not
# fit.
ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, RuntimeError,
    StopIteration, StrictDataclassError, TypeError, ValueError,
)  # fmt: skip

ROWS, TOKENS = 2, 12
MAX_IMAGE_TOKENS = 96
FIRST_TOKEN, LAST_TOKEN = 4, 270


def parameters_of(model: torch.nn.Module) -> set[str]:
    """The names of the arguments of a model's forward."""
    return set(inspect.signature(model.forward).parameters)


def batch_for(model: torch.nn.Module, padded: bool = True, seed: int = 0) -> dict[str, Any]:
    """A batch of text, or with an image in every row for a model that refuses text alone."""
    if "input_ids" not in parameters_of(model):
        return sound_batch(model) or text_batch(model, padded, seed)
    batch = text_batch(model, padded, seed)
    if not {"pixel_values", "flattened_patches"} & parameters_of(model):
        return batch
    try:
        with torch.no_grad():
            model(**batch)
    except ERRORS:
        return image_batch(model) or batch
    return batch


def text_batch(model: torch.nn.Module, padded: bool = True, seed: int = 0) -> dict[str, Any]:
    """input_ids, labels of which some are ignored, and, if ``padded``, a mask that pads the second row on the
    right."""
    generator = torch.Generator().manual_seed(3 + seed)
    ids = torch.randint(FIRST_TOKEN, LAST_TOKEN, (ROWS, TOKENS), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    names = parameters_of(model)
    batch: dict[str, Any] = {"input_ids": ids} if "input_ids" in names else {}
    if padded and "attention_mask" in names:
        mask = torch.ones_like(ids)
        mask[1, -2:] = 0
        labels[mask == 0] = -100
        batch["attention_mask"] = mask
    if "mm_token_type_ids" in names:
        batch["mm_token_type_ids"] = torch.zeros_like(ids)
    if "use_cache" in names:
        batch["use_cache"] = False
    return {**batch, "labels": labels}


# Names of the sounds that take the place of input_ids.
SOUNDS = ("input_features", "input_values")


def sound_batch(model: torch.nn.Module) -> dict[str, Any] | None:
    """A batch of sounds with labels; None if the model takes none in a known layout."""
    name = next((name for name in SOUNDS if name in parameters_of(model)), None)
    if name is None:
        return None
    batch, generator = text_batch(model, padded=False), torch.Generator().manual_seed(4)
    batch.pop("input_ids", None)
    # A copy, because batch normalisation counts the forwards that it sees.
    model = copy.deepcopy(model)
    for shape in _sound_shapes(model.config, name):
        candidate = {**batch, name: torch.randn(ROWS, *shape, generator=generator)}
        try:
            with torch.no_grad():
                model(**candidate)
        except ERRORS:
            continue
        return candidate
    return None


def _sound_shapes(config, name):
    """Shapes of one sound: samples, or frames of features in both orders."""
    if name == "input_values":
        yield (1600,)
        return
    bands = getattr(config, "num_mel_bins", None)
    if bands is not None:
        yield bands, 2 * config.max_source_positions
    names = (
        "feature_projection_input_dim",
        "input_feat_per_channel",
        "num_mel_bins",
        "hidden_size",
        "d_model",
    )
    for key in names:
        if isinstance(getattr(config, key, None), int):
            yield 32, getattr(config, key)


def packed(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch as two sequences in every row: position_ids that restart."""
    positions = torch.cat((torch.arange(5), torch.arange(TOKENS - 5))).expand(ROWS, TOKENS)
    return {
        **{k: v for k, v in batch.items() if k != "attention_mask"},
        "position_ids": positions.contiguous(),
    }


def image_batch(model: torch.nn.Module) -> dict[str, Any] | None:
    """A batch with one image in every row; None if no known layout of images fits the model."""
    names = parameters_of(model)
    if not {"pixel_values", "flattened_patches"} & names:
        return None
    for images in _layouts(model.config, names):
        batch = _with_image_tokens(model, {**text_batch(model, padded=False), **images})
        if batch is not None:
            return batch
    return None


def _layouts(config, names):
    """Forms of pixel_values and its companions, the most specific first."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or getattr(config, "image_size", None) or 32
    size = size if isinstance(size, int) else size[0]
    patch = getattr(vision, "patch_size", 8)
    patch = patch if isinstance(patch, int) else patch[0]
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    times = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", None) or 1
    random = torch.Generator().manual_seed(4)

    def pixels(*shape):
        return torch.randn(shape, generator=random)

    extra = {}
    if "qformer_input_ids" in names:
        extra["qformer_input_ids"] = torch.randint(FIRST_TOKEN, LAST_TOKEN, (ROWS, TOKENS), generator=random)
    if "image_embeds_position_mask" in names:
        extra["image_embeds_position_mask"] = torch.zeros(ROWS, TOKENS, dtype=torch.bool)
        extra["image_embeds_position_mask"][:, 1:5] = True
    if "image_attention_mask" in names:
        extra["image_attention_mask"] = torch.ones(ROWS, TOKENS, 1, dtype=torch.long)
    if "bbox" in names:
        extra["bbox"] = torch.zeros(ROWS, TOKENS, 4, dtype=torch.long)
    if "flattened_patches" in names:
        yield {
            "flattened_patches": torch.cat((torch.ones(ROWS, 4, 2), pixels(ROWS, 4, channels * patch**2)), -1)
        }
        return
    if "image_grid_thw" in names or "grid_thw" in names:
        name = "image_grid_thw" if "image_grid_thw" in names else "grid_thw"
        grid = torch.tensor([[1, 4, 4]] * ROWS)
        merged = {"image_merge_sizes": torch.tensor([2] * ROWS)} if "image_merge_sizes" in names else {}
        for width in (channels * times * patch**2, channels * patch**2):
            yield {"pixel_values": pixels(16 * ROWS, width), name: grid, **merged}
        yield {"pixel_values": pixels(16 * ROWS, channels, patch, patch), name: grid, **merged}
    sizes = {"image_sizes": torch.tensor([[size, size]] * ROWS)} if "image_sizes" in names else {}
    for more, shape in itertools.product(
        ({**sizes, **extra}, extra),
        (
            (ROWS, channels, size, size), (ROWS, 1, channels, size, size), (ROWS, 5, channels, size, size),
            (ROWS, 2, channels, size, size), (ROWS, 3, channels, size, size),
        ),
    ):  # fmt: skip
        yield {"pixel_values": pixels(*shape), **more}
    if "pixel_attention_mask" in names:
        yield {
            "pixel_values": pixels(ROWS, 1, channels, size, size),
            "pixel_attention_mask": torch.ones(ROWS, 1, dtype=torch.long),
        }
    if "high_res_pixel_values" in names:
        high = getattr(config, "high_res_vision_config", vision)
        large = getattr(high, "image_size", size)
        yield {
            "pixel_values": pixels(ROWS, channels, size, size),
            "high_res_pixel_values": pixels(ROWS, channels, large, large),
        }
    if "spatial_shapes" in names:
        shapes = torch.tensor([[4, 4]] * ROWS)
        mask = torch.ones(ROWS, 16, dtype=torch.long)
        yield {
            "pixel_values": pixels(ROWS, 16, channels * patch**2), "spatial_shapes": shapes,
            "pixel_attention_mask": mask,
        }  # fmt: skip
    if "image_position_ids" in names or "pixel_position_ids" in names:
        name = "image_position_ids" if "image_position_ids" in names else "pixel_position_ids"
        grid = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).reshape(
            1, 16, 2
        )
        yield {
            "pixel_values": pixels(ROWS, 16, channels * patch**2),
            name: grid.expand(ROWS, -1, -1).contiguous(),
        }


def _with_image_tokens(model, batch):
    """The batch with so many image tokens in every row that the model accepts it; None if it accepts none."""
    token = _image_token(model.config)
    rows, tried = [0, 1, 4, 16, 17, 2, 8, 20, 9, 25, 5, 64], set()
    while rows:
        count = rows.pop(0)
        if count in tried or count > MAX_IMAGE_TOKENS:
            continue
        tried.add(count)
        candidate = _insert(batch, token, count)
        if candidate is None:
            continue
        try:
            with torch.no_grad():
                model(**candidate)
        except ERRORS as error:
            wanted = re.search(r"features:? (\d+)", str(error))
            if wanted and int(wanted[1]) % ROWS == 0:
                rows.insert(0, int(wanted[1]) // ROWS)
            continue
        return candidate
    return None


def _insert(batch, token, count):
    if count and token is None:
        return None
    extended = dict(batch)
    tokens = torch.full((ROWS, count), 0 if token is None else token)
    for name, value in (("input_ids", tokens), ("labels", torch.full_like(tokens, -100))):
        if name not in batch:
            continue
        extended[name] = torch.cat((batch[name][:, :2], value, batch[name][:, 2:]), 1)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in batch:
            marked = torch.zeros_like(tokens) if token is None else torch.ones_like(tokens)
            extended[name] = torch.cat((batch[name][:, :2], marked, batch[name][:, 2:]), 1)
    return extended


def _image_token(config):
    names = (
        "image_token_id",
        "image_token_index",
        "image_patch_id",
        "media_placeholder_token_id",
        "video_token_index",
    )
    found = next((getattr(config, n) for n in names if isinstance(getattr(config, n, None), int)), None)
    return found if found is None or found >= FIRST_SPECIAL else None
