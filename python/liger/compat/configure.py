# SPDX-License-Identifier: BSD-3-Clause
"""``liger_kernel.ops.configure``: the ops of liger need no workspace that is allocated in advance."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FusedLinearCrossEntropyConfig:
    """Sizes of a vocabulary-parallel loss."""

    max_tokens: int
    hidden_size: int
    local_vocab_size: int
    group: str | None = None
    tiles_per_reduce: int = 1


@dataclass(frozen=True)
class MoEConfig:
    """Sizes of a mixture of experts."""

    max_tokens: int
    hidden_size: int
    num_experts: int
    top_k: int
    num_hosts: int
    gpus_per_host: int
    group: str | None = None
    max_inflight: int = 1


def configure(
    *,
    process_groups: Any = None,
    bootstrap_group: Any = None,
    device: Any = None,
    flsce: Any = None,
    moe: Any = None,
) -> bool:
    """No effect; False, as in liger_kernel where its optional native kernels are not installed."""
    return False
