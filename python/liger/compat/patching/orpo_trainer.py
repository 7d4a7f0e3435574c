# SPDX-License-Identifier: BSD-3-Clause
"""TRL's ORPOTrainer with the loss of liger."""

from __future__ import annotations

from typing import Any

from trl.experimental.orpo import ORPOTrainer

from ...trl import patch


class LigerORPOTrainer(ORPOTrainer):
    """:class:`ORPOTrainer` on which :func:`liger.trl.patch` was called: on one device, DDP, FSDP and ZeRO."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        patch(self)
