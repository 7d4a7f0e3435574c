# SPDX-License-Identifier: BSD-3-Clause
"""Types of command-line arguments."""

import argparse
import re
from collections.abc import Callable

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# The first one is the oldest that the kernels run on.
CAPABILITIES = tuple(divmod(code, 10) for code in (80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121))


def positive(text: str) -> int:
    """argparse type: an integer above 0."""
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"expected an integer above 0, got '{text}'")
    return int(text)


def size(largest: int, what: str = "an integer") -> Callable[[str], int]:
    """argparse type: an integer from 1 to ``largest``, with an optional suffix K, M or G (powers of 1024)."""

    def parse(text):
        match = re.fullmatch(r"([0-9]+)([KMG]?)", text.upper())
        value = int(match[1]) * _UNITS[match[2]] if match else 0
        if value < 1:
            raise argparse.ArgumentTypeError(f"expected {what} above 0, such as 8192 or 8K, got '{text}'")
        if value > largest:
            raise argparse.ArgumentTypeError(f"expected at most {largest}, got {text}")
        return value

    return parse


def capability(text: str) -> tuple[int, int]:
    """argparse type: the compute capability of a GPU on which the kernels run, such as 9.0."""
    match = re.fullmatch(r"([0-9]+)\.([0-9]+)", text)
    found = (int(match[1]), int(match[2])) if match else None
    if found not in CAPABILITIES:
        known = ", ".join("{}.{}".format(*pair) for pair in CAPABILITIES)
        raise argparse.ArgumentTypeError(
            f"expected a compute capability such as 9.0, one of {known}, got '{text}'"
        )
    return found


def budget(text: str) -> str:
    """argparse type: the text of a memory budget such as 256M."""
    size(2**62, "a number of bytes")(text)
    return text
