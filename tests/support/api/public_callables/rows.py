# SPDX-License-Identifier: BSD-3-Clause
"""Losses of rows: cross entropy, divergences, and both with a linear head."""

import torch

import liger

from .case import HIDDEN, IGNORED, VOCAB, add, normal, random_target, with_options


def ignored_rows(*names):
    """``ignored`` of cases with a target: these tensors where the target is ignored."""
    return lambda given: {
        name: given["target"] == IGNORED for name in names if isinstance(given.get(name), torch.Tensor)
    }


def logits_inputs(device, dtype):
    return {
        "logits": normal(device, dtype, 7, VOCAB),
        "target": random_target(device, 7),
        "token_weight": torch.rand(7).to(device),
    }


_CE_METRICS = {
    "metrics": ("z_loss", "token_accuracy", "argmax", "logprobs", "entropy"),
    "lse_square_scale": 1e-2,
}
_CE_OPTIONS = {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 5.0}
for _name, _options in {
    "": {},
    " options": _CE_OPTIONS,
    " none": {"reduction": "none"},
    " inplace": {"inplace": True},
    " none inplace": {"reduction": "none", "inplace": True},
    " metrics": _CE_METRICS,
}.items():
    add(
        f"cross_entropy{_name}",
        # In place, the gradient is written over the logits, which may not be a leaf.
        (lambda logits, **rest: liger.cross_entropy(logits * 1, **rest))
        if "inplace" in _options
        else liger.cross_entropy,
        with_options(logits_inputs, **_options),
        "logits",
        public="cross_entropy",
        ignored=ignored_rows("logits", "token_weight"),
        loss=True,
    )


def _head(device, dtype):
    return {
        "input": normal(device, dtype, 7, HIDDEN),
        "weight": normal(device, dtype, VOCAB, HIDDEN, scale=0.3),
        "target": random_target(device, 7),
    }


def biased_head(device, dtype):
    return _head(device, dtype) | {"bias": normal(device, dtype, VOCAB)}


def _weighted(make, classes=False):
    """The same with a weight for every token, and one for every class."""

    def make_weighted(device, dtype):
        made = make(device, dtype)
        weights = {"token_weight": torch.rand(made["target"].shape).to(device)}
        if classes:
            weights["ce_weight"] = torch.rand(VOCAB).to(device)
        return made | weights

    return make_weighted


_CHUNKS = {"memory_budget": 2 * VOCAB * 4}
for _name, _make, _options in (
    ("", _head, {}),
    (" options", biased_head, _CE_OPTIONS),
    (" chunks", biased_head, _CHUNKS),
    (" none", _head, {"reduction": "none"}),
    (" metrics", biased_head, _CE_METRICS),
    (" weighted", _weighted(_head, classes=True), _CHUNKS),
):
    add(
        f"fused_linear_ce{_name}",
        liger.fused_linear_ce,
        with_options(_make, **_options),
        "input weight bias" if _make is biased_head else "input weight",
        public="fused_linear_ce",
        ignored=ignored_rows("input", "token_weight"),
        loss=True,
    )


def _with_lora(make, name="input"):
    """The same with the factors of a low-rank term."""

    def make_with_factors(device, dtype):
        made = make(device, dtype)
        hidden = made[name].shape[-1]
        factors = {"lora_a": normal(device, dtype, 3, hidden), "lora_b": normal(device, dtype, VOCAB, 3)}
        return made | factors | {"lora_scale": 0.7}

    return make_with_factors


for _name, _make, _options in (
    (" lora", _head, {}),
    (" lora options", biased_head, _CE_OPTIONS | _CHUNKS),
    (" lora none", _head, {"reduction": "none"}),
):
    add(
        f"fused_linear_ce{_name}",
        liger.fused_linear_ce,
        with_options(_with_lora(_make), **_options),
        f"input weight lora_a lora_b{' bias' if _make is biased_head else ''}",
        public="fused_linear_ce",
        ignored=ignored_rows("input", "token_weight"),
        loss=True,
    )


def _logprobs(device, dtype):
    made = biased_head(device, dtype)
    return {"input": made["input"], "weight": made["weight"], "target": made["target"], "bias": made["bias"]}


def _present(**given):
    """The results that there are."""
    found = liger.fused_linear_logprobs(**given)
    return tuple(r for r in found if r is not None) if given.get("metrics") else found


for _name, _options in {
    "": {},
    " temperature": {"temperature": 0.7, **_CHUNKS},
    " metrics": {"metrics": ("entropy", "argmax", "log_sum_sq_probs", "mean_logits"), "softcap": 4.0},
    " kept": {"metrics": ("entropy",), "softcap": 4.0, "recompute": False},
}.items():
    add(
        f"fused_linear_logprobs{_name}",
        _present,
        with_options(_logprobs, **_options),
        "input weight bias",
        public="fused_linear_logprobs",
        ignored=lambda given: {"input": given["target"] == IGNORED},
        loss=True,
    )


add(
    "fused_linear_logprobs lora",
    _present,
    with_options(
        _with_lora(_logprobs, "input"), temperature=0.7, softcap=4.0, metrics=("entropy",), **_CHUNKS
    ),
    "input weight bias lora_a lora_b",
    public="fused_linear_logprobs",
    ignored=lambda given: {"input": given["target"] == IGNORED},
    loss=True,
)


def _pair(device, dtype):
    return {
        "student": normal(device, dtype, 7, VOCAB),
        "teacher": normal(device, dtype, 7, VOCAB),
        "target": random_target(device, 7),
    }


for _name, _function, _make, _options in (
    ("kl_div", liger.kl_div, _pair, {}),
    ("kl_div reverse", liger.kl_div, _pair, {"reverse": True, "temperature": 1.7}),
    ("kl_div none", liger.kl_div, _pair, {"reduction": "none"}),
    ("kl_div weighted", liger.kl_div, _weighted(_pair), {}),
    ("jsd", liger.jsd, _pair, {"beta": 0.1}),
    ("tvd", liger.tvd, _pair, {}),
):
    add(
        _name, _function, with_options(_make, **_options), "student", public=_name.split()[0],
        ignored=ignored_rows("student", "teacher", "token_weight"), loss=True,
    )  # fmt: skip


def _head_pair(device, dtype):
    return biased_head(device, dtype) | {
        "teacher_input": normal(device, dtype, 7, 24),
        "teacher_weight": normal(device, dtype, VOCAB, 24, scale=0.2),
    }


for _name, _function, _make, _options in (
    ("fused_linear_kl_div", liger.fused_linear_kl_div, _head_pair, {}),
    ("fused_linear_kl_div chunks", liger.fused_linear_kl_div, _head_pair, {"reverse": True, **_CHUNKS}),
    ("fused_linear_kl_div none", liger.fused_linear_kl_div, _head_pair, {"reduction": "none"}),
    ("fused_linear_kl_div weighted", liger.fused_linear_kl_div, _weighted(_head_pair), _CHUNKS),
    ("fused_linear_jsd", liger.fused_linear_jsd, _head_pair, {"beta": 0.1}),
):
    add(
        _name, _function, with_options(_make, **_options), "input weight bias", public=_name.split()[0],
        ignored=ignored_rows("input", "teacher_input", "token_weight"), loss=True,
    )  # fmt: skip
