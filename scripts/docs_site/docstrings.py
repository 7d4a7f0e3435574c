# SPDX-License-Identifier: BSD-3-Clause
"""Griffe extension: docstrings of the sources, which use Sphinx roles, as Markdown, and names imported at
first use.

The sources remain readable in ``help()``; all differences are handled here, for every docstring alike.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# Names that a package imports in its ``__getattr__``, which a reader of sources cannot follow.
LAZY = {"liger.patch": "liger.transformers.patch", "liger.unpatch": "liger.transformers.unpatch"}
_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):`~?([\w.]+)`")
_PAGE = re.compile(r"\bdocs/([a-z_/]+)\.md\b")
_SECTION = re.compile(r"^ *(Args|Attributes|Raises):$")
_SEVERAL = re.compile(r"^( +)((?:\*{0,2}\w+, )+\*{0,2}\w+):(.*)$", re.S)
# Names whose list goes on in the next line.
_CONTINUED = re.compile(r"^( +(?:\*{0,2}\w+, )*\*{0,2}\w+),\n +(?=(?:\*{0,2}\w+, )*\*{0,2}\w+:)", re.M)
# A description of results with a colon: griffe takes the text before it for the type, unless there is one.
_RETURNS = re.compile(r"^ *Returns:\n +(?=[^\n]*: )", re.M)
_HEADING = re.compile(r"^(\s*)(?:(Sources?):(?= \S)|(Example)::$)", re.M)


class Docstrings(griffe.Extension):
    """See the module."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        if pkg.name != "liger":
            return
        for name, target in LAZY.items():
            parent, _dot, own = name.removeprefix("liger.").rpartition(".")
            module = pkg[parent] if parent else pkg
            if own not in module.members:
                module.set_member(own, griffe.Alias(own, target))
        _convert(pkg, pkg)


def _convert(obj: griffe.Object, package: griffe.Module) -> None:
    """Docstrings of an object and its members, whose roles may name what their package exports."""
    if obj.docstring is not None:
        obj.docstring.value = markdown(obj.docstring.value, package)
        if isinstance(obj, griffe.Function) and obj.returns is not None:
            obj.docstring.value = _RETURNS.sub(rf"\g<0>{obj.returns}: ", obj.docstring.value)
    if isinstance(obj, griffe.Function):
        # They differ in the type of the result alone, which the docstring states.
        obj.overloads = None
    for member in obj.members.values():
        if isinstance(member, griffe.Object):
            inner = member if isinstance(member, griffe.Module) and member.is_init_module else package
            _convert(member, inner)


def markdown(text: str, package: griffe.Module) -> str:
    """A docstring with roles, names of pages and joined arguments as mkdocstrings expects them."""

    def reference(match: re.Match[str]) -> str:
        name = match[1]
        path = f"{package.path}.{name}" if name.partition(".")[0] in (package.exports or ()) else name
        return f"[`{name}`][{path}]" if path.startswith("liger") else f"`{name}`"

    text = _ROLE.sub(reference, _one_name_each(text))
    text = _PAGE.sub(lambda match: f"[docs/{match[1]}.md](../docs/{match[1]}.md)", text)
    return _HEADING.sub(lambda match: f"{match[1]}**{match[2] or match[3]}:**", text)


def _one_name_each(text: str) -> str:
    """In sections of arguments: ``a, b: text`` as one item per name, with the same text."""
    lines = _CONTINUED.sub(r"\1, ", text).splitlines()
    result: list[str] = []
    level, start = None, 0
    while start < len(lines):
        line = lines[start]
        end = start + 1
        if _SECTION.match(line):
            level = _indent(line)
        elif line.strip() and level is not None and _indent(line) <= level:
            level = None
        elif line.strip() and level is not None:
            while end < len(lines) and lines[end].strip() and _indent(lines[end]) > _indent(line):
                end += 1
            if found := _SEVERAL.match(line):
                for name in found[2].split(", "):
                    result += [f"{found[1]}{name}:{found[3]}", *lines[start + 1 : end]]
                start = end
                continue
        result += lines[start:end]
        start = end
    return "\n".join(result)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
