# SPDX-License-Identifier: BSD-3-Clause
"""A function copied with one of its globals renamed."""

import inspect

import pytest

pytest.importorskip("transformers")

from liger.transformers.recipe.rename import attributes_used, rename_attribute, rename_global, uses_global


def rotate():
    return "old"


def decorate(function):
    calls = 0

    def wrapper(*args):
        nonlocal calls
        calls += 1
        return [function(*args), known_to_itself.__name__, calls]

    known_to_itself = wrapper
    wrapper.__wrapped__ = function
    return wrapper


def test_renaming_a_global_reaches_through_decorators(monkeypatch):
    @decorate
    @decorate
    def function(n, suffix="!"):
        return [rotate() + suffix for _ in range(n)]

    monkeypatch.setitem(globals(), "rotate_anew", lambda: "new")
    copied = rename_global(function, "rotate", "rotate_anew")
    assert copied(2) == [[["new!", "new!"], "wrapper", 1], "wrapper", 1]
    assert function(2) == [[["old!", "old!"], "wrapper", 2], "wrapper", 2]
    assert inspect.signature(copied) == inspect.signature(function)
    assert inspect.unwrap(copied)(1) == ["new!"] and inspect.unwrap(function)(1) == ["old!"]
    monkeypatch.setitem(globals(), "rotate_anew", lambda: "newer")
    assert copied(0) and inspect.unwrap(copied)(1) == ["newer!"]
    assert uses_global(function, "rotate") is globals() and uses_global(function, "unknown") is None
    with pytest.raises(ValueError, match="uses rotate as a global and as an attribute"):
        rename_global(lambda x: rotate() + x.rotate, "rotate", "rotate_anew")


class Thing:
    old, new, method, replaced = 1, 2, staticmethod(lambda x: x), staticmethod(lambda x: -x)


def test_renaming_an_attribute_reaches_through_decorators():
    @decorate
    def function(thing, n):
        return [thing.method(i) + thing.old for i in range(n)]

    copied = rename_attribute(rename_attribute(function, "old", "new"), "method", "replaced")
    assert copied(Thing(), 2) == [[2, 1], "wrapper", 1]
    assert function(Thing(), 2) == [[1, 2], "wrapper", 2]
    assert attributes_used(function) >= {"method", "old"} and attributes_used(copied) >= {"replaced", "new"}


def set_old(thing):
    thing.old = thing.old + 1


@pytest.mark.parametrize("function", [set_old, lambda thing: thing.rotate + rotate()])
def test_attributes_that_are_not_only_read(function):
    (name,) = {"old", "rotate"} & set(function.__code__.co_names)
    with pytest.raises(ValueError, match=f"uses {name} as a global and as an attribute|sets {name}"):
        rename_attribute(function, name, "new")
