# SPDX-License-Identifier: BSD-3-Clause
"""The folder hub/, and the mapping of its layers for ``kernelize``."""

from pathlib import Path

HUB = Path(__file__).parents[3] / "hub"

# Layer name of transformers -> class in hub/.
LAYERS = {
    "RMSNorm": "LigerRMSNorm",
    "RMSNormZeroCentered": "LigerRMSNormZeroCentered",
    "RMSNormGated": "LigerRMSNormGated",
    "SwiGLUMLP": "LigerSwiGLUMLP",
    "GeGLUMLP": "LigerGEGLUMLP",
    "Linear": "LigerLinear",
    "rotary_pos_emb": "LigerRotaryPosEmb",
    "ForCausalLMLoss": "LigerForCausalLMLoss",
}
