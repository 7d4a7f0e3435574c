"""Types of command-line arguments."""

import argparse
import math


def positive(number):
    """argparse type: a finite number above 0, an int or a float."""

    def parse(text):
        try:
            value = number(text)
        except ValueError:
            value = 0
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"expected {_NAMES[number]} above 0, got '{text}'")
        return value

    return parse


_NAMES = {int: "an integer", float: "a number"}
