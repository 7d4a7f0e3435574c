# SPDX-License-Identifier: BSD-3-Clause
"""AutoModelForCausalLM that patches the models that it returns."""

import os
from typing import Any

from transformers import AutoModelForCausalLM, PretrainedConfig

from ...transformers.patching.options import NAMES
from .functions import _apply_liger_kernel_to_instance


def _take_options(keywords: dict[str, Any]) -> dict[str, Any]:
    return {name: keywords.pop(name) for name in NAMES if name in keywords}


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """:class:`transformers.AutoModelForCausalLM` with the options of ``apply_liger_kernel_to_*`` as further
    keywords.

    The returned model is patched, also if it is of a type that liger_kernel does not know. Other models are
    not affected. A model in which nothing can be patched is returned unchanged, with a log message.
    """

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *model_args: Any, **kwargs: Any
    ) -> Any:
        options = _take_options(kwargs)
        model = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        _apply_liger_kernel_to_instance(model, **options)
        return model

    @classmethod
    def from_config(cls, config: PretrainedConfig, **kwargs: Any) -> Any:
        options = _take_options(kwargs)
        model = super().from_config(config, **kwargs)
        _apply_liger_kernel_to_instance(model, **options)
        return model
