# SPDX-License-Identifier: BSD-3-Clause
"""Every public callable has annotations for all parameters and for its result, as py.typed promises."""

import importlib
import inspect
import re
import subprocess
import sys

import pytest

import liger
from liger._core.op import types

# liger.trl and liger.transformers need packages that may be missing.
MODULES = [*("liger", "liger.nn", "liger.distributed", "liger.losses", "liger.transformers", "liger.trl")]


def imported(module):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"{module} does not import: {error}")


def public_functions(module):
    """(qualified name, function) of the public functions of a module, and of the methods by which its classes
    are used. Methods that another package defines are left out."""
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


USER_CODE = """
import torch
import liger

model = torch.nn.Linear(2, 2)
reveal_type(liger.patch(model, rope=False))
reveal_type(liger.unpatch(model))
reveal_type(liger.nn.RMSNorm(16))
reveal_type(liger.losses.FusedLinearKTOLoss(softcap=30.0, metrics=("entropy",)))
reveal_type(liger.transformers.patch_report(model))
reveal_type(liger.rms_norm(torch.ones(3), None))
head = torch.ones(2, 4), torch.ones(8, 4), torch.ones(2).long()
reveal_type(liger.fused_linear_ce(*head, reduction="sum"))
reveal_type(liger.fused_linear_ce(*head, metrics=("z_loss",), softcap=3.0))
reveal_type(liger.fused_linear_logprobs(*head, metrics=["entropy"]))
reveal_type(liger.cross_entropy(head[0], head[2], inplace=True))
liger.patch(model, rms_nrom=False)
liger.patch(model, rope="no")
liger.fused_linear_ce(*head, sofcap=3.0)
liger.fused_linear_logprobs(*head, metrics=("entrpy",))
liger.nn.LMHeadLoss(4, 8, sofcap=3.0)
liger.losses.FusedLinearLoss(temperatur=0.7)
liger.losses.FusedLinearDPOLoss(beta=0.1, memory_budget="512 MiB")
liger.losses.FusedLinearPPOLoss(epsilon_low=0.1)
liger.losses.FusedLinearJSDLoss(metrics=("perplexity",))
"""
REVEALED = [
    "Linear", "Linear", "RMSNorm", "FusedLinearKTOLoss", "PatchReport", "Tensor", "Tensor", "CrossEntropyOutput",
    "LogProbs", "Tensor",
]  # fmt: skip
CHECKERS = {
    "mypy": ["mypy", "--follow-imports", "silent"],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}


@pytest.mark.parametrize("checker", [pytest.param("mypy", marks=pytest.mark.slow), "pyright"])
def test_a_type_checker_sees_lazy_names_and_options(checker, tmp_path):
    """Without an import of more than liger, as editors complete it."""
    pytest.importorskip(checker)
    (tmp_path / "user_code.py").write_text(USER_CODE)
    command = [sys.executable, "-m", *CHECKERS[checker], "user_code.py"]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    # mypy writes a NamedTuple as tuple[..., fallback=name].
    kind = r'(?:Revealed type is|Type of ".*" is) "(?:tuple\[.*fallback=)?([\w.]+)'
    revealed = re.findall(kind, output)
    assert [name.rpartition(".")[2] for name in revealed] == REVEALED, output
    lines = [int(line) for line in re.findall(r"user_code\.py:(\d+):[\d: ]*(?:- )?error", output)]
    wrong = [n for n, line in enumerate(USER_CODE.split("\n"), 1) if line.startswith("liger.")]
    assert sorted(set(lines)) == wrong, output


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (liger.cross_entropy, types.CrossEntropyOptions),
        (liger.fused_linear_ce, types.FusedCrossEntropyOptions),
        (liger.fused_linear_logprobs, types.LogProbOptions),
    ],
)
def test_the_types_of_options_have_their_names(function, options):
    parameters = inspect.signature(function).parameters.values()
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert options.__annotations__.keys() | {"metrics"} == keywords


def test_the_types_of_the_options_of_patch_have_their_names():
    from liger.transformers.patching.options import NAMES, PatchOptions

    assert tuple(PatchOptions.__annotations__) == NAMES
    shown = inspect.signature(importlib.import_module("liger.transformers").patch).parameters
    assert set(shown) == {"model", "verbose", *NAMES}


def test_the_types_of_the_options_of_losses_have_their_names():
    losses = importlib.import_module("liger.losses")

    def options(cls):
        parameters = inspect.signature(cls).parameters.values()
        return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]

    assert list(losses.LossOptions.__annotations__) == options(losses.FusedLinearLoss)
    assert list(losses.DistillationOptions.__annotations__) == options(losses.DistillationLoss)
    of_ppo = {"beta", "epsilon_low", "epsilon_high", "loss_type"}
    of_family = [name for name in options(losses.FusedLinearGRPOLoss) if name not in of_ppo]
    assert list(losses.PolicyOptions.__annotations__) == [*options(losses.FusedLinearLoss), *of_family]


def test_dir_lists_public_names_alone():
    liger = importlib.import_module("liger")
    lazy = {"losses", "nn", "patch", "transformers", "trl", "unpatch"}
    assert set(dir(liger)) == {*liger.__all__, "trl"} and lazy < set(dir(liger))
    for package in ("nn", "distributed", "transformers"):
        module = importlib.import_module(f"liger.{package}")
        assert dir(module) == sorted(module.__all__)
