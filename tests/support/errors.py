# SPDX-License-Identifier: BSD-3-Clause
"""Which error a public function raises (docs/reference/errors.md)."""

import re

_OPTIONS = (
    "accum_dtype", "accumulate_grad_weight", "activation", "approximate", "beta", "casting_mode", "denominator",
    "eps", "group_size", "ignore_index", "label_smoothing", "limit", "logits_dtype", "lora_scale", "max_length",
    "memory_budget", "num_groups", "num_shards", "recompute", "reduction", "softcap", "temperature", "vocab_size",
    "vocab_start",
)  # fmt: skip
# A denominator may be a tensor, which "has" a shape or "is on" a device.
_ABOUT_AN_OPTION = re.compile(rf"(^|: )({'|'.join(_OPTIONS)})($| is (?!on )| was given)")


def error_about(words):
    """The class of the error with these words: ValueError about an option, RuntimeError about a tensor."""
    return ValueError if _ABOUT_AN_OPTION.search(words) else RuntimeError
