# SPDX-License-Identifier: BSD-3-Clause
"""Attributes of an object for the length of a block."""

import contextlib


@contextlib.contextmanager
def overriding(owner, **attributes):
    """Sets attributes of one object, in front of its class, and restores what it had before."""
    missing = object()
    before = {name: owner.__dict__.get(name, missing) for name in attributes}
    owner.__dict__.update(attributes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                del owner.__dict__[name]
            else:
                owner.__dict__[name] = value
