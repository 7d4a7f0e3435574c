# SPDX-License-Identifier: BSD-3-Clause
"""What ``import liger.compat`` does to the import system, in processes of their own."""

import importlib.util
import json
import os
from pathlib import Path

import forked_python
import pytest

ROOT = Path(__file__).parents[2]
DISTRIBUTION = ROOT / "compat"


# Its sitecustomize.py hides an installed liger-kernel.
HIDING = ROOT / "tests/support/processes/without_liger_kernel"


def another_is_installed():
    """True if a liger_kernel of another project is installed; it must not decide what these tests see."""
    spec = importlib.util.find_spec("liger_kernel")
    return (
        spec is not None and spec.origin is not None and not Path(spec.origin).with_name("LIGER_OPS").exists()
    )


# When this file is imported, conftest.py has uninstalled liger.compat.
INSTALLED = another_is_installed()


def python(*arguments, path=(), hiding=INSTALLED, **environment):
    """Runs this interpreter; returns (exit status, stdout, stderr).

    ``path``: folders in front of PYTHONPATH. ``hiding``: a liger_kernel in any other folder is not found.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "LIGER_COMPAT_OVERRIDE"}
    folders = [*map(str, path), *([str(HIDING)] if hiding else [])]
    inherited["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    inherited["VISIBLE_LIGER_KERNEL"] = os.pathsep.join(map(str, path))
    done = forked_python.python(*arguments, environment=inherited | environment)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def other(tmp_path):
    """A folder with another package named liger_kernel, and its metadata."""
    package = tmp_path / "site" / "liger_kernel"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("AUTHOR = 'another'\n")
    metadata = tmp_path / "site" / "liger_kernel-0.7.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: liger_kernel\nVersion: 0.7.0\n")
    return tmp_path / "site"


def test_without_the_import_there_is_no_liger_kernel():
    status, _, errors = python("-c", "import liger, liger_kernel")
    assert status != 0 and "No module named 'liger_kernel'" in errors


def test_an_installed_liger_kernel_can_be_hidden(other):
    """The other tests of this file rely on it where another liger_kernel is installed."""
    code = """
import importlib.metadata, importlib.util
print(importlib.util.find_spec("liger_kernel") is not None)
print([d.version for d in importlib.metadata.distributions() if d.metadata["Name"].startswith("liger_k")])
print([d.version for d in importlib.metadata.distributions(name="liger-kernel")])
"""
    hidden, seen = "False\n[]\n[]\n", "True\n['0.7.0']\n['0.7.0']\n"
    path = os.pathsep.join([str(HIDING), str(other)])
    for visible, expected in (("", hidden), (str(other), seen)):
        status, output, errors = python("-c", code, PYTHONPATH=path, VISIBLE_LIGER_KERNEL=visible)
        assert (status, output) == (0, expected), errors
    # A finder of an editable installation, which a .pth file or an earlier sitecustomize.py has added.
    code = "import importlib.util; print(importlib.util.find_spec('liger_kernel'))"
    editable = (
        "import importlib.util, runpy, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        file = {str(other / 'liger_kernel' / '__init__.py')!r}\n"
        "        return importlib.util.spec_from_file_location(name, file) if name == 'liger_kernel' else None\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    hide = f"runpy.run_path({str(HIDING / 'sitecustomize.py')!r})\n"
    assert python("-c", f"{editable}{code}")[1].startswith("ModuleSpec(")
    status, output, errors = python("-c", f"{editable}{hide}{code}")
    assert (status, output) == (0, "None\n"), errors


def test_the_import_brings_modules_and_metadata():
    code = """
import importlib.metadata, importlib.util, json, sys
import liger
before = set(sys.modules)  # The triton backend, where it is the choice, imports triton with liger.
import liger.compat
found = importlib.util.find_spec("liger_kernel") is not None
import liger_kernel, liger_kernel.transformers, liger_kernel.ops.utils
print(json.dumps({
    "found": found, "version": importlib.metadata.version("liger_kernel"), "attribute": liger_kernel.__version__,
    "by_package": importlib.metadata.packages_distributions().get("liger_kernel"),
    "new": sorted({"transformers", "triton"} & (sys.modules.keys() - before)),
}))
"""
    status, output, errors = python("-c", code)
    assert status == 0, errors
    assert json.loads(output) == {
        "found": True, "version": "0.8.5", "attribute": "0.8.5", "by_package": ["liger-kernel"],
        "new": [],
    }  # fmt: skip


@pytest.mark.slow
def test_an_installed_liger_kernel_is_not_replaced(other):
    status, _, errors = python("-c", "import liger.compat", path=[other])
    assert status != 0
    assert f"a liger_kernel is installed in {other / 'liger_kernel'}" in errors
    assert "LIGER_COMPAT_OVERRIDE=1" in errors
    code = "import liger, liger_kernel; print(liger_kernel.AUTHOR)"
    assert python("-c", code, path=[other])[1] == "another\n"


@pytest.mark.slow
def test_an_installed_liger_kernel_is_replaced_on_request(other):
    code = (
        "import liger.compat, liger_kernel; print(liger_kernel.__version__, hasattr(liger_kernel, 'AUTHOR'))"
    )
    status, output, errors = python("-c", code, path=[other], LIGER_COMPAT_OVERRIDE="1")
    assert (status, output) == (0, "0.8.5 False\n"), errors
    code = "import liger_kernel, liger.compat"
    status, _, errors = python("-c", code, path=[other], LIGER_COMPAT_OVERRIDE="1")
    assert status != 0 and "is imported already; import liger.compat before it" in errors


def test_an_invalid_variable_is_an_error():
    """Also where there is nothing to replace."""
    status, _, errors = python("-c", "import liger.compat", LIGER_COMPAT_OVERRIDE="yes")
    assert status != 0 and "LIGER_COMPAT_OVERRIDE: expected 0 or 1, got 'yes'" in errors


def test_uninstall(other):
    code = """
import sys
import liger.compat
import liger_kernel.ops
liger.compat.uninstall()
liger.compat.uninstall()
assert not [name for name in sys.modules if name.startswith("liger_kernel")]
import liger_kernel
assert liger_kernel.AUTHOR == "another"
"""
    status, _, errors = python("-c", code, path=[other], LIGER_COMPAT_OVERRIDE="1")
    assert status == 0, errors


def test_a_folder_of_that_name_is_no_package(tmp_path):
    (tmp_path / "liger_kernel").mkdir()
    status, output, errors = python(
        "-c", "import liger.compat, liger_kernel; print(liger_kernel.__version__)", path=[tmp_path]
    )
    assert (status, output) == (0, "0.8.5\n"), errors


def test_running_a_script(tmp_path):
    (tmp_path / "helper.py").write_text("VALUE = 7\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, liger_kernel, helper\n"
        "from liger_kernel.ops import LigerRMSNormFunction\n"
        "if __name__ == '__main__':\n"
        "    print(sys.argv[1:], helper.VALUE)\n"
        "    sys.exit(3)\n"
    )
    status, output, errors = python("-m", "liger.compat", str(script), "--steps", "2")
    assert (status, output) == (3, "['--steps', '2'] 7\n"), errors
    status, output, errors = python("-m", "liger.compat", "-m", "train", "a", path=[tmp_path])
    assert (status, output) == (3, "['a'] 7\n"), errors


def test_running_nothing(tmp_path):
    assert "usage: python -m liger.compat" in python("-m", "liger.compat")[2]
    assert "usage: python -m liger.compat" in python("-m", "liger.compat", "--help")[1]
    missing = str(tmp_path / "missing.py")
    status, _, errors = python("-m", "liger.compat", missing)
    assert status != 0 and f"there is no file {missing}" in errors


@pytest.mark.slow
def test_the_distribution_has_the_same_names():
    code = """
import liger_kernel.transformers
import liger_kernel.transformers.rms_norm as module
import liger.compat
import liger.compat.layers.norms
assert module.LigerRMSNorm is liger.compat.layers.norms.LigerRMSNorm is liger_kernel.transformers.LigerRMSNorm
print(liger_kernel.__file__, liger_kernel.__version__)
"""
    expected = f"{DISTRIBUTION / 'liger_kernel' / '__init__.py'} 0.8.5\n"
    status, output, errors = python("-c", code, path=[DISTRIBUTION])
    assert (status, output) == (0, expected), errors
    # The other order: the distribution is no other liger_kernel.
    status, _, errors = python("-c", f"import liger.compat\n{code}", path=[DISTRIBUTION])
    assert status == 0, errors


@pytest.mark.packaging
@pytest.mark.slow
def test_the_distribution_builds(tmp_path):
    pytest.importorskip("setuptools", "77")
    status, output, errors = python(
        "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(tmp_path), str(DISTRIBUTION)
    )
    assert status == 0, output + errors
    wheel = next(tmp_path.glob("liger_kernel-0.8.5+liger.ops-py3-none-any.whl"))
    code = (
        "import importlib.metadata, liger_kernel\n"
        "from transformers.utils import is_liger_kernel_available\n"
        "assert is_liger_kernel_available()\n"
        "from liger_kernel.transformers import apply_liger_kernel_to_llama\n"
        "print(importlib.metadata.version('liger_kernel'))\n"
    )
    pytest.importorskip("transformers")
    target = tmp_path / "site"
    status, output, errors = python("-m", "pip", "install", "--no-deps", "--target", str(target), str(wheel))
    assert status == 0, errors
    status, output, errors = python("-c", code, path=[target])
    assert (status, output) == (0, "0.8.5+liger.ops\n"), errors


@pytest.mark.parametrize("package", ["trl", "transformers", "triton"])
def test_star_imports_without_a_package(package):
    """Names that need it are left out, and one that is asked for says what it needs."""
    code = f"""
import sys
sys.modules[{package!r}] = None
import inspect, liger.compat
from liger.compat.names import MODULES
for module in MODULES:
    exec(f"from {{module}} import *")
    inspect.getmembers(sys.modules[module])
print(LigerCrossEntropyLoss.__name__)
names = dict(trl="transformers.trainer.LigerORPOTrainer", transformers="transformers.AutoLigerKernelForCausalLM",
             triton="ops.utils.torch_to_triton_dtype")
module, _, name = names[{package!r}].rpartition(".")
exec(f"from liger_kernel.{{module}} import {{name}}")
"""
    status, output, errors = python("-c", code)
    assert (status, output) == (1, "LigerCrossEntropyLoss\n"), errors
    assert f'needs {package}, which is not installed: pip install "liger-ops[{package}]"' in errors


def test_the_star_import_of_liger_kernel_transformers():
    """It has the functions with an underscore that liger_kernel lists, and does not import TRL. The imports
    before it, of liger and of liger.compat, do not import transformers."""
    pytest.importorskip("transformers")
    code = """
import sys, liger, liger.compat
assert "transformers" not in sys.modules
assert liger.patch is liger.transformers.patch
from liger_kernel.transformers import *
print(_apply_liger_kernel.__name__, _apply_liger_kernel_to_instance.__name__, "trl" in sys.modules)
"""
    status, output, errors = python("-c", code)
    assert status == 0 and output == "_apply_liger_kernel _apply_liger_kernel_to_instance False\n", errors
