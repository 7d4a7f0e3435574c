# SPDX-License-Identifier: BSD-3-Clause
"""Every public callable as data, for the property tests: one case per function, loss and module, and its
variants.

A callable without a case fails tests/properties/test_registry.py, so whatever is exported comes under every
property. Sizes are small, and odd where they may be. ``cases()`` lists all names; ``arguments`` makes the
tensors of one.
"""

import liger
from liger import losses, nn
from liger._core.runtime.environment import triton_interpreted

# Each of these modules adds its cases to CASES.
from . import ops, rows, sequences, policy, distillation, modules  # noqa: F401  isort: skip
from .case import CASES, Case, arguments, cases, differentiable_outputs, outputs, results, weighted_sum  # noqa: F401

# What is public and no op, loss or module of tensors, or cannot run in one process.
EXEMPT = {
    "BackendUnavailable": "an exception",
    "CrossEntropyOutput": "a result",
    "LogProbs": "a result",
    "backend_report": "no tensors",
    "distributed": "a package",
    "losses": "a package",
    "nn": "a package",
    "transformers": "a package",
    "patch": "models: tests/transformers",
    "unpatch": "models: tests/transformers",
    "set_backend": "no tensors",
    "use_backend": "no tensors",
    "losses.FusedLinearLoss": "a base class",
    "losses.PreferenceLoss": "a base class",
    "losses.DistillationLoss": "a base class",
    "losses.KTOMetrics": "a result",
    "losses.PolicyMetrics": "a result",
    "losses.PreferenceMetrics": "a result",
    "losses.DistillationMetrics": "a result",
    "losses.DistillationOptions": "types of options",
    "losses.LossOptions": "types of options",
    "losses.PolicyOptions": "types of options",
    "losses.LossResult": "a result",
    "losses.TokenMetrics": "a result",
}


def public_names():
    return [
        *liger.__all__,
        *(f"losses.{name}" for name in losses.__all__),
        *(f"nn.{name}" for name in nn.__all__),
    ]


def interpretable():
    """The names of all cases; in Triton's slow interpreter, only the ops that have a kernel of their own."""
    several = (
        *("losses.", "nn.", "tiled", "grouped"),
        *("fused_linear_logprobs", "fused_linear_kl", "fused_linear_jsd"),
    )
    return [name for name in CASES if not (triton_interpreted() and name.startswith(several))]
