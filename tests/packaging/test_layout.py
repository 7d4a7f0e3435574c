# SPDX-License-Identifier: BSD-3-Clause
"""The rooms of liger form layers: a module imports from the rooms below its own only, and no import is
circular.

A room is a folder of modules. Imports within functions count as well. ``liger._core.op.backend`` loads the
modules of ``liger.triton_kernels`` by names that the ops give it, which is no import of that package.
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Each room with the rooms that it may import from; a name without a dot is a package with all of its rooms.
BELOW = {
    "_core.runtime": set(),
    "_core.dtensor": set(),
    "_core.math": set(),
    "_core.op": {"_core.runtime", "_core.dtensor", "_core.math"},
    "_core.head": {"_core.runtime", "_core.dtensor", "_core.math", "_core.op"},
    "_core.modules": {"_core.dtensor"},
    "ops": {"_core"},
    "triton_kernels": {"_core", "ops"},
    "losses": {"_core", "ops"},
    "distributed.vocab": {"_core", "ops"},
    "distributed.rules": {"_core"},
    "distributed": {"_core", "distributed.vocab", "distributed.rules"},
    "nn": {"_core", "ops"},
    "transformers.recipe": {"_core"},
    "transformers.norms": {"_core", "ops", "transformers.recipe"},
    "transformers.lora": {"_core", "ops", "transformers.recipe"},
    "transformers.mlp": {"_core", "ops", "transformers.recipe", "transformers.lora"},
    "transformers.head": {"_core", "ops", "transformers.recipe"},
    "transformers.attention": {"_core", "ops", "transformers.recipe", "transformers.norms"},
    "transformers.checkpointing": {
        *("_core", "transformers.recipe", "transformers.norms", "transformers.mlp", "transformers.attention")
    },
    "transformers.patching": {"_core", "transformers"},
    "transformers": {"_core", "transformers"},
    "trl": {"_core", "ops", "losses", "transformers"},
    "compat": {"_core", "ops", "losses", "nn", "distributed", "transformers", "trl"},
    "integrations": {"_core", "ops", "nn", "transformers"},
}
# These may import everything that does not import them; "" is liger/__init__.py.
TOP = {"", "cli"}
# What fits a screen: the files and folders of any folder.
SCREEN = 24


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


def room_of(module):
    """The folder of a module below liger where BELOW lists it, else its package."""
    parts = module.split(".")[1:]
    room = ".".join(parts[:2])
    return room if room in BELOW else "".join(parts[:1])


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


def imports_between_rooms():
    between = {room_of(module): set() for module in SOURCES}
    for module, imported in IMPORTS.items():
        between[room_of(module)].update(map(room_of, imported))
    return {room: imported - {room} for room, imported in between.items()}


def test_imports_are_followed():
    assert "liger._core.op.registration" in IMPORTS["liger.ops.rms_norm"]
    assert "liger.ops.tiled_mlp.op" in IMPORTS["liger.nn.tiled_mlp"]
    assert "liger._core.dtensor.rows" in IMPORTS["liger._core.dtensor.inputs"]
    assert "liger.ops.gated" in IMPORTS["liger.triton_kernels.geglu"]
    assert "liger.distributed.vocab.dtensors" in IMPORTS["liger.distributed"]


def test_every_room_has_a_layer():
    assert {room_of(module) for module in SOURCES} - TOP - {"_core"} == set(BELOW)


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_from_those_below_it_only(room):
    allowed = BELOW[room] | {room}
    wrong = {
        f"{module} imports {name}"
        for module, imported in IMPORTS.items()
        for name in imported
        if room_of(module) == room and not {room_of(name), name.split(".")[1]} & allowed
    }
    assert not wrong


def test_a_folder_fits_a_screen():
    roots = [ROOT / name for name in ("python", "triton_kernels", "csrc", "tests", "docs")]
    suffixes = {".py", ".md", ".cpp", ".h", ".cu", ".cuh"}
    folders = {path.parent for root in roots for path in root.rglob("*.*") if path.suffix in suffixes}
    assert not [str(f) for f in folders if len([p for p in f.iterdir() if p.name != "__pycache__"]) > SCREEN]


@pytest.mark.parametrize("graph", [IMPORTS, imports_between_rooms()], ids=["modules", "rooms"])
def test_no_import_is_circular(graph):
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
