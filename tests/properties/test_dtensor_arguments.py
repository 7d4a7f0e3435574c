# SPDX-License-Identifier: BSD-3-Clause
"""DTensors together with plain tensors, or on two meshes: whatever a public callable refuses, it says in the
caller's words."""

import inspect

import pytest
import torch
import torch.distributed as dist
from processes import needs_gloo
from public_callables import CASES, arguments, cases
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import liger

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def meshes():
    """A mesh of one process, and another one with two dimensions."""
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1, 1))
    if ours:
        dist.destroy_process_group()


def _distributed(tensor, mesh):
    made = distribute_tensor(tensor.detach(), mesh, [Replicate()] * mesh.ndim)
    return made.requires_grad_(tensor.requires_grad)


def _mixtures(given, meshes):
    """All are DTensors; each tensor alone is a DTensor; each alone is none; each is on another mesh."""
    names = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    yield "nothing", {name: _distributed(given[name], meshes[0]) for name in names}
    for odd in names if len(names) > 1 else ():
        yield odd, {odd: _distributed(given[odd], meshes[0])}
        others = {name: _distributed(given[name], meshes[0]) for name in names if name != odd}
        yield odd, others
        yield odd, others | {odd: _distributed(given[odd], meshes[1])}


def _callable(public):
    found = liger
    for part in public.split("."):
        found = getattr(found, part)
    return found


def _known_names(public, given):
    """Names of arguments, and of parameters of modules, which are ``gate_proj_weight`` for
    ``gate_proj.weight``."""
    found = _callable(public)
    function = found.forward if inspect.isclass(found) else found
    return {*inspect.signature(function).parameters, *given, "weight", "bias"} - {"self"}


# tiled: what the caller's function raises.
@pytest.mark.parametrize("name", [name for name in cases() if CASES[name].public != "tiled"])
def test_what_is_refused(name, meshes):
    public = CASES[name].public
    # A module that calls one function may appear under its name.
    functions = {public.rpartition(".")[2], *(liger.__all__ if public.startswith("nn.") else ())}
    given, wrong = arguments(name), []
    known = _known_names(public, given)
    for odd, changes in _mixtures(given, meshes):
        torch.manual_seed(0)
        what = {n: "DTensor" for n, v in changes.items() if isinstance(v, DTensor)}
        try:
            CASES[name].call(**given | changes)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            message = str(error)
            function, colon, rest = message.partition(": ")
            subject = rest.split(" ")[0].replace(".", "_")
            if not colon or function not in functions or subject not in known:
                wrong.append(f"{odd} {sorted(what)}: {type(error).__name__}: {message[:230]}")
    assert not wrong, "\n".join(wrong)
