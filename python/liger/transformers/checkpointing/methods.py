# SPDX-License-Identifier: BSD-3-Clause
"""Checkpointing of a model by the methods of transformers. Their names changed in 5.24."""


def enable(model, **settings):
    """Recomputes every layer in the backward. ``settings``: arguments of torch.utils.checkpoint."""
    method = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    method({"use_reentrant": False, **settings})


def disable(model):
    """Ends :func:`enable`."""
    method = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    method()
