# SPDX-License-Identifier: BSD-3-Clause
"""The sizes of ``liger demo``."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Size:
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    sequence: int
    batch: int
    steps: int
    learning_rate: float
    dtype: str
    gradient_checkpointing: bool
    text_bytes: int  # of source text for the tokenizer and the run
    memory_budget: str | None = None  # for models whose logits would all fit the default budget

    @property
    def tokens(self):
        """Tokens of one step."""
        return self.batch * self.sequence

    def as_dict(self):
        return asdict(self)


SIZES = {
    "tiny": Size(
        vocab=8192, hidden=96, layers=2, heads=4, kv_heads=2, intermediate=256, sequence=256, batch=4, steps=8,
        learning_rate=1e-3, dtype="float32", gradient_checkpointing=False, text_bytes=1 << 20, memory_budget="8M",
    ),
    "cpu": Size(
        vocab=16384, hidden=192, layers=3, heads=6, kv_heads=2, intermediate=512, sequence=512, batch=4, steps=40,
        learning_rate=1e-3, dtype="float32", gradient_checkpointing=False, text_bytes=4 << 20, memory_budget="32M",
    ),
    # Llama-3.2-1B
    "gpu": Size(
        vocab=128256, hidden=2048, layers=16, heads=32, kv_heads=8, intermediate=8192, sequence=2048, batch=8,
        steps=40, learning_rate=3e-4, dtype="bfloat16", gradient_checkpointing=True, text_bytes=12 << 20,
    ),
}  # fmt: skip
