# SPDX-License-Identifier: BSD-3-Clause
"""The pages of the API reference: every name of the ``__all__`` of each public module, and the schemas.

Modules are read as source text, so neither torch nor a build of liger is needed.
"""

from __future__ import annotations

import ast
import re

from declared_tables import ROOT, declarations

# Page -> (title, module, its names on this page; None: all that no other page has). Modules of liger that are
# listed in its __all__ have pages of their own.
PAGES = {
    "liger.md": ("liger: patching, backends", "liger", None),
    "liger_layers.md": (
        "liger: norms, activations, softmax",
        "liger",
        tuple(op for op, *_ in declarations((ROOT / "csrc/declarations.cpp").read_text())),
    ),
    "liger_rope.md": ("liger: rotary embeddings", "liger", ("rope", "qk_norm_rope", "mrope", "complex_rope")),
    "liger_losses.md": (
        "liger: losses and divergences",
        "liger",
        (
            "cross_entropy",
            "fused_linear_ce",
            "CrossEntropyOutput",
            "fused_linear_logprobs",
            "LogProbs",
            "kl_div",
            "jsd",
            "tvd",
            "fused_linear_kl_div",
            "fused_linear_jsd",
        ),
    ),
    "liger_mlp.md": ("liger: experts, tiled MLPs", "liger", ("grouped_experts", "tiled_mlp", "tiled")),
    "nn.md": ("liger.nn", "liger.nn", None),
    "losses.md": ("liger.losses: base classes", "liger.losses", None),
    "losses_preference.md": (
        "liger.losses: preference",
        "liger.losses",
        (
            "FusedLinearDPOLoss",
            "FusedLinearORPOLoss",
            "FusedLinearCPOLoss",
            "FusedLinearSimPOLoss",
            "FusedLinearKTOLoss",
            "PreferenceLoss",
            "PreferenceMetrics",
            "KTOMetrics",
        ),
    ),
    "losses_policy.md": (
        "liger.losses: policy",
        "liger.losses",
        ("FusedLinearGRPOLoss", "FusedLinearPPOLoss", "PolicyMetrics", "PolicyOptions"),
    ),
    "losses_distillation.md": (
        "liger.losses: distillation",
        "liger.losses",
        (
            "FusedLinearJSDLoss",
            "FusedLinearKLDivLoss",
            "FusedLinearCosineSimilarityLoss",
            "FusedLinearTopKLoss",
            "DistillationLoss",
            "DistillationMetrics",
            "DistillationOptions",
        ),
    ),
    "transformers.md": ("liger.transformers", "liger.transformers", None),
    "trl.md": ("liger.trl", "liger.trl", None),
    "distributed.md": ("liger.distributed", "liger.distributed", None),
    "compat.md": ("liger.compat", "liger.compat", None),
}
MODULES = {module for _, module, _ in PAGES.values()}
_DEFINITION = re.compile(r'"(\w+\((?:[^"\\]|\\.)*-> (?:[^"\\]|\\.)*)"')


def pages(root):
    """File name -> Markdown."""
    made = {"README.md": _index(root), "torch_ops.md": _schemas(root)}
    for file, (title, module, given) in PAGES.items():
        lines = [f"# {title}", ""]
        if given is None:
            lines += [f"::: {module}", "    options: {members: false, show_root_heading: false}", ""]
        for name in _names(root, module, given):
            lines += [f"::: {module}.{name}", ""]
        made[file] = "\n".join(lines)
    return made


def _names(root, module, given):
    """The names of a page: those given, or all exported ones that no other page has."""
    if given is not None:
        return given
    elsewhere = {name for _, other, names in PAGES.values() if other == module for name in names or ()}
    names = exported(root, module)
    return [name for name in names if name not in elsewhere and f"{module}.{name}" not in MODULES]


def exported(root, module):
    """``__all__`` of a package of python/."""
    path = root / "python" / module.replace(".", "/") / "__init__.py"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", None) == "__all__" for t in node.targets):
            return ast.literal_eval(node.value)
    raise ValueError(f"{path} has no __all__")


def _index(root):
    lines = ["# API reference", "", "| page | public names |", "|---|---|"]
    for file, (title, module, given) in PAGES.items():
        links = ", ".join(f"[{name}][{module}.{name}]" for name in _names(root, module, given))
        lines.append(f"| [{title}]({file}) | {links} |")
    lines += [
        "",
        "[torch.ops.liger](torch_ops.md) lists the schemas of the ops underneath.",
        "[Errors](../docs/reference/errors.md) gives the ranges of options,",
        "[derivatives](../docs/reference/autograd.md) which of them",
        "can be differentiated, and [environment variables](../docs/reference/environment.md) the settings.",
        "",
    ]
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
    if len(schema) <= 84:  # the width of the page
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
