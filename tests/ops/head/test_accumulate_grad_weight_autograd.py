# SPDX-License-Identifier: BSD-3-Clause
"""accumulate_grad_weight=True as a part of autograd: repeated backwards, hooks, checkpointing, compilers;
memory; bad input."""

import pytest
import torch
from cases import DTYPES
from live_bytes import LiveBytes
from public_options import Setting, problem, public, settings
from test_accumulate_grad_weight import HIDDEN, ROWS, VOCAB, make, step, with_sum
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from traced_calls import skip_if_graph_breaks_lose_fields

import liger


def test_backward_adds_as_often_as_it_runs(device):
    x, weight, target, *_ = make(device)
    with_sum(weight)
    loss = liger.fused_linear_ce(x, weight, target, accumulate_grad_weight=True)
    assert not weight.main_grad.any()
    loss.backward(retain_graph=True)
    once = weight.main_grad.clone()
    loss.backward()
    torch.testing.assert_close(weight.main_grad, 2 * once)


def test_checkpoint_adds_once(device):
    x, weight, target, *_ = make(device)
    expected = with_sum(torch.nn.Parameter(weight.detach().clone()))
    step(x, expected, target)
    with_sum(weight)
    x = x.requires_grad_()

    def function(x):
        return liger.fused_linear_ce(x, weight, target, accumulate_grad_weight=True)

    checkpoint(function, x, use_reentrant=False).backward()
    assert torch.equal(weight.main_grad, expected.main_grad)


def test_only_where_the_weight_is_wanted(device):
    x, weight, target, *_ = make(device)
    x = x.requires_grad_()
    with_sum(weight)

    def loss():
        return liger.fused_linear_ce(x, weight, target, accumulate_grad_weight=True)

    torch.autograd.grad(loss(), x)
    loss().backward(inputs=[x])
    with torch.no_grad():
        assert not loss().requires_grad
    assert not weight.main_grad.any()
    loss().backward(inputs=[weight])
    assert weight.main_grad.any()
    weight.main_grad.zero_()
    weight.requires_grad_(False)
    loss().backward()
    assert not weight.main_grad.any() and weight.grad is None


@pytest.mark.parametrize("name", [s.public for s in settings() if s.option == "accumulate_grad_weight"])
def test_a_weight_that_is_frozen_before_the_backward(name):
    """Of every callable with the option: the other gradients are those without the option."""
    gradients = []
    for option in (None, "accumulate_grad_weight"):
        made = problem(Setting(name, option, True, isinstance(public(name), type)))
        results = [t for t in tree_leaves(made.module(*made.inputs)) if isinstance(t, torch.Tensor)]
        made.module.requires_grad_(False)
        sum(t.sum() for t in results if t.requires_grad).backward()
        assert all(parameter.grad is None for parameter in made.module.parameters())
        gradients.append([t.grad for t in made.inputs if t.requires_grad])
    for grad, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(grad, plain)


def test_hooks_after_the_sum(device):
    """Those that frameworks use to start a reduction run after the gradient of this backward has been
    added."""
    x, weight, target, *_ = make(device)
    with_sum(weight)
    seen = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.main_grad.any().item()))
    node = torch.autograd.graph.get_gradient_edge(weight).node
    node.register_hook(lambda *_: seen.append(weight.main_grad.any().item()))
    step(x, weight, target)
    assert seen == [True, True]


def test_loss_can_be_written_in_place(device):
    x, weight, target, *_ = make(device)
    expected = with_sum(torch.nn.Parameter(weight.detach().clone()))
    step(x, expected, target)
    with_sum(weight)
    loss = liger.fused_linear_ce(x, weight, target, accumulate_grad_weight=True)
    loss *= 4
    loss.backward()
    torch.testing.assert_close(weight.main_grad, 4 * expected.main_grad)


@pytest.mark.parametrize("x_needs_grad", [True, False])
def test_compiled_code_breaks_the_graph(device, x_needs_grad):
    skip_if_graph_breaks_lose_fields()
    x, weight, target, *_ = make(device)
    y = x.clone()
    expected = with_sum(torch.nn.Parameter(weight.detach().clone()))
    with_sum(weight)
    step(y.requires_grad_(x_needs_grad), expected, target)
    torch._dynamo.reset()

    def function(x):
        return liger.fused_linear_ce(x * 1.0, weight, target, accumulate_grad_weight=True) * 1.0

    torch.compile(function, backend="aot_eager")(x.requires_grad_(x_needs_grad)).backward()
    torch.testing.assert_close(weight.main_grad, expected.main_grad)
    assert (x.grad is not None) == x_needs_grad
    if x_needs_grad:
        torch.testing.assert_close(x.grad, y.grad, equal_nan=True)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"accumulate_grad_weight adds to weight.main_grad or weight.grad"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(x)


# --- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_has_no_gradient_of_the_weight(dtype):
    """At no time is there a tensor of as many bytes as the gradient, though it is larger than everything
    else."""
    vocab, hidden, rows = 4096, 512, 24
    x = torch.randn(rows, hidden).to(dtype).requires_grad_()
    target = torch.randint(vocab, (rows,))
    budget = 4 * vocab * 4
    peaks = {}
    for accumulate in (False, True):
        weight = with_sum(torch.nn.Parameter((torch.randn(vocab, hidden) / 30).to(dtype)))
        with LiveBytes(x, weight, target, weight.main_grad) as memory:
            loss = liger.fused_linear_ce(
                x, weight, target, memory_budget=budget, accumulate_grad_weight=accumulate
            )
            loss.backward()
        peaks[accumulate] = memory.peak
        x.grad = None
    assert peaks[True] < weight.nbytes / 2 < weight.nbytes < peaks[False]


@pytest.mark.gpu
def test_memory_of_a_gpu(device):
    vocab, hidden, rows = 32768, 4096, 512
    x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = with_sum(
        torch.nn.Parameter(torch.randn(vocab, hidden, device=device, dtype=torch.bfloat16) / 32)
    )
    target = torch.randint(vocab, (rows,), device=device)
    budget = 8 << 20
    step(x, weight, target, memory_budget=budget)
    x.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(x, weight, target, memory_budget=budget)
    assert torch.cuda.max_memory_allocated() - before < weight.nbytes / 2


# --- bad input ----------------------------------------------------------------------------------------------


def _no_place(weight):
    pass


def _half_main_grad(weight):
    weight.main_grad = torch.zeros_like(weight)


def _short_main_grad(weight):
    weight.main_grad = torch.zeros(VOCAB - 1, HIDDEN)


def _half_grad(weight):
    weight.grad = torch.zeros_like(weight)


def _tensor_hook(weight):
    with_sum(weight).register_hook(lambda grad: grad)


def _zero_3(weight):
    with_sum(weight).ds_id = 3


BAD = {
    r"of dtype float16, which has no float32 gradient: set weight.main_grad to a float32 tensor": _no_place,
    r"weight.main_grad = a tensor of shape \(211, 32\) and dtype float16, expected a float32": _half_main_grad,
    r"weight.main_grad = a tensor of shape \(210, 32\) and dtype float32, expected a": _short_main_grad,
    r"weight.grad = a tensor of shape \(211, 32\) and dtype float16, expected a float32": _half_grad,
    r"weight, which has hooks that read its gradient \(register_hook\), expected none": _tensor_hook,
    r"weight, a parameter of DeepSpeed ZeRO-3": _zero_3,
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_unsuitable_weights(message):
    x, weight, target, *_ = make("cpu", torch.float16)
    BAD[message](weight)
    for call in (liger.fused_linear_ce, liger.fused_linear_logprobs):
        with pytest.raises(RuntimeError, match=f"{call.__name__}: accumulate_grad_weight with .*{message}"):
            call(x, weight, target, accumulate_grad_weight=True)


def _columns_in_one_place(weight, x):
    return torch.zeros(VOCAB).as_strided(weight.shape, (1, 0))


def _shifted_rows(weight, x):
    return torch.zeros(VOCAB + HIDDEN).as_strided(weight.shape, (1, 1))


def _memory_of_the_weight(weight, x):
    return weight.detach()


def _memory_around_the_input(weight, x):
    whole = torch.zeros(VOCAB, HIDDEN)
    x.set_(whole[: x.shape[0]])
    return whole


SHARED = {
    r"{weight}.{what} of shape \(211, 32\) has strides \(1, 0\), .*is written": _columns_in_one_place,
    r"{weight}.{what} of shape \(211, 32\) has strides \(1, 1\), .*is written": _shifted_rows,
    r"{weight} shares memory with {weight}.{what}, .*is written": _memory_of_the_weight,
    r"(input|hidden) shares memory with {weight}.{what}, .*is written": _memory_around_the_input,
}


@pytest.mark.parametrize("what", ["main_grad", "grad"])
@pytest.mark.parametrize("message", SHARED)
def test_sums_in_shared_memory_are_refused_in_the_forward(message, what):
    how = {"accumulate_grad_weight": True}
    orpo = liger.losses.FusedLinearORPOLoss(**how)
    calls = {
        "fused_linear_ce: weight": lambda x, w, y: liger.fused_linear_ce(x, w, y, **how),
        "fused_linear_logprobs: weight": lambda x, w, y: liger.fused_linear_logprobs(x, w, y, **how),
        "FusedLinearORPOLoss: weight": lambda x, w, y: orpo(x[:4, None], w, y[:4, None]),
    }
    for named, call in calls.items():
        op, name = named.split(": ")
        x, weight, target, *_ = make("cpu")
        setattr(weight, what, SHARED[message](weight, x))
        with pytest.raises(RuntimeError, match=f"^{op}: {message.format(weight=name, what=what)}"):
            call(x, weight, target)


def test_bad_calls():
    x, weight, target, *_ = make("cpu")
    with_sum(weight)
    how = {"accumulate_grad_weight": True}
    with pytest.raises(TypeError, match="accumulate_grad_weight is 1, expected True or False"):
        liger.fused_linear_ce(x, weight, target, accumulate_grad_weight=1)
    for other in (weight[:], weight * 1.0, weight.double().float()):
        with pytest.raises(
            RuntimeError, match=r"the result of .*Backward0, expected a leaf: pass the parameter"
        ):
            liger.fused_linear_ce(x, other, target, **how)
    with pytest.raises(RuntimeError, match=r"which torch.func or forward mode transforms"):
        torch.func.grad(lambda w: liger.fused_linear_ce(x, w, target, **how))(weight)
    loss = liger.fused_linear_ce(x, weight, target, **how)
    with pytest.raises(
        RuntimeError, match=r"torch.autograd.grad of weight with accumulate_grad_weight, expected loss"
    ):
        torch.autograd.grad(loss, weight)
    loss = liger.fused_linear_ce(x, weight, target, **how)
    with pytest.raises(RuntimeError, match="create_graph with accumulate_grad_weight"):
        loss.backward(create_graph=True)
    assert not weight.main_grad.any()


def test_bad_input_of_the_ops():
    x, weight, target, *_ = make("cpu")
    weight, total = weight.detach(), torch.zeros(VOCAB, HIDDEN)
    rest = (None, None, None, None, -100, 0.0, 0.0, None, "mean", None)
    op = torch.ops.liger.fused_linear_ce_add_grad_weight_
    with pytest.raises(RuntimeError, match=r"grad_loss has shape \(60,\), expected \(\)"):
        op(total, torch.ones(ROWS), x, weight, target, *rest)
    with pytest.raises(
        RuntimeError, match=r"grad_weight has shape \(210, 32\) and dtype float32, expected the shape"
    ):
        op(total[1:], torch.ones(()), x, weight, target, *rest)
    with pytest.raises(RuntimeError, match=r"grad_weight has .* dtype float16, expected .* and float32"):
        op(total.half(), torch.ones(()), x, weight, target, *rest)
    op = torch.ops.liger.fused_linear_logprobs_add_grad_weight_
    with pytest.raises(RuntimeError, match=r"grad_logprobs has shape \(59,\), expected \(60,\)"):
        op(total, torch.ones(ROWS - 1), None, x, weight, target, None, 1.0, -100, None, None)
