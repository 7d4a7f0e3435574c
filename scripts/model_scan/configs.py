# SPDX-License-Identifier: BSD-3-Clause
"""Tiny configurations of any model type: the defaults of its configuration class with every size replaced by
name.

A name of a size has the same value in all sub-configurations, so that the output of a vision tower fits its
text model. Types whose sizes depend on each other in another way have an entry in ``overrides.py``.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from .overrides import OVERRIDES

VOCAB = 320
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, LAYERS = 64, 4, 2, 16, 96, 2

# The first pattern that matches the whole name of an integer decides. A callable gets the default value.
_RULES: list[tuple[str, Any]] = [
    (r"(chunk_size_feed_forward|type_vocab_size|task_type_vocab_size)", None),
    (r"encoder_hash_byte_group_vocab", 64),
    (r"(.*_)?vocab_size(_per_layer_input)?|n_vocab|num_embeddings", VOCAB),
    (r"max_position_embeddings|max_seq_len|n_positions|n_ctx|model_max_length|seq_len|context_length", 128),
    (r"max_target_positions|max_2d_position_embeddings", 128),
    (r".*sliding_window(_size)?|attention_window_size|local_attention|window_size|keep_window_size", 8),
    (r"attention_chunk_size|mamba_chunk_size|chunk_size", lambda n: min(n, 16)),
    (r"(.*_)?(num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups)", lambda n: min(n, KV_HEADS)),
    (r"index_n_heads|index_topk", 4),
    (r"index_head_dim", HEAD_DIM),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"linear_num_(key|value)_heads|linear_num_heads", KV_HEADS),
    (r"(.*_)?(num_attention_heads|n_heads|n_head|num_heads|attention_heads|resampler_n_heads|resampler_heads)", HEADS),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"qk_nope_head_dim", 8),
    (r"(.*_)?(head_dim|kv_channels|d_kv|dim_head|d_head|attention_head_size|headdim|attention_head_dim)", HEAD_DIM),
    (r"mamba_d_ssm", 2 * HIDDEN),
    (r"mamba_dt_rank|time_step_rank", 8),
    (r"(.*_)?(lora_rank|_rank|adapter_rank|hc_lowrank)", HEAD_DIM),
    (r"(.*_)?(d_state|state_size)", 16),
    (r"(mamba_)?n_?groups|mamba_ngroups", 1),
    (r"num_experts_per_tok|num_experts_per_token|moe_topk|moe_top_k|moe_k", lambda n: min(n, 2)),
    (r"(.*_)?(n_routed_experts|num_local_experts|moe_num_experts|num_experts|zero_expert_num)", 4),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", lambda n: min(n, 1)),
    (r"(first_k_dense_replace|num_dense_layers|moe_layer_start_index)", lambda n: min(n, 1)),
    (r"moe_layer_end_index", LAYERS - 1),
    (r"num_kv_shared_layers|num_nextn_predict_layers", 0),
    (
        r"(.*_)?(num_hidden_layers|num_layers|n_layers?|depth|(num_)?(encoder|decoder)_layers|layers)",
        lambda n: min(n, LAYERS),
    ),
    (r"max_window_layers", 1),
    (r"decoder_vocab_size", VOCAB),
    (
        r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|n_inner|d_ff|dff|dim_ff|mlp_dim|feed_forward_size"
        r"|expert_dim|inner_dim)(_mlp)?",
        WIDTH,
    ),
    (
        r"(.*_)?(hidden_size|hidden_dim|d_model|n_embd|embed_dim|dim|emb_dim|embedding_dim|embedding_size"
        r"|embed_proj_dim|output_dim)(_global)?",
        HIDDEN,
    ),
    (r"projector_input_dim|projector_output_dim|pooler_output_size|lru_width|vision_output_dim", HIDDEN),
    (r"hidden_size_per_layer_input", HEAD_DIM),
    (r"image_size|crop_size|max_image_size|max_img_size|resolution", 32),
    (r"patch_size", 8),
    (r"num_position_embeddings", 16),
    (r"image_seq_length|num_image_tokens|mm_tokens_per_image|num_patches", 16),
    (r"num_query_tokens|latent_query_num|resampler_n_latents|resampler_num_latents", 4),
]  # fmt: skip
_COMPILED = [(re.compile(pattern), value) for pattern, value in _RULES]

# Lists with one entry per layer.
_PER_LAYER = re.compile(
    r"(.*layer_types|.*layers_block_type|.*indexer_types|layer_rope_theta|no_rope_layers|activation_sparsity_pattern"
    r"|num_attention_heads_per_layer|attention_layers|swiglu_limits.*|block_types|mlp_only_layers)"
)
_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")
_TOKEN = re.compile(r"(.*_)?(token_id|token_index|token_ids|_id|im_(start|end|newline)_id|image_patch_id)")
# Special tokens of a modality, in the upper part of the vocabulary. Random token ids are below FIRST_SPECIAL.
FIRST_SPECIAL = 280
_SPECIAL = (
    "image",
    "video",
    "audio",
    "vision_start",
    "vision_end",
    "boi",
    "eoi",
    "start",
    "end",
    "patch",
    "newline",
)


def tiny_config(model_type: str) -> PretrainedConfig:
    """A configuration of this type with about 100,000 parameters. Raises what its class raises on a bad
    value."""
    return shrink(CONFIG_MAPPING[model_type](), OVERRIDES.get(model_type, {}))


# Attributes that a configuration class sets itself, and does not accept.
_NOT_ARGUMENTS = (
    "transformers_version", "architectures", "id2label", "label2id", "torch_dtype", "dtype",
    "ignore_keys_at_rope_validation",
)  # fmt: skip
# Sizes that are derived by the model where the configuration has None.
_WHERE_NONE = {"head_dim": HEAD_DIM, "num_key_value_heads": KV_HEADS}


def shrink(config: PretrainedConfig, sizes: dict[str, Any]) -> PretrainedConfig:
    """A new configuration of the same class; overrides.py describes ``sizes``."""
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for name in _NOT_ARGUMENTS:
        values.pop(name, None)
    kept = _layers_to_keep(values)
    everywhere = {name: size for name, size in sizes.items() if "." not in name and name[0] != "+"}
    for name, value in list(values.items()):
        if isinstance(value, PretrainedConfig):
            inner = {key.partition(".")[2]: size for key, size in sizes.items() if key.startswith(f"{name}.")}
            values[name] = shrink(value, {**everywhere, **inner})
        elif value is None:
            values[name] = _WHERE_NONE.get(name)
        else:
            values[name] = _small(name, value, kept)
    _match_heads(vars(config), values)
    if kept is not None:
        for name in _COUNTS:
            if isinstance(values.get(name), int):
                values[name] = len(kept)
    if values.get("is_encoder_decoder") and values.get("decoder_start_token_id") is None:
        values["decoder_start_token_id"] = 0
    _fit_rope(values)
    values.update({name: size for name, size in everywhere.items() if name in values})
    values.update({name[1:]: size for name, size in sizes.items() if name.startswith("+")})
    return type(config)(**values)


def _match_heads(defaults, values):
    """Multi-head latent attention: as many key heads as heads, and a rotary embedding of the rotated part
    alone."""
    if "kv_lora_rank" in values and defaults.get("num_key_value_heads") == defaults.get(
        "num_attention_heads"
    ):
        values["num_key_value_heads"] = HEADS
    rotated = defaults.get("qk_rope_head_dim")
    if rotated and defaults.get("head_dim") == rotated:
        values["head_dim"] = values["qk_rope_head_dim"]


def _layers_to_keep(values):
    """Indices of layers, one of every kind; None for a configuration without kinds of layers."""
    kinds = [v for n, v in values.items() if _PER_LAYER.fullmatch(n) and isinstance(v, (list, tuple)) and v]
    count = next((values[n] for n in _COUNTS if isinstance(values.get(n), int)), None)
    kinds = [k for k in kinds if len(k) == count]
    if not kinds:
        return None
    rows = list(zip(*kinds, strict=True))
    first = sorted({row: index for index, row in reversed(list(enumerate(rows)))}.values())
    if len(first) == 1 and count > 1:
        first.append(next(i for i in range(count) if i != first[0]))
    return sorted(first)[:4]


def _small(name, value, kept):
    if _TOKEN.fullmatch(name) and value is not None and not isinstance(value, (bool, str, dict)):
        return _token(name, value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        for pattern, size in _COMPILED:
            if pattern.fullmatch(name):
                return value if size is None else size(value) if callable(size) else size
        return value
    if name in ("image_size", "patch_size") and isinstance(value, (list, tuple)):
        return [32 if name == "image_size" else 8] * len(value)
    if name == "image_grid_pinpoints":
        return [[32, 32]]
    if isinstance(value, (list, tuple)) and kept is not None and _PER_LAYER.fullmatch(name):
        return [value[i] for i in kept if i < len(value)]
    return value


def _token(name, value):
    if isinstance(value, (list, tuple)):
        return [_token(name, v) + i for i, v in enumerate(value)]
    if not isinstance(value, int) or value < 4:
        return value
    if name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        return ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id").index(name)
    for number, word in enumerate(_SPECIAL):
        if name.startswith(word):
            return FIRST_SPECIAL + number
    return FIRST_SPECIAL + len(_SPECIAL) + sum(map(ord, name)) % 20


def _fit_rope(values):
    """Sections of a multimodal rotary embedding must add up to half the head size, here 8."""
    for name in ("rope_parameters", "rope_scaling"):
        parameters = values.get(name)
        if not isinstance(parameters, dict):
            continue
        values[name] = {key: _fit_sections(part) for key, part in _fit_sections(parameters).items()}


def _fit_sections(parameters):
    if not isinstance(parameters, dict) or "mrope_section" not in parameters:
        return parameters
    factor = parameters.get("partial_rotary_factor", 1.0)
    half = max(int(HEAD_DIM * factor) // 2, 1)
    old = parameters["mrope_section"]
    sections = [max(half * s // sum(old), 0) for s in old]
    sections[0] += half - sum(sections)
    return {**parameters, "mrope_section": sections}
