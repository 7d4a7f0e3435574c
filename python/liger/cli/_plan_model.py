"""``liger plan --model``: the activations of a patched model in bytes per token, from its configuration."""

import json
import sys
from pathlib import Path

import torch

import liger

from ._format import human_bytes, table
from ._quiet import quiet_patching


def run(name, dtype, tokens, as_json):
    """Prints the table of a model; returns the exit code."""
    try:
        from ..transformers._saved_bytes import saved_in_layers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        print("liger plan --model needs transformers: pip install 'liger-ops[transformers]'", file=sys.stderr)
        return 2
    try:
        model = _model(name)
        with quiet_patching():
            rows = saved_in_layers(liger.patch(model), dtype)
    except (OSError, ValueError) as error:
        print(f"liger plan --model {name}: {error}", file=sys.stderr)
        return 2
    plain, recompute = sum(row.plain for row in rows), sum(row.recompute for row in rows)
    if as_json:
        result = {"rows": [vars(row) for row in rows], "plain": plain, "recompute": recompute}
        print(json.dumps(result, indent=2))
        return 0
    lines = [(row.part, row.tensor, f"{row.plain:,}", f"{row.recompute:,}") for row in rows]
    lines.append(("all layers", "", f"{plain:,}", f"{recompute:,}"))
    if tokens is not None:
        lines.append((f"{tokens:,} tokens", "", human_bytes(plain * tokens), human_bytes(recompute * tokens)))
    layers = model.config.get_text_config().num_hidden_layers
    print(
        f"{model.config.model_type}, {layers} layers, {str(dtype).removeprefix('torch.')}: saved bytes per token\n"
    )
    print(table(lines, header=("part", "tensors", "liger.patch", "recompute=True")))
    return 0


def _model(name):
    """The model of a configuration, without memory. Raises OSError or ValueError for one that is none."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    try:
        config = _config(name)
        text = config.get_text_config()
        with torch.device("meta"):
            if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
                return AutoModelForCausalLM.from_config(text)
            if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
                return AutoModelForImageTextToText.from_config(config)
        raise ValueError(f"{config.model_type} is no causal language model of transformers")
    except StrictDataclassError as error:
        raise ValueError(" ".join(str(error).split())) from error
    # What the layers of a model raise for a setting that they do not know, such as hidden_act, or for sizes below 1.
    except (KeyError, TypeError, ZeroDivisionError, RuntimeError) as error:
        raise ValueError(f"no model can be built from the configuration: {error}") from error


def _config(name):
    """The configuration at a path, or of a model on the Hub or in its cache."""
    from transformers import CONFIG_MAPPING, AutoConfig

    path = Path(name)
    if not path.is_file():
        return AutoConfig.from_pretrained(name)
    settings = json.loads(path.read_text())
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise ValueError("the configuration has no model_type")
    model_type = settings.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"transformers has no model_type '{model_type}'")
    return AutoConfig.for_model(model_type, **settings)
