# SPDX-License-Identifier: BSD-3-Clause
"""The forward of fused_linear_logprobs keeps logits or exponentials for its backward, which then skips a
GEMM.

``"nothing"``: the backward computes the logits again, four GEMMs in all. ``"exponentials"``: the exponentials
of all rows, as the wgmma engine of compute capability 9.0 writes them, in 16 bits. ``"logits"``: the logits
of all rows, in the dtype of the hidden states or in float32 as ``logits_dtype`` says, on any device and with
every option. Both save one GEMM.
"""

import torch

from ..dtensor.inputs import is_dtensor
from ..op.arguments import described, dtype_name
from ..op.registration import FAMILIES
from .sm90_plan import ENGINE, ENGINE_DTYPES, round_up

NOTHING, LOGITS, EXPONENTIALS = "nothing", "logits", "exponentials"


def constant_in_compiled_code(function):
    """``torch.compiler.assume_constant_result``, which imports all of torch._dynamo when it decorates."""
    function._dynamo_marked_constant = True
    return function


def exponentials_bytes(rows, vocab):
    """Bytes of the exponentials of so many rows, in whole tiles."""
    return 2 * round_up(rows, ENGINE.tile_rows) * round_up(vocab, ENGINE.panel)


@constant_in_compiled_code
def _engine_is_chosen():
    return FAMILIES["fused_linear_ce"].choice == "cuda"


@constant_in_compiled_code
def _device_has_engine(device_index):
    """True if the wgmma engine can run on this device."""
    if not hasattr(torch.ops.liger_sm90, "takes_logprobs"):
        return False
    return torch.ops.liger_sm90.takes_logprobs.default(
        ENGINE.min_rows, ENGINE.hidden_unit, ENGINE.panel, device_index
    )


@constant_in_compiled_code
def _default_budget():
    return torch.ops.liger.default_memory_budget()


def budget_or_default(memory_budget):
    """Bytes. Compiled code reads LIGER_MEMORY_BUDGET when it is compiled."""
    return _default_budget() if memory_budget is None else memory_budget


def sizes_for_engine(rows, hidden):
    """True if the wgmma engine takes these sizes, with any number of classes."""
    return rows >= ENGINE.min_rows and hidden % ENGINE.hidden_unit == 0


def engine_can(input, weight, bias, softcap, float32_logits=False):
    """True if the wgmma engine can compute the log-probabilities of these hidden states. It never rounds a
    logit, but the sums of tensor cores have a larger error than ``logits_dtype`` float32 allows."""
    if float32_logits or not input.is_cuda or input.dtype not in ENGINE_DTYPES or weight.dtype != input.dtype:
        return False
    if bias is not None or softcap is not None:
        return False
    return sizes_for_engine(*input.shape) and _device_has_engine(input.device.index)


def engine_takes(input, weight, bias, softcap, float32_logits=False):
    """True if the engine computes the log-probabilities: it belongs to the cuda backend of
    fused_linear_ce."""
    return _engine_is_chosen() and engine_can(input, weight, bias, softcap, float32_logits)


def choose(input, weight, bias, softcap, memory_budget, recompute, float32_logits=False):
    """Chooses what a call with a backward keeps.

    Args:
        recompute: True: nothing. False: something, whatever it takes. None: exponentials that fit the budget.
            Not logits, because their GEMM also computes ignored rows.
    """
    if recompute or is_dtensor(input) or is_dtensor(weight):
        return NOTHING
    if not engine_takes(input, weight, bias, softcap, float32_logits):
        return NOTHING if recompute is None else LOGITS
    needed = exponentials_bytes(input.shape[0], weight.shape[0])
    fits = recompute is not None or needed <= budget_or_default(memory_budget)
    return EXPONENTIALS if fits else NOTHING


def check_keep(op, keep):
    if keep not in (NOTHING, LOGITS, EXPONENTIALS):
        raise RuntimeError(
            f"{op}: keep is {described(keep)}, expected '{NOTHING}', '{LOGITS}' or '{EXPONENTIALS}'"
        )


def check_engine(op, keep, input, weight, bias, softcap, float32_logits=False):
    """Raises RuntimeError for exponentials where the engine cannot run."""
    if keep == EXPONENTIALS and not engine_can(input, weight, bias, softcap, float32_logits):
        dtypes = " or ".join(map(dtype_name, ENGINE_DTYPES))
        raise RuntimeError(
            f"{op}: keep is '{EXPONENTIALS}', expected '{NOTHING}' or '{LOGITS}': the wgmma engine needs a GPU of "
            f"compute capability 9.0, hidden states and weight in {dtypes}, no bias, no softcap, no "
            f"logits_dtype, at least {ENGINE.min_rows} rows and a hidden size divisible by {ENGINE.hidden_unit}"
        )


def _kept_dtype(keep, input, logits_dtype):
    return logits_dtype if keep == LOGITS and logits_dtype is not None else input.dtype


def _kept_shapes(keep, input, weight, with_entropy, logits_dtype):
    """Shapes of (logits or exponentials, numbers of each row).

    Logits are rows of classes, rounded up to 16 bytes on a GPU, whose GEMMs need aligned rows. The numbers of
    a row are its largest logit z, the sum of exp(logit - z), and its entropy if that is known.
    """
    (rows, _), vocab = input.shape, weight.shape[0]
    if keep == EXPONENTIALS:
        return (exponentials_bytes(rows, vocab) // 2,), (rows, ENGINE.kept_numbers)
    if keep == LOGITS:
        per_16_bytes = 16 // _kept_dtype(keep, input, logits_dtype).itemsize
        stride = round_up(vocab, per_16_bytes) if input.is_cuda else vocab
        return (rows, stride), (2 + with_entropy, rows)
    return (0,), (0,)


def check_kept(op, keep, kept, kept_rows, input, weight, with_entropy, logits_dtype):
    """Raises RuntimeError if a backward gets other shapes, or another dtype, than those that its forward has
    kept."""
    if keep == NOTHING:
        return
    shapes = _kept_shapes(keep, input, weight, with_entropy, logits_dtype)
    for name, tensor, shape in zip(("kept", "kept_rows"), (kept, kept_rows), shapes, strict=True):
        found = None if tensor is None else tuple(tensor.shape)
        # Entropies may be known without having a gradient.
        if found != shape and (found != (3, *shape[1:]) or name == "kept"):
            raise RuntimeError(f"{op}: {name} has shape {found}, expected {shape} for keep='{keep}'")
    expected = _kept_dtype(keep, input, logits_dtype)
    if kept.dtype != expected:
        raise RuntimeError(
            f"{op}: kept has dtype {dtype_name(kept.dtype)}, expected {dtype_name(expected)} for keep='{keep}' and "
            f"logits_dtype {logits_dtype if logits_dtype is None else dtype_name(logits_dtype)}"
        )


def new_kept(keep, input, weight, wide, with_entropy, logits_dtype):
    """Memory for (logits or exponentials, numbers of each row) of this kind."""
    shape, rows_shape = _kept_shapes(keep, input, weight, with_entropy, logits_dtype)
    memory = input.new_empty(shape, dtype=_kept_dtype(keep, input, logits_dtype))
    return memory, input.new_empty(rows_shape, dtype=wide)
