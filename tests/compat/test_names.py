# SPDX-License-Identifier: BSD-3-Clause
"""Every name of the table resolves, and every callable gives the numbers of plain torch, with their
gradients."""

import importlib
import inspect
import pickle

import forked_python
import pytest
import torch
from compat_comparisons import CASES, differentiable, gradients

from liger.compat.names import MODULES, loaded
from liger.compat.patching.architectures import FUNCTION_NAMES

pytest.importorskip("transformers")

# Tested in other files of this folder, by their effect on a model, on a process group or on a script.
ELSEWHERE = {"patching.functions", "patching.auto", "configure", "fsdp", "patching.orpo_trainer", "utils"}
# (module of liger.compat, name) -> what the table has for the name.
SOURCES = {(s.partition(":")[0], name): s for names in MODULES.values() for name, s in names.items()}
OUTPUT_CLASSES = {"LigerCausalLMOutputWithPast", "LigerMoeCausalLMOutputWithPast"}


@pytest.mark.parametrize("module", MODULES)
def test_every_name_resolves(module):
    found = importlib.import_module(module)
    for name, source in MODULES[module].items():
        if source == "patching.orpo_trainer":
            pytest.importorskip("trl")
        if name == "torch_to_triton_dtype":
            pytest.importorskip("triton")
        assert getattr(found, name) is not None
        assert name in dir(found)


def test_every_class_and_function_can_be_pickled(tmp_path):
    """Another process, which need not import liger_kernel, unpickles what the table has there."""
    pickled, found = [], []
    for (module, name), source in SOURCES.items():
        try:
            value = loaded(source, name)
        except ImportError:
            continue  # Of a package that is not installed.
        if inspect.isclass(value) or inspect.isfunction(value):
            pickled.append(pickle.dumps(value))
            assert pickle.loads(pickled[-1]) is value, (module, name)
            found.append((source, name))
    assert len(found) > 100
    (tmp_path / "pickled").write_bytes(pickle.dumps((pickled, found)))
    program = (
        "import pickle; pickled, found = pickle.load(open('pickled', 'rb')); "
        "values = [pickle.loads(each) for each in pickled]; "
        "from liger.compat.names import loaded; assert values == [loaded(*each) for each in found]"
    )
    assert forked_python.python("-c", program, cwd=tmp_path).returncode == 0


class Inherited(loaded("layers.rows:_apply_rms_norm", "LigerRMSNormFunction")):
    pass


def test_a_class_that_inherits_can_be_pickled():
    assert pickle.loads(pickle.dumps(Inherited)) is Inherited
    assert type(pickle.loads(pickle.dumps(Inherited()))) is Inherited


def test_every_callable_has_a_comparison():
    numeric = {pair for pair in SOURCES if pair[0] not in ELSEWHERE and pair[1] not in OUTPUT_CLASSES}
    assert numeric == set(CASES)


@pytest.mark.parametrize("source, name", CASES, ids=lambda value: value)
def test_numbers_and_gradients_are_those_of_torch(source, name):
    case = CASES[source, name]
    before = [t.detach().clone() for t in case.tensors]
    actual = case.ours(loaded(SOURCES[source, name], name), *case.tensors)
    expected = case.formula(*case.tensors)
    ours, theirs = differentiable(actual), differentiable(expected)
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, check_dtype=not b.is_floating_point())
    for a, b in zip(gradients(ours, case.tensors), gradients(theirs, case.tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for tensor, copy in zip(case.tensors, before, strict=True):
        assert torch.equal(tensor, copy)


def test_the_classes_of_the_root_are_those_of_the_modules():
    """``from liger_kernel.transformers import X`` and ``from liger_kernel.transformers.x import X`` are one
    class."""
    from liger_kernel.transformers import LigerRMSNorm, functional
    from liger_kernel.transformers.functional import liger_cross_entropy
    from liger_kernel.transformers.rms_norm import LigerRMSNorm as same

    assert LigerRMSNorm is same
    assert functional.liger_cross_entropy is liger_cross_entropy
    import liger_kernel.transformers

    for name in FUNCTION_NAMES:
        assert callable(getattr(liger_kernel.transformers, name))


def test_functional_has_the_keywords_of_liger_kernel():
    from liger_kernel import functional

    x, target = torch.randn(3, 4), torch.tensor([1, 0, 2])
    loss, *_ = functional.cross_entropy(input=x, target=target)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x, target))
    torch.testing.assert_close(
        functional.rms_norm(x=x, weight=torch.ones(4), in_place=False), torch.rms_norm(x, (4,), eps=1e-6)
    )
    log_probs = x.log_softmax(-1)
    assert functional.jsd(_input=log_probs, target=log_probs).abs() < 1e-6


def test_a_name_that_does_not_exist():
    import liger_kernel.ops

    with pytest.raises(AttributeError, match=r"liger_kernel.ops has no 'x', only .*LigerRMSNormFunction"):
        liger_kernel.ops.x  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"liger_kernel has no 'nothing'.*docs/guides/compat\.md"):
        import liger_kernel.nothing
