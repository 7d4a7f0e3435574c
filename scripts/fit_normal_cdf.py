# SPDX-License-Identifier: BSD-3-Clause
"""The coefficients of ``normal_tail`` (csrc/activation/activations.cuh, triton_kernels/gated.py), and its
error.

``exp(x^2 / 2) * cdf(-x)`` for x >= 0 decreases like 1 / x. With t = 1 / (1 + p * x) it is t * P(t), and P is
smooth on (0, 1]. A minimax polynomial in the relative error approximates P: iteratively reweighted least
squares (Lawson's method). The script prints a table; the package does not import it.
"""

import math

import numpy as np

LARGEST = 13.5  # beyond it, exp(-x^2 / 2) is denormal in float32
POINTS = 1000


def scaled_tail(x):
    """exp(x^2 / 2) * cdf(-x) in float64."""
    z = x / math.sqrt(2)
    if z < 5:
        return 0.5 * math.erfc(z) * math.exp(z * z)
    total, term = 0.0, 1.0
    for k in range(1, 12):  # the asymptotic series of erfc
        total, term = total + term, term * -(2 * k - 1) / (2 * z * z)
    return 0.5 * total / (z * math.sqrt(math.pi))


def fit(p, degree):
    """(largest relative error, coefficients in ascending order)."""
    least = 1 / (1 + p * LARGEST)
    t = (1 + least) / 2 + (1 - least) / 2 * np.cos(np.pi * (np.arange(POINTS) + 0.5) / POINTS)
    exact = np.array([scaled_tail(x) for x in (1 / t - 1) / p]) / t
    powers = np.vander(t, degree + 1, increasing=True) / exact[:, None]
    weights, best = np.ones(POINTS), (math.inf, None)
    for _ in range(100):
        root = np.sqrt(weights)
        coefficients = np.linalg.lstsq(powers * root[:, None], root, rcond=None)[0]
        error = np.abs(powers @ coefficients - 1)
        best = min(best, (error.max(), coefficients), key=lambda pair: pair[0])
        weights *= error / error.max() + 1e-3
        weights /= weights.mean()
    return best


def main():
    for degree in range(4, 8):
        error, p = min((fit(p, degree)[0], p) for p in np.arange(0.15, 0.5, 0.01))
        print(f"degree {degree}: p = {p:.2f}, relative error {error:.2e}")
        print("  ", *(f"{c:.9g}" for c in fit(p, degree)[1]))


if __name__ == "__main__":
    main()
