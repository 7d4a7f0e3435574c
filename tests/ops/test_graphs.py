# SPDX-License-Identifier: BSD-3-Clause
"""Every public op under compilers, export, scripting, autocast, checkpoints and CUDA graphs."""

import io

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES
from cuda_graphs import capture
from public_ops import CASES, HIDDEN, VOCAB, as_tuple, assert_same, inputs_of, results, target_of, total
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import liger


@pytest.fixture(params=CASES)
def name(request):
    return request.param


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


class Call(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


# --- compilers ----------------------------------------------------------------------------------------------


def test_compile_without_graph_break_or_recompile(device, name):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(Call(CASES[name].function), fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for tokens in (6, 10, 37):
        inputs = inputs_of(name, device, tokens)
        assert_same(results(compiled, inputs), results(CASES[name].function, inputs))
        counts.append(counter.frame_count)
    # The first compilation may start over, because dynamic=True takes float options for symbols at first.
    assert counts[0] == counts[1] == counts[2]


def test_compile_without_gradients(device, name):
    compiled = torch.compile(CASES[name].function, fullgraph=True, backend="aot_eager")
    inputs = [t.detach() for t in inputs_of(name, device)]
    assert_same(as_tuple(compiled(*inputs)), as_tuple(CASES[name].function(*inputs)))


def test_compile_with_a_frozen_weight(device):
    compiled = torch.compile(liger.fused_linear_ce, fullgraph=True, backend="aot_eager")
    x, weight, target = inputs_of("fused_linear_ce", device)
    for inputs in ([x, weight.detach(), target], [x.detach(), weight, target]):
        assert_same(results(compiled, inputs), results(liger.fused_linear_ce, inputs))


class Block(torch.nn.Module):
    """Every op once, between the layers of a small language model."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN)
        self.norm = torch.nn.Parameter(torch.ones(HIDDEN))
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.gate_up = torch.nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, tokens, cos, sin):
        x = self.embedding(tokens)
        batch, length = tokens.shape
        q, k, v = self.qkv(liger.rms_norm(x, self.norm)).view(batch, length, 6, HIDDEN // 2).split(2, 2)
        q, k = liger.rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        attention = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        y, x = liger.fused_add_rms_norm(attention.transpose(1, 2).flatten(2), x, self.norm)
        gate_up = self.gate_up(y)
        gate, up = gate_up.chunk(2, -1)
        x = x + self.down(liger.swiglu(gate, up, inplace=True) + liger.swiglu_packed(gate_up))
        weight = self.embedding.weight
        logits = F.linear(x, weight)
        return liger.fused_linear_ce(x[:, :-1], weight, tokens[:, 1:]) + liger.cross_entropy(
            logits[:, :-1], tokens[:, 1:]
        )


def block_arguments(device, length=9):
    return torch.randint(VOCAB, (2, length), device=device), *torch.rand(
        2, length, HIDDEN // 2, device=device
    )


def block_results(function, module, arguments):
    loss = function(*arguments)
    return [loss, *torch.autograd.grad(loss, list(module.parameters()))]


@pytest.mark.slow
def test_inductor_compiles_a_whole_model(device):
    block = Block().to(device)
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for length in (9, 14):
        arguments = block_arguments(device, length)
        for a, b in zip(
            block_results(compiled, block, arguments), block_results(block, block, arguments), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_export_with_a_dynamic_token_dimension(device, name):
    case = CASES[name]
    tokens = torch.export.Dim("tokens", min=2)
    shapes = tuple(None if dim is None else {dim: tokens} for dim in case.token_dims)
    inputs = [t.detach() for t in inputs_of(name, device)]
    program = torch.export.export(Call(case.function), tuple(inputs), dynamic_shapes=(shapes,))
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert any(target.startswith("liger.") for target in called)
    others = [t.detach() for t in inputs_of(name, device, 13)]
    assert_same(as_tuple(program.module()(*others)), as_tuple(case.function(*others)))


# --- TorchScript --------------------------------------------------------------------------------------------


class ScriptedHead(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.ops.liger.fused_linear_ce(x, self.weight, target, label_smoothing=0.1, reduction="sum")


class ScriptedLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y, _ = torch.ops.liger.rms_norm(x, self.weight, 1e-5)
        y, residual, _ = torch.ops.liger.fused_add_rms_norm(y, x, self.weight)
        q, k = torch.ops.liger.rope(y.unsqueeze(1), residual.unsqueeze(1), cos, sin)
        z = torch.ops.liger.swiglu(q, k) + torch.ops.liger.swiglu_packed(torch.cat([q, k], -1))
        return torch.ops.liger.cross_entropy(
            z.flatten(0, 2), torch.arange(z.numel() // z.size(-1), device=z.device)
        )


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (ScriptedHead, lambda: (torch.randn(6, HIDDEN), target_of(6))),
        (ScriptedLayer, lambda: (torch.randn(2, 5, HIDDEN), *torch.rand(2, 5, HIDDEN))),
    ],
    ids=["head", "layer"],
)
def test_scripted_module_saved_and_loaded(device, module, inputs):
    eager = module().to(device)
    inputs = [t.to(device) for t in inputs()]
    inputs[0].requires_grad_()
    scripted = torch.jit.script(eager)
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    expected = torch.autograd.grad(eager(*inputs), [inputs[0], eager.weight])
    for other in (
        scripted,
        loaded,
        loaded,
    ):  # the second call runs what the profiling executor made of the first
        torch.testing.assert_close(other(*inputs), eager(*inputs))
        for a, b in zip(
            torch.autograd.grad(other(*inputs), [inputs[0], other.weight]), expected, strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# --- autocast and checkpoints -------------------------------------------------------------------------------


def test_autocast(device, name):
    """Operands come from float32 layers under autocast, as in a model; the parameters get float32
    gradients."""
    case, dtype = CASES[name], DTYPES[-1]
    inputs = inputs_of(name, device)
    layer = torch.randn(2, 24, inputs[0].shape[-1], device=device)
    first = torch.randn(*inputs[0].shape[:-1], 24, device=device)

    def run(function, wide, autocast):
        """The op on a matmul's output (two, where its first two inputs belong together)."""
        leaves = [t.detach().to(wide) if t.is_floating_point() else t for t in (layer, first, *inputs)]
        for leaf in leaves:
            leaf.requires_grad_(leaf.is_floating_point())
        layers, start, *rest = leaves
        with torch.autocast(device.type, dtype, enabled=autocast):
            rest[0] = start @ layers[0]
            if case.alike > 1:
                rest[1] = start @ layers[1]
            elif name in ("rope", "qk_norm_rope"):
                rest[1] = start[:, :2] @ layers[1]
                rest[-2:] = [t.detach() for t in rest[-2:]]
            outputs = as_tuple(function(*rest))
        return [*outputs, *torch.autograd.grad(total(outputs), [layers, start])]

    actual = run(case.function, torch.float32, True)
    plain = run(case.reference, torch.float32, True)
    with liger.use_backend("torch"):
        exact = run(case.reference, torch.float64, False)
    wide = name == "cross_entropy" or name.startswith("fused_linear")
    wide |= name == "softmax" and device.type == "cuda"
    assert actual[0].dtype == (torch.float32 if wide else dtype)
    assert all(t.dtype == torch.float32 for t in actual[-2:])
    floor = 2 * torch.finfo(dtype).eps
    for i, values in enumerate(zip(actual, plain, exact, strict=True)):
        ours, theirs = (((v.double() - values[2]).norm() / values[2].norm()).item() for v in values[:2])
        assert ours <= 2 * theirs + floor, f"result {i}: error {ours:.3g}, plain torch {theirs:.3g}"


def accumulated(function, inputs):
    """[outputs, gradients], by backward(): reentrant checkpoints do not work with torch.autograd.grad."""
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
    outputs = as_tuple(function(*leaves))
    total(outputs).backward()
    return [*outputs, *(t.grad for t in leaves if t.requires_grad)]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(device, name, use_reentrant):
    function = CASES[name].function
    inputs = inputs_of(name, device)
    checkpointed = accumulated(lambda *t: checkpoint(function, *t, use_reentrant=use_reentrant), inputs)
    assert_same(checkpointed, results(function, inputs))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_of_an_mlp_with_inplace_backward(device, use_reentrant):
    def mlp(x, weight, inplace=True):
        return liger.swiglu(x @ weight[0], x @ weight[1], inplace=inplace)

    x, weight = torch.randn(6, HIDDEN, device=device), torch.randn(2, HIDDEN, HIDDEN, device=device)
    inputs = [x.requires_grad_(), weight.requires_grad_()]
    checkpointed = accumulated(lambda *t: checkpoint(mlp, *t, use_reentrant=use_reentrant), inputs)
    assert_same(checkpointed, results(lambda *t: mlp(*t, inplace=False), inputs))


# --- CUDA graphs --------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_cuda_graph_of_forward_and_backward(device, name):
    function = CASES[name].function
    inputs = inputs_of(name, device, 40)
    graph, captured = capture(lambda: results(function, inputs), warm_up=3)
    others = inputs_of(name, device, 40)
    with torch.no_grad():
        for static, other in zip(inputs, others, strict=True):
            static.copy_(other)
    graph.replay()
    assert_same(captured, results(function, others))
