# SPDX-License-Identifier: BSD-3-Clause
"""Rotary embeddings: every form of transformers is recognised, and what differs from it is left."""

import importlib
import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")

from liger.transformers.attention import rotary  # noqa: E402
from liger.transformers.attention.rotary import Caller, Function  # noqa: E402
from liger.transformers.attention.rotations import ComplexRotation, Rotation  # noqa: E402
from liger.transformers.recipe.rename import uses_global  # noqa: E402

NAME = "apply_rotary_pos_emb"
# Model -> (function, form, tensors, shape of the tensors, shape of the tables, unsqueeze_dim).
FORMS = {
    "llama": (NAME, Rotation(), 2, (2, 4, 3, 8), (2, 3, 8), 1),
    "glm4": (NAME, Rotation("interleaved", "first_half"), 2, (2, 4, 3, 8), (2, 3, 4), 1),
    "helium": (NAME, Rotation("interleaved", "first_half"), 2, (2, 4, 3, 8), (2, 3, 8), 1),
    "ernie4_5": (NAME, Rotation("interleaved", "first_half"), 2, (2, 4, 3, 8), (2, 3, 8), 1),
    "cohere": (NAME, Rotation("interleaved"), 2, (2, 4, 3, 8), (2, 3, 8), 1),
    "gpt_oss": (NAME, Rotation("halves", "half"), 2, (2, 4, 3, 8), (2, 3, 4), 1),
    "nanochat": (NAME, Rotation(negated=True), 2, (2, 4, 3, 8), (2, 3, 8), 1),
    "deepseek_v3": (f"{NAME}_interleave", Rotation("split", "first_half"), 2, (2, 4, 3, 8), (2, 3, 8), 1),
    "deepseek_v4": (NAME, Rotation("interleaved", "half", tail=True), 1, (2, 4, 3, 8), (2, 3, 2), 1),
    "gemma3n": (NAME, Rotation(), 1, (2, 3, 4, 8), (2, 3, 8), 2),
    "gptj": (NAME, Rotation("interleaved", "half"), 1, (2, 3, 4, 8), (2, 3, 4), None),
    "phi3": (NAME, Rotation(), 2, (2, 4, 3, 8), (2, 3, 4), 1),
    "qwen2_vl": (f"{NAME}_vision", Rotation(), 2, (3, 4, 8), (3, 8), None),
    "qwen2_5_vl": (f"{NAME}_vision", Rotation(), 2, (3, 4, 8), (3, 8), None),
    "pixtral": (NAME, Rotation(), 2, (1, 4, 3, 8), (3, 8), 0),
    "llama4": ("apply_rotary_emb", ComplexRotation(), 2, (2, 3, 4, 8), (2, 3, 4), None),
    "llama4 vision": ("vision_apply_rotary_emb", ComplexRotation(), 2, (2, 3, 4, 8), (3, 4), None),
    "deepseek_v2": ("apply_rotary_emb", ComplexRotation(), 2, (2, 4, 3, 8), (2, 3, 4), None),
}


def function_of(model):
    package = model.split()[0]
    modeling = pytest.importorskip(f"transformers.models.{package}.modeling_{package}")
    return getattr(modeling, FORMS[model][0])


@pytest.mark.parametrize("model", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_forms_of_transformers(model, dtype, monkeypatch):
    original = function_of(model)
    _, form, tensors, shape, table, unsqueeze = FORMS[model]
    found = rotary.recognise(original)
    assert isinstance(found, Function)
    # DeepSeek's code reads the whole table in transformers 4.
    assert found.form == form or (model == "deepseek_v3" and found.form == Rotation("split"))
    form = found.form
    calls, replaced = [], rotary.rotary_function(original, found)
    rotate = type(form).rotate
    monkeypatch.setattr(type(form), "rotate", lambda *args: calls.append(rotate(*args)) or calls[-1])
    xs = [torch.randn(shape).to(dtype).requires_grad_() for _ in range(tensors)]
    names = [n for n in inspect.signature(original).parameters if n in ("cos", "sin") or "freqs" in n]
    tables = [
        torch.randn(table, dtype=torch.complex64) if "freqs" in n else torch.randn(table) for n in names
    ]
    tables = [t if t.is_complex() else t.to(dtype) for t in tables]
    options = {} if unsqueeze is None else {"unsqueeze_dim": unsqueeze}
    results = []
    for function in (replaced, original):
        outputs = function(*xs, *tables, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        upstream = [torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype) for y in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, xs, upstream)])
    assert len(calls) == 1 and calls[0] is not None
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def plain(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def clamped(q, k, cos, sin, unsqueeze_dim=1):
    return plain(q.clamp(-2e4, 2e4), k, cos, sin, unsqueeze_dim)


def normalised(q, k, cos, sin, unsqueeze_dim=1):
    length = (cos**2 + sin**2).sqrt()
    return plain(q, k, cos / length, sin / length, unsqueeze_dim)


def scaled_keys(q, k, cos, sin, unsqueeze_dim=1):
    q, k = plain(q, k, cos, sin, unsqueeze_dim)
    return q, k * 1.01


def queries_only(q, k, cos, sin, unsqueeze_dim=1):
    return plain(q, k, cos, sin, unsqueeze_dim)[0], k


def stopped(q, k, cos, sin, unsqueeze_dim=1):
    q, k = plain(q, k, cos, sin, unsqueeze_dim)
    return q, k.detach()


def suffix(q, k, cos, sin, unsqueeze_dim=1):
    tokens = cos.shape[-2]
    q_tail, k_tail = plain(q[..., -tokens:, :], k[..., -tokens:, :], cos, sin, unsqueeze_dim)
    return torch.cat((q[..., :-tokens, :], q_tail), -2), torch.cat((k[..., :-tokens, :], k_tail), -2)


def three_tensors(q, k, v, cos, sin, unsqueeze_dim=1):
    return *plain(q, k, cos, sin, unsqueeze_dim), v


@pytest.mark.parametrize(
    "function", [clamped, normalised, scaled_keys, queries_only, stopped, suffix, three_tensors]
)
def test_rotations_that_are_left(function):
    assert isinstance(rotary.recognise(plain), Function)
    assert isinstance(rotary.recognise(function), str)


def test_layouts_that_the_function_does_not_rotate_reach_it():
    """Without a dimension for heads, tables of (T, R) fit (B, H, T, D), and by chance (B, T, H, D) where H is
    T."""

    def broadcast(q, k, cos, sin):
        calls.append(1)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

    calls = []
    found = rotary.recognise(broadcast)
    assert found.unsqueeze == -3 and (4, 3) not in found.layouts
    replaced = rotary.rotary_function(broadcast, found)
    q, k, cos, sin = torch.randn(2, 3, 3, 8), torch.randn(2, 3, 3, 8), torch.randn(3, 8), torch.randn(3, 8)
    expected = broadcast(q, k, cos, sin)
    calls.clear()
    torch.testing.assert_close(replaced(q, k, cos, sin), expected)
    assert not calls
    tables = torch.randn(3, 3, 8), torch.randn(3, 3, 8)
    torch.testing.assert_close(replaced(q, k, *tables), broadcast(q, k, *tables))
    assert len(calls) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, cos, sin: (q, k, cos[:, :1], sin[:, :1]),
        lambda q, k, cos, sin: (q, k[:1], cos, sin),
        lambda q, k, cos, sin: (q, k.double(), cos, sin),
        lambda q, k, cos, sin: (q, k, cos.requires_grad_(), sin),
    ],
    ids=["one position for all tokens", "one row of keys", "two dtypes", "trained tables"],
)
def test_arguments_that_the_op_does_not_take_reach_the_function(change):
    replaced = rotary.rotary_function(plain, rotary.recognise(plain))
    args = change(
        torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 8), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    )
    if args[1].shape[0] == 1:
        args = args[0], args[1], args[2][:1], args[3][:1]
    torch.testing.assert_close(replaced(*args), plain(*args))


def test_an_unknown_argument_reaches_the_function():
    def shifted(q, k, cos, sin, unsqueeze_dim=1, shift=0):
        return plain(q, k, cos.roll(shift, -2), sin, unsqueeze_dim)

    replaced = rotary.rotary_function(shifted, rotary.recognise(shifted))
    args = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 8), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    for options in ({}, {"shift": 0}, {"shift": 1}):
        torch.testing.assert_close(replaced(*args, **options), shifted(*args, **options))


def test_functions_that_call_a_rotation():
    modeling = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    recipe = rotary.attention(modeling.Gemma4VisionAttention.__new__(modeling.Gemma4VisionAttention))
    ((name, found),) = recipe.calls
    assert name == "apply_multidimensional_rope" and isinstance(found, Caller)
    original, x = modeling.apply_multidimensional_rope, torch.randn(2, 3, 4, 8)
    cos, sin = torch.randn(2, 2, 3, 8)
    positions = torch.zeros(2, 3, 2, dtype=torch.int64)
    replaced = found.replacement(original)
    assert uses_global(replaced, f"_liger_{NAME}") is not None
    torch.testing.assert_close(replaced(x, cos, sin, positions), original(x, cos, sin, positions))


def test_both_rotations_of_one_attention_are_replaced():
    modeling = importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
    recipe = rotary.attention(modeling.DeepseekV3Attention.__new__(modeling.DeepseekV3Attention))
    assert [name for name, _ in recipe.calls] == [NAME, f"{NAME}_interleave"]


def test_a_rotation_that_kernels_has_made_a_module():
    """Such a module takes any arguments; the signature of its forward is the function's."""

    class Func(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return plain(*args, **kwargs)

    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    parameters += inspect.signature(plain).parameters.values()
    Func.forward.__signature__ = inspect.Signature(parameters)
    extensible = Func()

    class Attention(torch.nn.Module):
        def forward(self, q, k, cos, sin):
            return apply_rotary_pos_emb(q, k, cos, sin)  # noqa: F821

    Attention.forward.__globals__[NAME] = extensible
    try:
        recipe = rotary.attention(Attention())
        assert recipe is not None and recipe.calls == ((NAME, rotary.recognise(plain)),)
        forward = recipe.members(Attention)["forward"]
        extensible.forward = None  # the op does not need it
        tensors = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
        for ours, expected in zip(forward(Attention(), *tensors), plain(*tensors), strict=True):
            torch.testing.assert_close(ours, expected)
    finally:
        for name in (NAME, rotary.new_name(NAME)):
            Attention.forward.__globals__.pop(name, None)
