# SPDX-License-Identifier: BSD-3-Clause
"""Sizes of model types that the rules of ``configs.py`` do not fit.

A name applies wherever a (sub-)configuration has it; ``+name`` is set on the outer configuration in any case;
``part.name`` applies in that sub-configuration alone.
"""

from __future__ import annotations

from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LAYERED = {
    "+layer_types": ["sliding_attention", "full_attention"],
    "+rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
}
_WINDOWS = {"vision_config.window_size": 32}
_SLIDING = {
    "+swa_num_attention_heads": 4,
    "+swa_num_key_value_heads": 4,
    "+swa_q_lora_rank": 16,
    "+swa_kv_lora_rank": 16,
    "+swa_qk_nope_head_dim": 8,
    "+swa_head_dim": 16,
    "+swa_v_head_dim": 16,
}
_INDEXER = {
    "+indexer_budget": 8,
    "+indexer_compress_ratio": 4,
    "+indexer_n_heads": 4,
    "+indexer_kv_heads": 1,
    "+indexer_head_dim": 16,
}
_FEW_FILTERS = {"num_filters": 4, "depths": (1,) * 7}


def _sections(*sections: int, **more: Any) -> dict[str, Any]:
    rope = {**_ROPE, "mrope_section": list(sections), **more}
    return {"text_config.+rope_parameters": rope}


OVERRIDES: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "vision_config.codebook_size": 8, "audio_config.codebook_size": 8, "+image_token_offset": 300,
        "+audio_token_offset": 308, "vision_config.base_channels": 32, "vision_config.num_res_blocks": 1,
    },
    "aria": {"projector_patch_to_query_dict": {16: 4}, "max_value_projector_patch_to_query_dict": 4},
    "bamba": {"attn_layer_indices": [1]},
    "blip-2": {"+image_token_index": 280},
    "chameleon": {
        "vq_config.base_channels": 32, "vq_config.channel_multiplier": (1, 1), "vq_config.num_res_blocks": 1,
        "+vocabulary_map": {"<image>": 280, **{f"IMGIMG{c}BZ": 290 + i for i, c in enumerate("AB")}}},
    "cohere_compass": {f"text_config.{key}": value for key, value in _LAYERED.items()},
    "cohere_compass_text": _LAYERED,
    "dbrx": {"attn_config.+rope_theta": 10000.0, "attn_config.+clip_qkv": 8.0},
    "deepseek_ocr2": {"text_config.+mlp_layer_types": ["dense", "sparse"], "text_config.+num_experts_per_tok": 2},
    "diffusion_gemma": {
        "text_config.+num_experts": 4, "text_config.+top_k_experts": 2, "text_config.+moe_intermediate_size": 96,
    },
    "deepseek_v2": {"+num_experts_per_tok": 2, "+n_routed_experts": 4, "num_key_value_heads": 4},
    "deepseek_vl_hybrid": {"num_key_value_heads": 2},
    "dory": {"+n_input_layers": 1, "+n_recurrent_layers": 1, "+n_output_layers": 0, "+num_hidden_layers": 2},
    "dots1": {
        "+num_experts_per_tok": 2, "+n_routed_experts": 4, "+n_shared_experts": 1, "first_k_dense_replace": 1,
    },
    "dots3_note": {"adapter_input_size": 64, **{f"text_config.{key}": value for key, value in _SLIDING.items()}},
    "dots3_note_text": _SLIDING,
    "emu3": {
        "vq_config.base_channels": 32, "vq_config.channel_multiplier": (1, 1), "vq_config.num_res_blocks": 1,
        "+vocabulary_map": {
            "<|extra_200|>": 279, "<image>": 280, **{f"<|visual token {i:06d}|>": 290 + i for i in range(4)},
        },
    },
    "ernie4_5_vl_moe": _sections(3, 3, 2),
    "esm": {"+vocab_size": 320, "+pad_token_id": 0, "+mask_token_id": 3},
    "exaone4_5": _WINDOWS,
    "florence2": {
        "vision_config.depths": (1, 1, 1, 1), "vision_config.embed_dim": (16, 16, 32, 32),
        "vision_config.num_heads": (2, 2, 2, 2), "vision_config.num_groups": (2, 2, 2, 2),
    },
    "gemma3n": {"intermediate_size": 96},
    "gemma3n_text": {"intermediate_size": 96},
    "glm46v": _sections(2, 3, 3, partial_rotary_factor=1.0),
    "glm4v": _sections(2, 3, 3, partial_rotary_factor=1.0),
    "glm4v_moe": _sections(2, 3, 3, partial_rotary_factor=1.0),
    "glm_ocr": _sections(2, 3, 3, partial_rotary_factor=1.0),
    "glmga": _sections(2, 3, 3, partial_rotary_factor=1.0),
    "glm5_next": {"index_topk": 16, "qk_rope_head_dim": 0, "head_dim": 0},
    "granite4_vision": {"+deepstack_layer_map": [[-1, 0]], "+downsample_rate": "1/2"},
    "granitemoehybrid": {"+layer_types": ["mamba", "attention"]},
    "hrm_text": {"num_layers_per_stack": None, "num_hidden_layers": 1},
    "hy_v4_vl": {"text_config.+rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    "hunyuan_vl": _sections(2, 2, 2, 2),
    "hyperclovax_vision_v2": _WINDOWS,
    "instructblip": {"+image_token_index": 280},
    "instructblipvideo": {"+image_token_index": 280},
    "janus": {"base_channels": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"+layer_types": ["conv", "full_attention"]},
    "mamba2": {"+num_heads": 8},
    "mistral_large4": {"text_config.+kv_source_layers": None},
    "molmo2": {"vision_feature_layer": [0, 1], "rope_scaling_layers": [0, 1]},
    "muse_spark": {"depths": (1, 1), "patch_sizes": (4, 4), "hidden_sizes": (32, 64)},
    "paddleocr_vl": _sections(2, 3, 3),
    "perceiver": {"d_latents": 64, "num_latents": 16, "num_self_attends_per_block": 2},
    "qwen2_5_omni_thinker": {**_sections(2, 3, 3), "+vision_start_token_id": 290, **_WINDOWS},
    "qwen2_5_vl": {**_sections(2, 3, 3), **_WINDOWS},
    "qwen2_vl": _sections(2, 3, 3),
    "qwen4_exp": {f"text_config.{key}": value for key, value in _INDEXER.items()},
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3, "layer_types": None, "layers_block_type": None},
    "reformer": {"+is_decoder": True, "axial_pos_shape": (3, 4), "axial_pos_embds_dim": (32, 32)},
    "step3p7": {"text_config.+sliding_window": 8},
    "udop": {"+decoder_start_token_id": 0},
    "vibevoice": _FEW_FILTERS,
    "vibevoice_asr": _FEW_FILTERS,
    "vipllava": {"vision_feature_layer": (-1, -2), "vision_feature_layers": (-1, -2)},
    "xlstm": {"qk_dim_factor": 1.0, "num_blocks": 2},
    "xmod": {"+default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "attention_hidden_size": 128, "attention_head_dim": 32,
    },
    "zamba2": {
        "attention_hidden_size": 128, "attention_head_dim": 32, "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    },
}  # fmt: skip
