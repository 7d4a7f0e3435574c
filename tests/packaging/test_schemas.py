# SPDX-License-Identifier: BSD-3-Clause
"""The ops of torch.ops.liger still take the calls that the ops of the last release took: compiled graphs and
exported programs contain such calls."""

import op_schemas
import pytest
import torch


def accepts_calls_of(schema, released):
    """True if a call that was written for another schema still works, with results of the same number and
    kind."""
    return schema is not None and schema.is_backward_compatible_with(torch._C.parse_schema(released))


@pytest.mark.parametrize("released", op_schemas.released(), ids=lambda text: text.partition("(")[0])
def test_released_calls_still_work(released):
    name = released.partition("(")[0]
    schema = op_schemas.current().get(name)
    assert accepts_calls_of(schema, released), (
        f"{name} was released as\n  {released}\nand is now\n  {schema}\nadd arguments at the end, with defaults; for "
        "anything else add an op with another name"
    )


def test_what_is_no_compatible_change():
    released = "liger::f(Tensor x, float eps=1e-06) -> (Tensor y, Tensor rstd)"
    for text, expected in {
        "liger::f(Tensor x, float eps=1e-06, bool flag=False) -> (Tensor y, Tensor rstd)": True,
        "liger::f(Tensor x, float eps=1e-06, *, bool flag=False) -> (Tensor y, Tensor rstd)": True,
        "liger::f(Tensor x, float eps=1e-06, *, bool flag) -> (Tensor y, Tensor rstd)": False,
        "liger::f(Tensor x, bool flag=False, float eps=1e-06) -> (Tensor y, Tensor rstd)": False,
        "liger::f(Tensor x, float eps=0.001) -> (Tensor y, Tensor rstd)": False,
        "liger::f(Tensor x) -> (Tensor y, Tensor rstd)": False,
        "liger::f(Tensor x, float eps=1e-06) -> Tensor": False,
        "liger::f(Tensor(a!) x, float eps=1e-06) -> (Tensor y, Tensor rstd)": False,
    }.items():
        assert accepts_calls_of(torch._C.parse_schema(text), released) == expected, text
    assert not accepts_calls_of(None, released)
