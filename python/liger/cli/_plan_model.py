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
        from transformers import AutoModelForCausalLM

        from ..transformers._saved_bytes import saved_in_layers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        print("liger plan --model needs transformers: pip install 'liger-ops[transformers]'", file=sys.stderr)
        return 2
    try:
        config = _config(name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
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
    layers = config.get_text_config().num_hidden_layers
    print(
        f"{config.model_type}, {layers} layers, {str(dtype).removeprefix('torch.')}: saved bytes per token\n"
    )
    print(table(lines, header=("part", "tensors", "liger.patch", "recompute=True")))
    return 0


def _config(name):
    """The configuration at a path, or of a model on the Hub or in its cache."""
    from transformers import AutoConfig

    path = Path(name)
    if path.is_file():
        settings = json.loads(path.read_text())
        if "model_type" not in settings:
            raise ValueError("the configuration has no model_type")
        return AutoConfig.for_model(settings.pop("model_type"), **settings).get_text_config()
    return AutoConfig.from_pretrained(name).get_text_config()
