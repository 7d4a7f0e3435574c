"""AutoModelForCausalLM that returns patched models."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import CONFIG_NAME, find_adapter_config_file, is_peft_available

from ._architectures import architecture_of
from ._options import NAMES, Options
from ._patching import patch

# Keywords that locate the files of a model, which AutoConfig needs, too; all others belong to the model.
_HUB_KEYWORDS = (
    "cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
    "trust_remote_code",
)  # fmt: skip


def _take_options(keywords):
    return {name: keywords.pop(name) for name in NAMES if name in keywords}


def _base_of(path, keywords):
    """The path or name of the model in ``path``; of a folder or repository with adapters of PEFT alone, their base.

    As AutoModelForCausalLM decides it, with the same keywords.
    """
    if not is_peft_available() or (os.path.exists(path) and os.path.exists(os.path.join(path, CONFIG_NAME))):
        return path
    given = {name: keywords[name] for name in ("token", "revision") if name in keywords}
    adapter = find_adapter_config_file(path, **{**given, **(keywords.get("adapter_kwargs") or {})})
    return (
        path if adapter is None else json.loads(Path(adapter).read_text("utf-8"))["base_model_name_or_path"]
    )


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """:class:`transformers.AutoModelForCausalLM` with the keywords of :func:`liger.patch` in addition to its own.

    Raises:
        ValueError: a model type without ``apply_liger_kernel_to_*`` function, before any weight is loaded; an error of
            :func:`liger.patch`.
    """

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *model_args: Any, **kwargs: Any
    ) -> Any:  # fmt: skip
        """The patched model; arguments are those of ``AutoModelForCausalLM.from_pretrained`` and of ``liger.patch``.

        The path may be that of adapters of PEFT, which are loaded into their base model.
        """
        options = _take_options(kwargs)
        Options(**options)
        config = kwargs.get("config")
        if not isinstance(config, PretrainedConfig):
            hub = {name: kwargs[name] for name in _HUB_KEYWORDS if name in kwargs}
            config = AutoConfig.from_pretrained(_base_of(pretrained_model_name_or_path, kwargs), **hub)
        architecture_of(config.model_type)
        return patch(super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs), **options)

    @classmethod
    def from_config(cls, config: PretrainedConfig, **kwargs: Any) -> Any:
        """The patched model; arguments are those of ``AutoModelForCausalLM.from_config`` and of ``liger.patch``."""
        options = _take_options(kwargs)
        architecture_of(config.model_type)
        return patch(super().from_config(config, **kwargs), **options)
