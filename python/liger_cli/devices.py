# SPDX-License-Identifier: BSD-3-Clause
"""GPUs and optimizers that ``liger plan`` knows by name."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """``memory``: GiB that torch reports; ``flops``: of dense bfloat16 GEMMs per second; ``bandwidth``: bytes
    per second."""

    memory: float
    flops: float
    bandwidth: float
    capability: tuple[int, int]


# Measured (docs/lab): an H200's GEMMs and bandwidth, and an H100's GEMMs. All others are numbers of data
# sheets, GEMMs times 0.7 (an A100, whose power limits it less: 0.83) and bandwidth times 0.875: what an H200
# reaches of its 989 TFLOP/s and 4.8 TB/s.
GPUS = {
    "b200": Gpu(178.0, 1575e12, 7.0e12, (10, 0)),  # 2250 TFLOP/s, 8 TB/s
    "h200": Gpu(139.0, 690e12, 4.2e12, (9, 0)),
    "h100": Gpu(79.0, 690e12, 2.9e12, (9, 0)),  # SXM: 3.35 TB/s
    "a100": Gpu(79.0, 260e12, 1.8e12, (8, 0)),  # 80 GB: 312 TFLOP/s, 2.04 TB/s
    "rtx4090": Gpu(23.5, 115e12, 0.88e12, (8, 9)),  # 165 TFLOP/s with float32 sums, 1.008 TB/s
}


class Optimizer(NamedTuple):
    """``states``: numbers per weight; ``size``: bytes of a number, None for the size of the weight."""

    states: int
    size: float | None = None


# One byte, and a float32 scale per 256 numbers.
_QUANTISED = 1 + 4 / 256
DEFAULT_OPTIMIZER = "adamw_torch_fused"
# By the names of transformers' TrainingArguments(optim=).
OPTIMIZERS = {
    DEFAULT_OPTIMIZER: Optimizer(2),
    "adamw_bnb_8bit": Optimizer(2, _QUANTISED),
    "adamw_8bit": Optimizer(2, _QUANTISED),
    "lion_32bit": Optimizer(1, 4),
    "lion_8bit": Optimizer(1, _QUANTISED),
    "sgd": Optimizer(0),
}
