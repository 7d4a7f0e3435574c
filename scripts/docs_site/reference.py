"""The pages of the API reference: one per public module, with every name of its ``__all__``, and the schemas.

Modules are read as source text, so neither torch nor a build of liger is needed.
"""

from __future__ import annotations

import ast
import re

# Page, module, heading. Modules of liger that are listed in its __all__ have pages of their own.
MODULES = (
    ("liger.md", "liger"),
    ("nn.md", "liger.nn"),
    ("losses.md", "liger.losses"),
    ("transformers.md", "liger.transformers"),
    ("trl.md", "liger.trl"),
    ("distributed.md", "liger.distributed"),
    ("compat.md", "liger.compat"),
)
_DEFINITION = re.compile(r'"(\w+\((?:[^"\\]|\\.)*-> (?:[^"\\]|\\.)*)"')


def pages(root):
    """File name -> Markdown."""
    made = {"README.md": _index(root)}
    for name, module in MODULES:
        made[name] = _module_page(root, module)
    made["torch_ops.md"] = _schemas(root)
    return made


def exported(root, module):
    """``__all__`` of a package of python/."""
    path = root / "python" / module.replace(".", "/") / "__init__.py"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", None) == "__all__" for t in node.targets):
            return ast.literal_eval(node.value)
    raise ValueError(f"{path} has no __all__")


def _index(root):
    lines = ["# API reference", "", "| module | public names |", "|---|---|"]
    modules = dict((module, page) for page, module in MODULES)
    for module, page in modules.items():
        names = [name for name in exported(root, module) if f"{module}.{name}" not in modules]
        links = ", ".join(f"[{name}][{module}.{name}]" for name in names)
        lines.append(f"| [{module}]({page}) | {links} |")
    lines += [
        "",
        "[torch.ops.liger](torch_ops.md) lists the schemas of the ops underneath.",
        "[Errors](../docs/errors.md) gives the ranges of options, [derivatives](../docs/autograd.md) which of them",
        "can be differentiated, and [environment variables](../docs/environment.md) the settings.",
        "",
    ]
    return "\n".join(lines)


def _module_page(root, module):
    packages = {name for _, name in MODULES}
    lines = [
        f"# {module}",
        "",
        f"::: {module}",
        "    options: {members: false, show_root_heading: false}",
        "",
    ]
    for name in exported(root, module):
        if f"{module}.{name}" not in packages:
            lines += [f"::: {module}.{name}", ""]
    return "\n".join(lines)


def _schemas(root):
    """The schemas of csrc/declarations.cpp and csrc/library.cpp with their comments, in their order."""
    lines = [
        "# torch.ops.liger",
        "",
        "The schemas of the ops, as `csrc/library.cpp` registers them, with their comments. The public functions call",
        "these ops; code in TorchScript, `torch.export` or C++ calls them directly. A name that ends in an underscore",
        "writes arguments. An output that is not requested is an empty tensor.",
        "",
    ]
    comment = []
    for text in map(str.strip, _definitions(root)):
        found = _DEFINITION.search(text)
        if text.startswith("//"):
            comment.append(text.removeprefix("//").strip())
        elif found:
            schema = found[1].replace('\\"', '"')
            name = schema.partition("(")[0]
            lines += [f"### {name} {{ #torch.ops.liger.{name} }}", ""]
            if comment:
                lines += [f"`{' '.join(comment)}`", ""]
            lines += ["```text", _wrapped(schema), "```", ""]
            comment = []
        elif not text:
            comment = []
    return "\n".join(lines)


def _definitions(root):
    """The lines with the schemas."""
    for file, start in (("declarations", "all = {"), ("library", "STABLE_TORCH_LIBRARY(liger, m) {")):
        text = (root / f"csrc/{file}.cpp").read_text().partition(start)[2]
        yield from text.partition("\n}")[0].splitlines()


def _wrapped(schema):
    """One argument and one result per line, where a schema does not fit on one."""
    name, _, rest = schema.partition("(")
    arguments, _, results = rest.rpartition(") -> ")
    if len(schema) <= 100:
        return schema
    return f"{name}(\n    " + ",\n    ".join(_split(arguments)) + f"\n) -> {results}"


def _split(arguments):
    """Splits at commas outside parentheses and brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(arguments):
        depth += (c in "([") - (c in ")]")
        if c == "," and depth == 0:
            parts.append(arguments[start:i].strip())
            start = i + 1
    return [*parts, arguments[start:].strip()]
