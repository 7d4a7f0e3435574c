"""AutoModelForCausalLM whose models come patched."""

from dataclasses import fields

from transformers import AutoConfig, AutoModelForCausalLM

from ._architectures import known
from ._patching import Options, patch

# What AutoConfig needs to find the same files as the model; the other keywords are the model's own.
_HUB_KEYWORDS = (
    "cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token",
    "trust_remote_code",
)  # fmt: skip


def _take_options(keywords):
    return {f.name: keywords.pop(f.name) for f in fields(Options) if f.name in keywords}


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """:class:`transformers.AutoModelForCausalLM` with the keywords of :func:`liger.patch` beside its own.

    Raises:
        ValueError: a model type that ``liger.transformers`` has no function for, before any weight is loaded.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        options = _take_options(kwargs)
        Options(**options)
        config = kwargs.get("config")
        if config is None:
            hub = {name: kwargs[name] for name in _HUB_KEYWORDS if name in kwargs}
            config = AutoConfig.from_pretrained(pretrained_model_name_or_path, **hub)
        known(config.model_type)
        return patch(super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs), **options)

    @classmethod
    def from_config(cls, config, **kwargs):
        options = _take_options(kwargs)
        known(config.model_type)
        return patch(super().from_config(config, **kwargs), **options)
