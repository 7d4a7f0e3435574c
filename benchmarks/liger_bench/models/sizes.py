# SPDX-License-Identifier: BSD-3-Clause
"""The models whose training steps are measured."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Size:
    """A model of transformers, ``family`` as in its module, and how it is trained."""

    name: str
    config: dict
    dtype: torch.dtype
    checkpointing: bool = True
    family: str = "llama"
    lora: int = 0  # rank of adapters of PEFT on all linear layers of the decoder, whose weights are frozen
    nf4: bool = False  # whether those weights have 4 bits (bitsandbytes)
    attention: str = "sdpa"  # attn_implementation of transformers


FULL = Size(
    "Llama-3.2-1B",
    {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "max_position_embeddings": 131072,
    },
    dtype=torch.bfloat16,
)  # fmt: skip
FULL_8B = replace(
    FULL,
    name="Llama-3-8B",
    config={
        **FULL.config, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
        "tie_word_embeddings": False, "max_position_embeddings": 8192,
    },
)  # fmt: skip
QWEN3_1_7B = replace(
    FULL,
    name="Qwen3-1.7B",
    family="qwen3",
    config={
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "max_position_embeddings": 40960,
    },
)  # fmt: skip
GEMMA3_1B = replace(
    FULL,
    name="Gemma-3-1B",
    family="gemma3_text",
    config={
        "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256,
        "sliding_window": 512, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
    },
)  # fmt: skip
# The optimizer of all 48 layers has no room on one GPU.
QWEN3_MOE = replace(
    QWEN3_1_7B,
    name="Qwen3-30B-A3B, 4 layers",
    family="qwen3_moe",
    config={
        **QWEN3_1_7B.config, "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
)  # fmt: skip
MIXTRAL = replace(
    FULL,
    name="Mixtral-8x7B, 2 layers",
    family="mixtral",
    config={
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 32768, "tie_word_embeddings": False,
    },
)  # fmt: skip
# Its attention has sinks, which SDPA lacks.
GPT_OSS = replace(
    FULL,
    name="gpt-oss-20b, 4 layers",
    family="gpt_oss",
    attention="eager",
    config={
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
        "num_local_experts": 32, "num_experts_per_tok": 4, "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
)  # fmt: skip
SELF_TEST = Size(
    "a tiny Llama",
    {
        "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    },
    dtype=torch.float32,
)  # fmt: skip

SIZES = {
    "1b": FULL, "8b": FULL_8B, "qwen3-1.7b": QWEN3_1_7B, "gemma3-1b": GEMMA3_1B, "qwen3-moe": QWEN3_MOE,
    "mixtral": MIXTRAL, "gpt-oss": GPT_OSS,
}  # fmt: skip
# Settings of tiny stand-ins beyond SELF_TEST's.
_TINY = {
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def size_of(name, self_test=False):
    """The Size of this name; with ``self_test`` its tiny stand-in of the same family."""
    full = SIZES[name]
    if not self_test:
        return full
    tiny = "a tiny Llama" if full.family == "llama" else f"a tiny {full.family.capitalize()}"
    config = {**SELF_TEST.config, **_TINY.get(full.family, {})}
    return replace(SELF_TEST, name=tiny, family=full.family, config=config, attention=full.attention)
