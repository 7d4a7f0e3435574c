"""Every public callable has annotations for all parameters and for its result, as py.typed promises."""

import importlib
import inspect

import pytest

# liger.trl and liger.transformers need packages that may be missing.
MODULES = [
    *("liger", "liger.debug", "liger.nn", "liger.distributed", "liger.losses", "liger.transformers"),
    "liger.trl",
]


def imported(module):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"{module} does not import: {error}")


def public_functions(module):
    """(qualified name, function) of the public functions of a module, and of the methods by which its classes are
    used. Methods that another package defines are left out."""
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value):
            for method in ("__init__", "forward", "__call__"):
                function = getattr(value, method, None)
                if inspect.isfunction(function) and function.__module__.partition(".")[0] == "liger":
                    yield f"{name}.{method}", function
        elif callable(value):
            yield name, value


def unannotated(function):
    """The parameters of a function without annotation, and ``return``."""
    signature = inspect.signature(function)
    missing = [
        name
        for name, parameter in signature.parameters.items()
        if name != "self" and parameter.annotation is parameter.empty
    ]
    return missing + ["return"] * (signature.return_annotation is signature.empty)


@pytest.mark.parametrize("module", MODULES)
def test_public_callables_are_annotated(module):
    functions = dict(public_functions(imported(module)))
    assert functions
    missing = {name: unannotated(function) for name, function in functions.items()}
    assert not {name: names for name, names in missing.items() if names}


def test_a_missing_annotation_is_found():
    def function(x: int, y, *args, **options) -> None: ...

    assert unannotated(function) == ["y", "args", "options"]
    assert unannotated(lambda: 0) == ["return"]


def test_annotated_methods_of_classes_are_found():
    names = dict(public_functions(importlib.import_module("liger.nn")))
    assert {"RMSNorm.__init__", "RMSNorm.forward", "SwiGLUMLP.__init__"} <= set(names)
