# SPDX-License-Identifier: BSD-3-Clause
"""A plugin of axolotl: :func:`liger.patch` of the model, as soon as it is built.

axolotl 0.21 finds the plugin by its entry point; earlier versions need its name under ``plugins``. It has no
effect without its key in the configuration:

    liger_ops: true         # or a mapping of options of liger.patch
"""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator
from torch import nn

from ..transformers import patch
from ..transformers.patching.options import Options, check_names


class LigerOpsArgs(BaseModel):
    """What the plugin adds to the configuration."""

    liger_ops: bool | dict[str, Any] = False

    @field_validator("liger_ops")
    @classmethod
    def check_options(cls, value: bool | dict[str, Any]) -> bool | dict[str, Any]:
        if isinstance(value, dict):
            check_names("liger_ops", value)
            Options(**value)
        return value


class LigerOpsPlugin(BasePlugin):
    """Patches the model before adapters are loaded and before a framework shards it."""

    def get_input_args(self) -> str:
        return f"{__name__}.{LigerOpsArgs.__name__}"

    def post_model_build(self, cfg: Any, model: nn.Module) -> None:
        if cfg.liger_ops:
            patch(model, **(cfg.liger_ops if isinstance(cfg.liger_ops, dict) else {}))
