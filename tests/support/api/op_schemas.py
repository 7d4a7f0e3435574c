# SPDX-License-Identifier: BSD-3-Clause
"""The schemas of torch.ops.liger, now and in the last release: ``python tests/support/api/op_schemas.py``
records them.

Nothing has been released yet, so there is no record.
"""

import pathlib

import torch

import liger  # noqa: F401  registers the ops

RELEASED = pathlib.Path(__file__).parents[2] / "packaging/released_schemas.txt"
# Ops that other ops and commands call, and no graph contains.
INTERNAL = ("build_info", "check_", "declarations", "plan_", "lay_out_")


def current():
    """{name: schema} of the ops that compiled graphs and exported programs contain."""
    found = {s.name: s for s in torch._C._jit_get_all_schemas() if s.name.startswith("liger::")}
    return {n: s for n, s in sorted(found.items()) if not n.partition("::")[2].startswith(INTERNAL)}


def released():
    """The recorded schemas."""
    return RELEASED.read_text().splitlines() if RELEASED.is_file() else []


if __name__ == "__main__":
    RELEASED.write_text("".join(f"{schema}\n" for schema in current().values()))
    print(f"{len(current())} schemas in {RELEASED}")
