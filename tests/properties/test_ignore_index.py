# SPDX-License-Identifier: BSD-3-Clause
"""Every op whose schema has ``ignore_index``, with int32 targets and a number that no int32 target can
have."""

import pytest
import torch
from samples import SAMPLES

import liger  # noqa: F401  registers the ops

OPS = sorted(
    schema.name.removeprefix("liger::")
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("liger::") and any(a.name == "ignore_index" for a in schema.arguments)
)


def results(op, arguments):
    """What the op returns, and what it has written."""
    schema = getattr(torch.ops.liger, op).default._schema
    given = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments.values()]
    found = getattr(torch.ops.liger, op)(**dict(zip(arguments, given, strict=True)))
    found = found if isinstance(found, tuple) else () if found is None else (found,)
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    return [*found, *(a for name, a in zip(arguments, given, strict=True) if name in written)]


def samples(op, device):
    """Arguments by name, all targets int32 classes of the vocabulary."""
    names = [a.name for a in getattr(torch.ops.liger, op).default._schema.arguments]
    for sample in SAMPLES[op](device):
        arguments = dict(zip(names, sample, strict=False))
        if arguments.get("target") is not None and arguments["target"].numel():
            arguments["target"] = arguments["target"].clamp(min=0).int()
            yield arguments


@pytest.mark.parametrize("op", OPS)
def test_a_number_beyond_int32_ignores_no_row_or_is_refused(device, op):
    """torch compares in the dtype of the targets, where 2**32 + c is c."""
    found = list(samples(op, device))
    assert found
    for arguments in found:
        expected = results(op, arguments | {"ignore_index": -1})
        first, *_, last = arguments["target"].flatten().tolist()
        for number in (2**32 + first, last - 2**32):
            try:
                got = results(op, arguments | {"ignore_index": number})
            except (ValueError, RuntimeError) as refused:
                assert f"ignore_index is {number}, expected a value of int32" in str(refused)
                continue
            for i, (a, b) in enumerate(zip(got, expected, strict=True)):
                assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), f"result {i}"
