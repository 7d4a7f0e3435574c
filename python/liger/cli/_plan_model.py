# SPDX-License-Identifier: BSD-3-Clause
"""``liger plan --model``: what a patched model saves for the backward, and what batch fits, from its
configuration."""

import json
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

import torch

import liger
from liger_cli.devices import DEFAULT_OPTIMIZER, GPUS, OPTIMIZERS

from ._format import human_bytes, table
from ._quiet import quiet_patching


def run(arguments, dtype, head_peak):
    """Prints the table of a model or of its step; returns the exit code. ``head_peak(tokens, hidden, vocab,
    dtype, is_trained)``: bytes of the lm_head and its loss."""
    name = arguments.model
    try:
        _refuse_unknown(name)
        from ..transformers.checkpointing import saved_bytes

        model = _model(name)
        with quiet_patching():
            rows = saved_bytes.saved_in_layers(liger.patch(model, verbose=False), dtype)
        others = saved_bytes.uncounted_layers(model)
        step = _step(model, arguments, dtype, head_peak)
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "huggingface_hub"):
            raise
        print("liger plan --model needs transformers: pip install 'liger-ops[transformers]'", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"liger plan --model {name}: {error}", file=sys.stderr)
        return 2
    plain, recompute = sum(row.plain for row in rows), sum(row.recompute for row in rows)
    if arguments.json:
        result = step | {
            "rows": [vars(row) for row in rows],
            "plain": plain,
            "recompute": recompute,
            "uncounted_layers": others,
        }
        print(json.dumps(result, indent=2))
        return 0
    layers = model.config.get_text_config().num_hidden_layers
    counted = f"{layers - others.total()} of {layers}" if others else layers
    title = f"{model.config.model_type}, {counted} layers, {str(dtype).removeprefix('torch.')}"
    if step:
        print(f"{title}, {_step_title(step, arguments)}\n\n{_step_table(step)}")
    else:
        lines = [(row.part, row.tensor, f"{row.plain:,}", f"{row.recompute:,}") for row in rows]
        lines.append(("these layers" if others else "all layers", "", f"{plain:,}", f"{recompute:,}"))
        print(f"{title}: saved bytes per token\n")
        print(table(lines, header=("part", "tensors", "liger.patch", "recompute=True")))
    if others:
        names = ", ".join(f"{count} x {name}" for name, count in others.items())
        print(f"\nnot counted: {names}, not x + attention(norm(x)) followed by a norm and an MLP")
    if step:
        print("\nBeyond that: CUDA's context, the allocator's fragments, a layer's small temporaries.")
        if "tokens_per_second" in step["ways"][0]:
            print("The speeds are for a host that keeps up with the GPU.")
        if any(way.get("batch") == 0 for way in step["ways"]):
            print("Where the largest batch is 0, the row is of a batch of 1, which does not fit.")
    return 0


def _step(model, arguments, dtype, head_peak):
    """The bytes of a step and its ways; with a memory, each with its largest batch. Empty without a batch
    and a length. Raises ValueError for a memory that the weights alone exceed."""
    tokens, length = arguments.tokens, arguments.length
    if tokens is None and length is None:
        return {}
    from . import _step_plan

    optimizer = arguments.optimizer or DEFAULT_OPTIMIZER
    step = _step_plan.Step(model, dtype, OPTIMIZERS[optimizer], arguments.lora, head_peak)
    gpu = GPUS.get(arguments.gpu)
    memory = None if tokens is not None else arguments.memory or _free(gpu)
    if memory is not None and step.weights + step.states > memory:
        raise ValueError(
            f"the weights and the states of {optimizer} need {human_bytes(step.weights + step.states)}, more than "
            f"the memory, {human_bytes(memory)}"
        )
    found = []
    for way in _step_plan.ways(step.layers.count, arguments.lora is None):
        result = {"way": way.name}
        batch_tokens = tokens
        if memory is not None:
            result["batch"] = step.largest_batch(way, length, memory)
            batch_tokens = max(result["batch"], 1) * length
        device, host = (count * batch_tokens for count in step.kept(way))
        result |= {"kept": device, "host": host, "peak": step.peak(way, batch_tokens)}
        # The rates of GPUs are for 16 bits.
        if gpu is not None and dtype.itemsize == 2:
            result["tokens_per_second"] = batch_tokens / step.seconds(way, batch_tokens, length, gpu)
        found.append(result)
    return {
        "weights": step.weights,
        "gradients": step.gradients,
        "states": step.states,
        "memory": memory,
        "ways": found,
    }


def _free(gpu):
    """Bytes of a GPU without the largest part that a plan of liger.transformers.checkpoint leaves free."""
    from ..transformers.checkpointing.device_memory import MAX_HEADROOM

    return int(gpu.memory * (1 - MAX_HEADROOM) * 2**30)


def _step_title(step, arguments):
    of_optimizer = arguments.optimizer or DEFAULT_OPTIMIZER
    trained = "all weights train" if arguments.lora is None else f"LoRA of rank {arguments.lora}"
    if step["memory"] is None:
        batch = f"a step of {arguments.tokens:,} tokens"
    else:
        batch = f"sequences of {arguments.length:,} tokens in {human_bytes(step['memory'])}"
    sizes = (f"{name} {human_bytes(step[name])}" for name in ("weights", "gradients"))
    return f"{trained}: {batch}\n{', '.join(sizes)}, states of {of_optimizer} {human_bytes(step['states'])}"


def _step_table(step):
    shown = {
        "batch": ("largest batch", "{:,}".format),
        "kept": ("kept for the backward", human_bytes),
        "peak": ("peak", human_bytes),
        "host": ("in host memory", human_bytes),
        "tokens_per_second": ("about tokens/s", lambda speed: f"{float(f'{speed:.2g}'):,.0f}"),
    }
    names = [name for name in shown if name in step["ways"][0]]
    lines = [(way["way"], *(shown[name][1](way[name]) for name in names)) for way in step["ways"]]
    return table(lines, header=("", *(shown[name][0] for name in names)))


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
