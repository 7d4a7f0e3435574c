# SPDX-License-Identifier: BSD-3-Clause
"""The tests of this folder run with a stand-in, which has the part of a framework's interface that liger
uses, and where the framework is installed, also with it."""

import importlib
import importlib.util
import sys
import types

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def modules(contents):
    """{name: module} of {name: {attribute: value}}, with the packages above them."""
    found = {}
    for name, attributes in contents.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
        vars(found[name]).update(attributes)
    return found


def pytest_generate_tests(metafunc):
    own = [mark for mark in metafunc.definition.iter_markers("parametrize") if mark.args[0] == "integration"]
    if "integration" in metafunc.fixturenames and not own:
        installed = importlib.util.find_spec(metafunc.module.FRAMEWORK) is not None
        metafunc.parametrize("integration", ["stand-in"] + ["installed"] * installed, indirect=True)


@pytest.fixture
def integration(request, monkeypatch):
    """The module of liger.integrations for the ``FRAMEWORK`` of a test file, imported with the modules that
    its ``stand_in()`` returns, or with the framework."""
    framework = request.module.FRAMEWORK
    if request.param == "installed":
        pytest.importorskip(framework)
    else:
        for name, module in modules(request.module.stand_in()).items():
            monkeypatch.setitem(sys.modules, name, module)
    name = f"liger.integrations.{framework.removeprefix('nemo_')}"
    yield importlib.import_module(name)
    # The next test may import it with the other one.
    del sys.modules[name]


@pytest.fixture
def process_group():
    """The mesh of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
