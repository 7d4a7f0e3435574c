# SPDX-License-Identifier: BSD-3-Clause
"""The heads of TRL and unsloth_zoo, loaded from their wheels alone.

Importing either package needs more than its head does (TRL: datasets and pandas; unsloth_zoo: unsloth,
bitsandbytes and more), and unsloth_zoo changes torch and transformers for all contestants of the process.
"""

import contextlib
import functools
import importlib
import importlib.util
import sys
import types

from ..candidates import Candidate, peer

# Classes per tile of TRL's head, as its trainers call it.
TRL_CLASSES = 8192


def bare_packages(*names):
    """Packages whose modules can be imported although their own ``__init__`` does not run; outer ones come
    first."""
    for name in names:
        if name not in sys.modules:
            spec = importlib.util.find_spec(name)
            if spec is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            sys.modules[name] = importlib.util.module_from_spec(spec)


@functools.cache
def _trl_head():
    before = set(sys.modules)
    try:
        # The backward of the head takes a function from there.
        importlib.import_module("trl.trainer.utils")
    except (ImportError, RuntimeError):
        # What the failed import has left would hide the bare packages.
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "trl":
                del sys.modules[name]
        bare_packages("trl", "trl.kernels", "trl.trainer")
        utils = types.ModuleType("trl.trainer.utils")
        # It gathers a weight that DeepSpeed has sharded; otherwise it is such a context, too.
        utils.maybe_gather_lm_head_ctx = lambda *parameters: contextlib.nullcontext()
        sys.modules[utils.__name__] = utils
    return importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction


def trl_logprobs(t, temperature=1.0, softcap=None):
    """Log-probabilities of the targets."""
    # hidden, weight, bias, targets, temperature, classes per tile, softcap, scale of the logits, further
    # outputs
    options = temperature, TRL_CLASSES, softcap, 1.0, ()
    return _trl_head().apply(t["input"], t["weight"], t.get("bias"), t["target"], *options)[0]


def trl(function):
    return Candidate("TRL", function, needs=("trl", "transformers", "triton"))


def _unsloth(module, name):
    # Where the whole package has been imported, it is used.
    bare_packages("unsloth_zoo", "unsloth_zoo.temporary_patches", "unsloth_zoo.fused_losses")
    return peer(f"unsloth_zoo.fused_losses.{module}", name)


def unsloth_ce(t, softcap=None, label_smoothing=0.0):
    """The mean cross entropy, with the defaults of patched models."""
    options = {"logit_softcapping": softcap} if softcap else {}
    if label_smoothing:
        options["label_smoothing"] = label_smoothing
    # A batch of one sequence whose labels are shifted already.
    return _unsloth("cross_entropy_loss", "unsloth_fused_ce_loss")(
        None, t["input"][None], t["weight"], t.get("bias"), t["target"][None], shift_labels=False, **options
    )


def unsloth_logprobs(t, temperature=1.0):
    """Log-probabilities of the targets."""
    function = _unsloth("chunked_logprob", "unsloth_chunked_logprobs")
    return function(t["input"], t["weight"], t["target"], temperature=temperature)


def unsloth(function):
    return Candidate("unsloth_zoo", function, needs=("unsloth_zoo", "triton", "filelock", "packaging"))
