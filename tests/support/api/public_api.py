# SPDX-License-Identifier: BSD-3-Clause
"""The signature of every public name, a line each: ``python tests/support/api/public_api.py`` records
them."""

import importlib
import inspect
import pathlib
import typing

RECORDED = pathlib.Path(__file__).parents[2] / "packaging/public_api.txt"
PACKAGES = ("liger", "liger.nn", "liger.losses", "liger.distributed", "liger.transformers")


def _signature(function, bound=False):
    """Parameters and defaults as a caller writes them, without types."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1 if bound else 0 :]
    plain = [p.replace(annotation=p.empty) for p in parameters]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def _described(name, value):
    """The lines of one public name."""
    if inspect.ismodule(value):
        return [f"{name}: package"]
    if not inspect.isclass(value):
        return [f"{name}{_signature(value)}"]
    if typing.is_typeddict(value):
        return [f"{name}: options {', '.join(typing.get_type_hints(value))}"]
    if issubclass(value, tuple):
        return [f"{name}: fields {', '.join(value._fields)}"]
    if issubclass(value, BaseException):
        return [f"{name}: {value.__mro__[1].__name__}"]
    own = [n for n, m in vars(value).items() if not n.startswith("_") and callable(m) and n != "extra_repr"]
    lines = [f"{name}{_signature(value)}"]
    # Not the one of torch.nn.Module, which raises.
    forward = getattr(value, "forward", None)
    if forward is not None and not forward.__module__.startswith("torch"):
        lines.append(f"{name}.forward{_signature(forward, bound=True)}")
    for n, member in sorted(vars(value).items()):
        if isinstance(member, classmethod) and not n.startswith("_"):
            lines.append(f"{name}.{n}{_signature(getattr(value, n))}")
    return lines + [f"{name}.{n}: method" for n in sorted(own) if n != "forward"]


def current():
    """All lines. A name that a package takes from another one has a line there, too."""
    lines = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(module.__all__):
            lines += _described(f"{package}.{name}", getattr(module, name))
    return lines


if __name__ == "__main__":
    RECORDED.write_text("".join(f"{line}\n" for line in current()))
    print(f"{len(current())} lines in {RECORDED}")
