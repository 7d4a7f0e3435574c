# SPDX-License-Identifier: BSD-3-Clause
"""``liger plan --model``: the activations of a patched model in bytes per token, from its configuration."""

import json
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

import torch

import liger

from ._format import human_bytes, table
from ._quiet import quiet_patching


def run(name, dtype, tokens, as_json, head_peak):
    """Prints the tables of a model; returns the exit code. ``head_peak(tokens, hidden, vocab, dtype,
    is_trained)``: bytes of the lm_head and its loss."""
    try:
        _refuse_unknown(name)
        from ..transformers.checkpointing import saved_bytes

        model = _model(name)
        with quiet_patching():
            rows = saved_bytes.saved_in_layers(liger.patch(model, verbose=False), dtype)
        layer_bytes = saved_bytes.recomputed_layers(model, dtype)
        others = saved_bytes.uncounted_layers(model)
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "huggingface_hub"):
            raise
        print("liger plan --model needs transformers: pip install 'liger-ops[transformers]'", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"liger plan --model {name}: {error}", file=sys.stderr)
        return 2
    plain, recompute = sum(row.plain for row in rows), sum(row.recompute for row in rows)
    adapters = saved_bytes.saved_with_adapters(rows)
    step = {} if tokens is None else _step(model, dtype, tokens, head_peak)
    if step:
        step["checkpointed"] = _checkpointed(step, layer_bytes, tokens)
    if as_json:
        result = step | {
            "rows": [vars(row) for row in rows],
            "plain": plain,
            "recompute": recompute,
            "adapters": adapters,
            "uncounted_layers": others,
        }
        print(json.dumps(result, indent=2))
        return 0
    lines = [(row.part, row.tensor, f"{row.plain:,}", f"{row.recompute:,}") for row in rows]
    lines.append(("these layers" if others else "all layers", "", f"{plain:,}", f"{recompute:,}"))
    layers = model.config.get_text_config().num_hidden_layers
    counted = f"{layers - others.total()} of {layers}" if others else layers
    print(
        f"{model.config.model_type}, {counted} layers, {str(dtype).removeprefix('torch.')}: saved bytes per token\n"
    )
    print(table(lines, header=("part", "tensors", "liger.patch", "recompute=True")))
    if others:
        names = ", ".join(f"{count} x {name}" for name, count in others.items())
        print(f"\nnot counted: {names}, not x + attention(norm(x)) followed by a norm and an MLP")
    if step:
        print(f"\n{_step_table(step, tokens, (plain, recompute), adapters)}")
        print(f"\n{_checkpointed_table(step['checkpointed'])}")
        print(
            "\nBeyond that: adapters, a layer's other temporaries, CUDA's context, the allocator's fragments."
        )
    return 0


def _step(model, dtype, tokens, head_peak):
    """Bytes of a training step apart from the activations of the layers."""
    weights = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    text = model.config.get_text_config()
    hidden, vocab = text.hidden_size, text.vocab_size
    # The gradient of the head's weight is in the peak of the head.
    return {
        "weights": weights,
        "head_peak": head_peak(tokens, hidden, vocab, dtype, True),
        "frozen_head_peak": head_peak(tokens, hidden, vocab, dtype, False),
        "gradients_and_moments": 3 * weights - vocab * hidden * dtype.itemsize,
    }


def _step_table(step, tokens, saved, adapters):
    """``saved``: bytes per token, plain and with recompute=True; ``adapters``: plain, with LoRA."""
    activations = [count * tokens for count in saved]
    frozen = step["weights"] + step["frozen_head_peak"]
    trained = step["weights"] + step["head_peak"] + step["gradients_and_moments"]
    rows = [
        ("weights", *(step["weights"] for _ in activations)),
        ("activations of the layers", *activations),
        ("lm_head and its loss, at most", *(step["head_peak"] for _ in activations)),
        (
            "peak with frozen weights (LoRA)",
            *(frozen + min(count, adapters * tokens) for count in activations),
        ),
        ("peak with gradients and AdamW's moments", *(trained + count for count in activations)),
    ]
    lines = [(name, *map(human_bytes, counts)) for name, *counts in rows]
    return table(lines, header=(f"a step of {tokens:,} tokens", "liger.patch", "recompute=True"))


def _checkpointed(step, layers, tokens):
    """By what liger.transformers.checkpoint keeps: bytes of a step on the device, and on the host."""
    weights, head = step["weights"], step["head_peak"]
    # The gradient of the head's weight exists from its loss on, the gradients of the layers come one by one.
    of_head = 3 * weights - step["gradients_and_moments"]
    layer, result = layers.layer * tokens, {}
    whole = layers.inputs + layers.attention
    waiting = {"full": (layers.inputs, 0), "attention kept": (whole, 0)}
    waiting["offload=True"] = (
        (layers.passing, whole - layers.passing) if whole > layers.passing else (whole, 0)
    )
    for name, (on_device, on_host) in waiting.items():
        kept = on_device * tokens
        ends = kept + max(head, of_head + layer), weights + layer
        result[name] = {
            "activations": kept,
            "layer": layer,
            "frozen": weights + kept + max(step["frozen_head_peak"], layer),
            "trained": 3 * weights + max(ends),
            "host": on_host * tokens,
        }
    return result


def _checkpointed_table(found):
    words = {
        "activations": "inputs of layers, attention",
        "layer": "a layer at work",
        "frozen": "peak with frozen weights (LoRA)",
        "trained": "peak with gradients and AdamW's moments",
        "host": "in host memory",
    }
    lines = [(text, *(human_bytes(c[name]) for c in found.values())) for name, text in words.items()]
    return table(lines, header=("layers recomputed (liger.transformers.checkpoint)", *found))


def _is_cached(name):
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def _refuse_unknown(name):
    """Raises OSError, or ValueError for a malformed name, where there is no such path, no such model in the
    cache and no connection to the Hub: in seconds, while transformers would import its models and then try
    for half a minute."""
    try:
        if Path(name).exists() or _is_cached(name):
            return
    except ValueError as error:
        raise ValueError(f"no file, no folder, and no name of a model ({error})") from error
    from huggingface_hub import constants, hf_hub_url

    nowhere = "no file, no folder, and no model in the cache of the Hub"
    if constants.HF_HUB_OFFLINE:
        raise OSError(f"{nowhere}, which HF_HUB_OFFLINE forbids to ask")
    try:
        with urllib.request.urlopen(
            urllib.request.Request(hf_hub_url(name, "config.json"), method="HEAD"), timeout=5
        ):
            pass
    except urllib.error.HTTPError as error:
        # The Hub answers, and with the user's token it may give the model.
        error.close()
    except OSError as error:
        reason = getattr(error, "reason", error)
        # Certificates that Python does not know, but the Hub's client may.
        if not isinstance(reason, ssl.SSLError):
            raise OSError(f"{nowhere}, which does not answer ({reason})") from error


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
    # Layers raise these for unknown settings, such as hidden_act, or for sizes below 1.
    except (KeyError, TypeError, ZeroDivisionError, RuntimeError) as error:
        raise ValueError(f"no model can be built from the configuration: {error}") from error


def _config(name):
    """The configuration at a path, or of a model on the Hub or in its cache."""
    from transformers import CONFIG_MAPPING, AutoConfig

    path = Path(name)
    if not path.is_file():
        # Without a connection, transformers would try for half a minute before it reads the cache.
        return AutoConfig.from_pretrained(name, local_files_only=path.is_dir() or _is_cached(name))
    settings = json.loads(path.read_text())
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise ValueError("the configuration has no model_type")
    model_type = settings.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"transformers has no model_type '{model_type}'")
    return AutoConfig.for_model(model_type, **settings)
