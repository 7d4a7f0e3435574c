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


_SMALL = {"dtype": "float32", "learning_rate": 1e-3, "gradient_checkpointing": False}
_LARGE = {"dtype": "bfloat16", "learning_rate": 3e-4, "gradient_checkpointing": True}


def _size(kind, model, run, text_bytes, memory_budget=None):
    """``model``: vocab to intermediate of :class:`Size`; ``run``: sequence, batch and steps."""
    numbers = dict(zip(Size.__dataclass_fields__, (*model, *run), strict=False))
    return Size(**numbers, **kind, text_bytes=text_bytes, memory_budget=memory_budget)


SIZES = {
    "tiny": _size(_SMALL, (8192, 96, 2, 4, 2, 256), (256, 4, 8), 1 << 20, "8M"),
    "cpu": _size(_SMALL, (16384, 192, 3, 6, 2, 512), (512, 4, 40), 4 << 20, "32M"),
    "gpu": _size(_LARGE, (128256, 2048, 16, 32, 8, 8192), (2048, 8, 40), 12 << 20),  # Llama-3.2-1B
}
