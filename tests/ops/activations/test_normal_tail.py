# SPDX-License-Identifier: BSD-3-Clause
"""The approximation of the normal distribution that half types use in exact GELU, evaluated in float32 on the
CPU."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
NUMBER = r"-?\d+\.\d+(?:e-?\d+)?"


def of_cuda():
    """(steepness, factor of x^2 in the exponent, coefficients from the constant on), as the kernel has
    them."""
    source = (ROOT / "csrc/activation/activations.cuh").read_text().partition("struct NormalTail")[2]
    steepness, exponent = (
        re.search(rf"kSteepness = ({NUMBER})f", source),
        re.search(rf"kHalfLog2e = ({NUMBER})f", source),
    )
    coefficients = re.search(r"c\[\] = \{([^}]*)\}", source)[1]
    return float(steepness[1]), -float(exponent[1]), [float(c) for c in re.findall(NUMBER, coefficients)]


def of_triton():
    source = (
        (ROOT / "triton_kernels/gated.py")
        .read_text()
        .partition("def normal_tail")[2]
        .partition("@triton.jit")[0]
    )
    steepness, exponent = (
        re.search(rf"({NUMBER}) \* tl\.abs", source),
        re.search(rf"x \* x \* ({NUMBER})", source),
    )
    highest_first = [float(c) for c in re.findall(rf"total = ({NUMBER})", source)]
    highest = float(re.search(rf"\+ ({NUMBER}) \* t\b", source)[1])
    return float(steepness[1]), float(exponent[1]), [*reversed(highest_first), highest]


def tail_in_float32(x, steepness, exponent, coefficients):
    x = x.astype(np.float32)
    t = np.float32(1) / (np.float32(1) + np.float32(steepness) * np.abs(x))
    total = np.float32(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * t + np.float32(c)
    return total * t * np.exp2(x * x * np.float32(exponent))


def test_both_backends_have_the_same_numbers():
    assert of_cuda() == of_triton()
    assert len(of_cuda()[2]) == 7


@pytest.mark.parametrize("numbers", [of_cuda, of_triton])
@pytest.mark.parametrize("largest, allowed", [(9.0, 3e-6), (12.9, 6e-6)])
def test_relative_error_of_the_tail(numbers, largest, allowed):
    # Numbers that a half type has: the square is exact in float32, as in the kernels.
    x = np.unique(np.linspace(0, largest, 20001).astype(np.float16)).astype(np.float64)
    exact = np.array([0.5 * math.erfc(v / math.sqrt(2)) for v in x])
    computed = tail_in_float32(x, *numbers()).astype(np.float64)
    assert np.abs(computed / exact - 1).max() < allowed
