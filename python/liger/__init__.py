# SPDX-License-Identifier: BSD-3-Clause
"""liger: memory-saving training ops for large language models.

Kernels of rows and of the lm_head's cross entropy have three implementations: ahead-of-time compiled CUDA,
Triton, and plain torch. The other ops of ``torch.ops.liger`` are Python code over these and over GEMMs.
"""

from typing import TYPE_CHECKING

from . import distributed
from ._core.head.results import CrossEntropyOutput
from ._core.op.backend import BackendUnavailable, _initialise, backend_report, set_backend, use_backend
from ._core.op.vmap import register_loops
from ._core.runtime import load  # noqa: F401  (registers the schemas, which the modules below need)
from ._core.runtime.lazy import lazy
from .ops.tiled_mlp.tiled import tiled

# backend_report() and messages list the ops in the order of these imports.
# isort: off
from .ops.rms_norm import fused_add_rms_norm, rms_norm
from .ops.rms_norm_gated import rms_norm_gated
from .ops.cross_entropy import stats as _cross_entropy_stats  # noqa: F401  (registers its ops)
from .ops.rope.complex_rope import complex_rope
from .ops import rescale as _rescale  # noqa: F401  (registers its ops)
from .ops.cross_entropy.op import cross_entropy
from .ops.divergence.op import jsd, kl_div, tvd
from .ops.fused_linear_ce.op import fused_linear_ce
from .ops.fused_linear_divergence.op import fused_linear_jsd, fused_linear_kl_div
from .ops.fused_linear_logprobs.op import LogProbs, fused_linear_logprobs
from .ops.geglu import geglu, geglu_packed
from .ops.group_norm import group_norm
from .ops.grouped_experts.op import grouped_experts
from .ops.layer_norm import layer_norm
from .ops.rope.mrope import mrope
from .ops.relu_squared import relu_squared
from .ops.rope.op import rope
from .ops.rope.qk_norm_rope import qk_norm_rope
from .ops.softmax import softmax
from .ops.swiglu import swiglu, swiglu_packed
from .ops.tiled_mlp.op import tiled_mlp
# isort: on

_initialise()
distributed._initialise()
register_loops("liger")

__version__ = "0.2.0"
__all__ = [
    "BackendUnavailable",
    "CrossEntropyOutput",
    "LogProbs",
    "backend_report",
    "complex_rope",
    "cross_entropy",
    "distributed",
    "fused_add_rms_norm",
    "fused_linear_ce",
    "fused_linear_jsd",
    "fused_linear_kl_div",
    "fused_linear_logprobs",
    "geglu",
    "geglu_packed",
    "group_norm",
    "grouped_experts",
    "jsd",
    "kl_div",
    "layer_norm",
    "losses",
    "mrope",
    "nn",
    "patch",
    "qk_norm_rope",
    "relu_squared",
    "rms_norm",
    "rms_norm_gated",
    "rope",
    "set_backend",
    "softmax",
    "swiglu",
    "swiglu_packed",
    "tiled",
    "tiled_mlp",
    "transformers",
    "tvd",
    "unpatch",
    "use_backend",
]

if TYPE_CHECKING:
    from . import losses, nn, transformers
    from . import trl as trl
    from .transformers import patch, unpatch
else:
    # ``import liger`` imports no more than torch.
    __getattr__, __dir__ = lazy(
        __name__,
        __all__,
        {
            **{name: f"liger.{name}" for name in ("losses", "nn", "transformers", "trl")},
            **dict.fromkeys(("patch", "unpatch"), "liger.transformers"),
        },
    )
