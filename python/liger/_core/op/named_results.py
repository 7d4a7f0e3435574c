# SPDX-License-Identifier: BSD-3-Clause
"""Results of public functions and losses with names, which programs of torch.export can return and be saved
with."""

from typing import TypeVar

from torch.utils import _pytree

_Class = TypeVar("_Class", bound=type)


def serialisable(cls: _Class) -> _Class:
    """Decorator of a NamedTuple: ``torch.export.save`` writes it by its public name, and ``load`` makes it
    again."""
    package = "liger.losses" if cls.__module__.startswith("liger.losses.") else "liger"
    # torch has no public function for this; the error of torch.export.save names this one.
    _pytree._register_namedtuple(cls, serialized_type_name=f"{package}.{cls.__name__}")
    return cls
