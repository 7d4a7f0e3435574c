"""The packages of liger form layers: a package imports from those below it only, and no import is circular.

Imports within functions count as well. ``liger.backend``
loads the modules of ``liger.triton_kernels`` by names that the ops give it, which is no import of that package.
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Each package or module of liger, with those that it may import from.
BELOW = {
    "_core": set(),
    "ops": {"_core"},
    "_tiled": {"_core"},
    "triton_kernels": {"_core", "ops"},
    "losses": {"_core", "ops"},
    "distributed": {"_core", "ops"},
    "nn": {"_core", "ops", "_tiled", "distributed"},
    "transformers": {"_core", "ops", "_tiled", "distributed"},
    "trl": {"_core", "ops", "losses", "transformers"},
    "compat": {"_core", "_tiled", "ops", "losses", "nn", "distributed", "transformers", "trl"},
}
# These may import everything that does not import them; "" is liger/__init__.py.
TOP = {"", "benchmarks", "cli"}


def sources():
    """Each module of liger and the path of its source."""
    found = {}
    for folder, prefix in (
        (ROOT / "python/liger", ("liger",)),
        (ROOT / "triton_kernels", ("liger", "triton_kernels")),
    ):
        for path in folder.rglob("*.py"):
            parts = (*prefix, *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


SOURCES = sources()


def package_of(module):
    """The package below liger. ``liger.backend`` is the public module of ``_core``."""
    name = module.partition(".")[2].partition(".")[0]
    return "_core" if name == "backend" else name


def imported_by(module):
    """The modules of liger that a module imports."""
    path, found = SOURCES[module], set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: 1 - node.level or None] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            names = (f"{source}.{alias.name}" for alias in node.names)
            found.update(name if name in SOURCES else source for name in names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
            found.update(a.value for a in node.args if isinstance(a, ast.Constant))
    found = {name for name in found if name.split(".")[0] == "liger"} - {module}
    assert found <= set(SOURCES), (module, found - set(SOURCES))
    return found


IMPORTS = {module: imported_by(module) for module in SOURCES}


def imports_between_packages():
    between = {package_of(module): set() for module in SOURCES}
    for module, imported in IMPORTS.items():
        between[package_of(module)].update(map(package_of, imported))
    return {package: imported - {package} for package, imported in between.items()}


def test_imports_are_followed():
    assert "liger._core.declared" in IMPORTS["liger.ops.rms_norm"]
    assert "liger.ops.tiled_mlp" in IMPORTS["liger.nn.tiled_mlp"]
    assert "liger._core.dtensor_rows" in IMPORTS["liger._core.dtensor"]
    assert "liger._core.gated" in IMPORTS["liger.triton_kernels.geglu"]
    assert "liger.distributed._classes_in_shards" in IMPORTS["liger.distributed"]


def test_every_package_has_a_layer():
    assert {package_of(module) for module in SOURCES} - TOP == set(BELOW)


@pytest.mark.parametrize("package", BELOW)
def test_a_package_imports_from_those_below_it_only(package):
    wrong = {
        f"{module} imports {name}"
        for module, imported in IMPORTS.items()
        for name in imported
        if package_of(module) == package and package_of(name) not in BELOW[package] | {package}
    }
    assert not wrong


@pytest.mark.parametrize("graph", [IMPORTS, imports_between_packages()], ids=["modules", "packages"])
def test_no_import_is_circular(graph):
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
