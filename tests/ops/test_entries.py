# SPDX-License-Identifier: BSD-3-Clause
"""Public functions enter C++ for plain eager calls, and return and raise what their Python does.

tests/ops/test_fast_path.py has the modes, transforms, tracers and subclasses that must see the op.
"""

import inspect
import sys

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fw
from packages import ROOT, call
from public_ops import CASES, as_tuple, inputs_of, results
from torch.overrides import BaseTorchFunctionMode

import liger
from liger._core.op import nodes
from liger._core.runtime import load

if load.C is None:
    pytest.skip(f"liger._C is {load.C_REASON}", allow_module_level=True)

ENTERED = sorted(nodes._FORMULAS)


@pytest.fixture(params=ENTERED)
def name(request):
    return request.param


def enters(name, function, *args):
    """True if a call does not run the Python of the public function of this name."""
    code, frames = inspect.unwrap(getattr(liger, name)).__code__, []

    def see(frame, event, _argument):
        if event == "call" and frame.f_code is code:
            frames.append(frame)

    sys.setprofile(see)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return not frames


def test_plain_calls_enter(name, device):
    function, inputs = CASES[name].function, inputs_of(name, device)
    plain = [t.detach() for t in inputs]
    assert enters(name, function, *inputs) and enters(name, function, *plain)
    assert enters(name, function, torch.nn.Parameter(plain[0]), *inputs[1:])
    with torch.no_grad():
        assert enters(name, function, *inputs)
    with torch.autocast(device.type, torch.bfloat16):
        assert enters(name, function, *inputs) or name == "softmax"
    with BaseTorchFunctionMode():
        assert not enters(name, function, *inputs)
    assert not enters(name, function, plain[0].as_subclass(type("Own", (torch.Tensor,), {})), *plain[1:])


def test_softmax_casts_in_python(device):
    torch.set_autocast_enabled("cuda", True)
    try:
        assert not enters("softmax", liger.softmax, *inputs_of("softmax", device))
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_same_bits_as_python(name, device):
    inputs = inputs_of(name, device)
    entered = results(CASES[name].function, inputs)
    with BaseTorchFunctionMode():
        python = results(CASES[name].function, inputs)
    for a, b in zip(entered, python, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() and a.requires_grad == b.requires_grad


def options_of(name):
    """For every option of a function, values that are not its default."""
    values = {
        "eps": (0.5, 1, np.float64(0.5)),
        "offset": (1.0, 1),
        "casting_mode": ("gemma", "".join(("no", "ne"))),
        "group_size": (8,),
        "norm_before_gate": (False,),
        "activation": ("sigmoid",),
        "approximate": ("tanh",),
        "num_groups": (2,),
        "unsqueeze_dim": (2,),
        "interleaved": (True,),
        "inplace": (False, True),
        "ignore_index": (1, -1),
        "label_smoothing": (0.25, 1),
        "lse_square_scale": (0.5, 2),
        "softcap": (3.0,),
        "reduction": ("sum", "none"),
        "metrics": (("logprobs",), []),
        "denominator": (4.0,),
    }
    parameters = inspect.signature(getattr(liger, name)).parameters
    return [(option, value) for option in parameters if option in values for value in values[option]]


def bound(name, device, **options):
    """A call with these options and the tensors of the case, as (tensors by name, options)."""
    parameters = inspect.signature(getattr(liger, name)).parameters
    required = {"num_groups": 4} if "num_groups" in parameters else {}
    tensors = [p for p in parameters if p not in dict(options_of(name))]
    given = dict(zip(tensors, inputs_of(name, device), strict=False))
    given |= required | options
    return {p: given.pop(p) for p in parameters if p in given} | given


def outcome(function, keywords):
    """The results of a call and its gradients, or the type and the text of what it raises."""
    leaves = {
        k: v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v
        for k, v in keywords.items()
    }
    # Not leaves: inplace=True refuses those.
    given = {k: v * 1 if isinstance(v, torch.Tensor) and v.requires_grad else v for k, v in leaves.items()}
    try:
        outputs = [o for o in as_tuple(function(**given)) if o is not None]
    except Exception as error:
        return type(error), str(error).partition("\n")[0]
    if any(o.requires_grad for o in outputs):
        sum(o.sum() for o in outputs if o.requires_grad).backward()
    return *outputs, *(v.grad for v in leaves.values() if isinstance(v, torch.Tensor) and v.requires_grad)


def assert_as_python(name, keywords):
    function = getattr(liger, name)
    entered = outcome(function, keywords)
    with BaseTorchFunctionMode():
        python = outcome(function, keywords)
    assert len(entered) == len(python)
    for a, b in zip(entered, python, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, check_stride=True)
        else:
            assert a == b
    return entered


def test_every_option(name, device):
    for option, value in options_of(name):
        outputs = assert_as_python(name, bound(name, device, **{option: value}))
        # The tables of the case have the tokens of the other order, and its target has rows to ignore.
        if option not in ("unsqueeze_dim", "ignore_index"):
            assert isinstance(outputs[0], torch.Tensor), (option, value, outputs)


def test_bad_input(name, device):
    first, *others = bound(name, device)
    for option, value in [
        *((option, value) for option, _ in options_of(name) for value in (None, "wrong", 2**70, [1])),
        *(
            (tensor, value)
            for tensor in (first, *others)
            for value in (None, 1, torch.ones(3, device=device))
        ),
        *((first, inputs_of(name, device)[0].to(dtype)) for dtype in (torch.int64, torch.complex64)),
        ("unknown", 1),
    ]:
        assert_as_python(name, bound(name, device, **{option: value}))
    x = inputs_of(name, device)[0].detach()
    for other in (
        x.to_sparse(),
        torch.nested.nested_tensor([x, x]),
        torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    ):
        assert_as_python(name, bound(name, device, **{first: other}))
    missing = bound(name, device)
    del missing[first]
    assert assert_as_python(name, missing)[0] is TypeError


def test_tangents_of_the_upstream_gradient(name, device):
    """Where autograd has them, the results of a backward have them, too."""
    inputs = inputs_of(name, device)

    def tangents():
        output = next(o for o in as_tuple(CASES[name].function(*inputs)) if o is not None)
        torch.manual_seed(1)
        with fw.dual_level():
            upstream = fw.make_dual(torch.randn_like(output), torch.randn_like(output))
            try:
                grads = torch.autograd.grad(output, inputs[0], upstream)
            except NotImplementedError:
                return None
            return fw.unpack_dual(grads[0]).tangent

    entered = tangents()
    with BaseTorchFunctionMode():
        python = tangents()
    assert (entered is None) == (python is None)
    if python is not None:
        torch.testing.assert_close(entered, python)


_WARN_AND_RAISE = """
import torch, warnings, liger

def pack(tensor):
    torch._C._jit_set_nvfuser_enabled(True)  # warns in C++, which the call of liger._C reports at its end
    raise KeyError("of the hook")

torch.set_warn_always(True)
warnings.simplefilter("error")
try:
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        liger.relu_squared(torch.randn(4, 8, requires_grad=True))
except KeyError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch._C, "_jit_set_nvfuser_enabled"), reason="no function that warns so")
def test_an_error_after_a_warning_that_is_an_error(tmp_path):
    code, output = call(sys.executable, "-c", _WARN_AND_RAISE, cwd=tmp_path, check=False)
    assert code == 0 and "of the hook" in output, output


def test_by_position(name, device):
    function, keywords = getattr(liger, name), bound(name, device)
    a, b = as_tuple(function(*keywords.values())), as_tuple(function(**keywords))
    assert all(map(torch.equal, a, b))
    with pytest.raises(TypeError):
        function(*keywords.values(), *range(30))


def test_keywords_that_are_not_interned(device):
    x = torch.randn(2, 16, device=device)
    expected = liger.rms_norm(x, eps=0.5)
    assert torch.equal(liger.rms_norm(x, **{"".join(("e", "ps")): 0.5}), expected)


# --- cross_entropy ------------------------------------------------------------------------------------------


def logits_and_target(device, *shape):
    logits = torch.randn(*shape, device=device)
    target = torch.randint(shape[-1], shape[:-1], device=device)
    if target.numel():
        target.view(-1)[0] = -100
    return logits.requires_grad_(), target


@pytest.mark.parametrize("shape", [(5, 11), (2, 3, 11), (2, 1, 3, 11), (0, 11), (2, 0, 11)], ids=str)
def test_shapes_of_logits(device, shape):
    logits, target = logits_and_target(device, *shape)
    for options in (
        {},
        {"token_weight": torch.rand(shape[:-1], device=device)},
        {"ce_weight": torch.rand(11, device=device), "reduction": "sum"},
        {"denominator": torch.tensor(3.0, device=device)},
    ):
        assert_as_python("cross_entropy", {"logits": logits, "target": target, **options})
    if target.numel():
        assert enters("cross_entropy", liger.cross_entropy, logits, target)
        assert enters("cross_entropy", liger.cross_entropy, logits, target.int())


def test_logits_that_do_not_enter(device):
    logits, target = logits_and_target(device, 2, 3, 11)
    for changed, of_target in [
        (logits.transpose(0, 1), target.t()),
        (logits.half(), target),
        (logits[0, 0], target[0, 0]),
        (logits, target[:1]),
    ]:
        assert_as_python("cross_entropy", {"logits": changed.detach().requires_grad_(), "target": of_target})
    needs_grad = torch.rand(11, device=device, requires_grad=True)
    outputs = assert_as_python("cross_entropy", {"logits": logits, "target": target, "ce_weight": needs_grad})
    assert (
        outputs[1]
        == "cross_entropy: ce_weight requires grad, but cross_entropy has no gradient for it: detach it"
    )
    for option in (
        {"label_smoothing": 1.5},
        {"lse_square_scale": -1.0},
        {"softcap": 0.0},
        {"ignore_index": 2**40},
    ):
        assert_as_python("cross_entropy", {"logits": logits, "target": target, **option})


@pytest.mark.parametrize("options", [{}, {"retain_graph": True}, {"create_graph": True}], ids=str)
def test_backward_of_cross_entropy(device, options):
    logits, target = logits_and_target(device, 5, 11)

    def grads():
        loss = liger.cross_entropy(logits * 1, target)
        (first,) = torch.autograd.grad(loss, logits, torch.tensor(3.0, device=device), **options)
        kept = first.clone()
        try:
            torch.autograd.grad(loss, logits, torch.tensor(2.0, device=device))
            again = None
        except RuntimeError as error:
            again = str(error).partition("\n")[0]
        try:
            torch.autograd.grad(kept.sum(), logits)
            second = None
        except RuntimeError as error:
            second = str(error).partition("\n")[0]
        return kept.detach(), torch.equal(first, kept), kept.requires_grad, again, second

    entered = grads()
    with BaseTorchFunctionMode():
        python = grads()
    assert torch.equal(entered[0], python[0]) and entered[1:] == python[1:]
    assert entered[1]


def test_batches_of_gradients_of_cross_entropy(device):
    logits, target = logits_and_target(device, 5, 11)
    upstream = torch.tensor([1.0, 2.0], device=device)
    loss = liger.cross_entropy(logits, target)
    (both,) = torch.autograd.grad(loss, logits, upstream, is_grads_batched=True, retain_graph=True)
    (one,) = torch.autograd.grad(loss, logits)
    assert torch.equal(both[0], one) and torch.allclose(both[1], 2 * one)


def test_saved_gradient_goes_through_hooks(device):
    logits, target = logits_and_target(device, 5, 11)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t.clone()) or t, lambda t: t.clone()
    ):
        loss = liger.cross_entropy(logits, target)
    (grad,) = torch.autograd.grad(loss, logits)
    assert len(packed) == 1 and torch.equal(packed[0], grad)


# --- without liger._C ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_python_alone_serves_the_same_calls():
    """test_fast_path.py compares it with the ops, which the nodes in C++ are compared with as well."""
    tests = ROOT / "tests/ops/test_fast_path.py"
    how = ("-q", "-p", "no:cacheprovider", "-k", "same_bits or taken_in_eager or hooks or outlives")
    assert " passed" in call(sys.executable, "-m", "pytest", tests, *how, LIGER_AUTOGRAD="python")[1]
