# SPDX-License-Identifier: BSD-3-Clause
"""The build of the compiled libraries."""

import functools

import torch


@functools.lru_cache(None)
def build_info() -> dict[str, str]:
    """The facts that ``libliger_ops.so`` records about its build.

    Returns:
        ``version`` of liger-ops; ``torch``, whose headers were used; ``cuda``, the version of nvcc (empty: no
        CUDA kernels); ``cuda_archs``, separated by spaces, such as ``"80 90a 80+PTX"``; ``compiler``, the
        version of the C++ compiler.
    """
    return dict(field.split("=", 1) for field in torch.ops.liger.build_info())
