"""Every public op under compilers, export, scripting, autocast, checkpoints, CUDA graphs and functional transforms."""

import io
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import liger

HIDDEN, VOCAB = 16, 11


@dataclass
class Case:
    function: object
    plain: object  # the same in plain torch
    make: object  # (tokens) -> inputs
    token_dims: tuple  # per input, the dimension of the tokens or None


def _randn(*shape):
    return torch.randn(shape)


def _target(tokens):
    target = torch.randint(VOCAB, (tokens,))
    target[0] = -100
    return target


def _plain_rms_norm(x, weight):
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), 1e-6).to(x.dtype)


def _plain_fused_add_rms_norm(x, residual, weight):
    return _plain_rms_norm(x + residual, weight), x + residual


def _plain_rope(q, k, cos, sin):
    def turned(x):
        return torch.cat((-x[..., HIDDEN // 2 :], x[..., : HIDDEN // 2]), -1)

    return q * cos.to(q.dtype) + turned(q) * sin.to(q.dtype), k * cos.to(k.dtype) + turned(k) * sin.to(
        k.dtype
    )


def _plain_swiglu_packed(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


CASES = {
    "rms_norm": Case(
        liger.rms_norm, _plain_rms_norm, lambda t: (_randn(2, t, HIDDEN), _randn(HIDDEN)), (1, None)
    ),
    "fused_add_rms_norm": Case(
        liger.fused_add_rms_norm,
        _plain_fused_add_rms_norm,
        lambda t: (_randn(2, t, HIDDEN), _randn(2, t, HIDDEN), _randn(HIDDEN)),
        (1, 1, None),
    ),
    "rope": Case(
        liger.rope,
        _plain_rope,
        lambda t: (_randn(2, 4, t, HIDDEN), _randn(2, 2, t, HIDDEN), *torch.rand(2, t, HIDDEN)),
        (2, 2, 0, 0),
    ),
    "swiglu": Case(
        liger.swiglu,
        lambda gate, up: F.silu(gate) * up,
        lambda t: (_randn(2, t, HIDDEN), _randn(2, t, HIDDEN)),
        (1, 1),
    ),
    "swiglu_packed": Case(liger.swiglu_packed, _plain_swiglu_packed, lambda t: (_randn(2, t, HIDDEN),), (1,)),
    "cross_entropy": Case(
        liger.cross_entropy, F.cross_entropy, lambda t: (_randn(t, VOCAB), _target(t)), (0, 0)
    ),
    "fused_linear_ce": Case(
        liger.fused_linear_ce,
        lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target),
        lambda t: (_randn(t, HIDDEN), _randn(VOCAB, HIDDEN), _target(t)),
        (0, None, 0),
    ),
}


@pytest.fixture(params=CASES)
def name(request):
    return request.param


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def differentiable(name, index, tensor):
    """Whether this input of the op gets a gradient: all that floats but the tables of rope."""
    return tensor.is_floating_point() and not (name == "rope" and index > 1)


def inputs_of(name, device, tokens=6):
    inputs = [t.to(device) for t in CASES[name].make(tokens)]
    return [t.requires_grad_(differentiable(name, i, t)) for i, t in enumerate(inputs)]


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def total(outputs):
    """A scalar whose gradient differs from element to element."""
    return sum(
        (o.float() * torch.linspace(1, 2, o.numel(), device=o.device).view(o.shape)).sum() for o in outputs
    )


def results(function, inputs):
    """[outputs, gradients] of a function."""
    outputs = as_tuple(function(*inputs))
    return [*outputs, *torch.autograd.grad(total(outputs), [t for t in inputs if t.requires_grad])]


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


class Call(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


# --- compilers ----------------------------------------------------------------------------------------------------


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


# --- TorchScript --------------------------------------------------------------------------------------------------


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
        (ScriptedHead, lambda: (_randn(6, HIDDEN), _target(6))),
        (ScriptedLayer, lambda: (_randn(2, 5, HIDDEN), *torch.rand(2, 5, HIDDEN))),
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


# --- autocast and checkpoints -------------------------------------------------------------------------------------


def test_autocast(device, name):
    """Operands come from float32 layers under autocast, as in a model; the parameters get float32 gradients."""
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
            if name in ("fused_add_rms_norm", "swiglu"):
                rest[1] = start @ layers[1]
            elif name == "rope":
                rest[1] = start[:, :2] @ layers[1]
                rest[2:] = [t.detach() for t in rest[2:]]
            outputs = as_tuple(function(*rest))
        return [*outputs, *torch.autograd.grad(total(outputs), [layers, start])]

    actual = run(case.function, torch.float32, True)
    plain = run(case.plain, torch.float32, True)
    exact = run(case.plain, torch.float64, False)
    assert actual[0].dtype == (torch.float32 if "ce" in name.split("_") or name == "cross_entropy" else dtype)
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


# --- CUDA graphs --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_cuda_graph_of_forward_and_backward(device, name):
    function = CASES[name].function
    inputs = inputs_of(name, device, 40)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            results(function, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(function, inputs)
    others = inputs_of(name, device, 40)
    with torch.no_grad():
        for static, other in zip(inputs, others, strict=True):
            static.copy_(other)
    graph.replay()
    assert_same(captured, results(function, others))


# --- functional transforms and second derivatives -----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_every_tensor_with_tokens(device, name):
    case = CASES[name]
    samples = [inputs_of(name, device) for _ in range(3)]
    in_dims = tuple(None if dim is None else 0 for dim in case.token_dims)
    inputs = [
        torch.stack(ts).detach() if dim == 0 else ts[0].detach()
        for ts, dim in zip(zip(*samples, strict=True), in_dims, strict=True)
    ]
    for i, tensor in enumerate(inputs):
        tensor.requires_grad_(differentiable(name, i, tensor))

    def loop(*inputs):
        outputs = [
            as_tuple(
                case.function(*(t if dim is None else t[i] for t, dim in zip(inputs, in_dims, strict=True)))
            )
            for i in range(3)
        ]
        return tuple(torch.stack(o) for o in zip(*outputs, strict=True))

    assert_same(results(torch.vmap(case.function, in_dims=in_dims), inputs), results(loop, inputs))


def test_vmap_with_the_batch_elsewhere(device):
    q, k, cos, sin = inputs_of("rope", device)
    tables = torch.stack([cos, sin, cos], -1)
    mapped = torch.vmap(liger.rope, in_dims=(None, None, -1, None), out_dims=-1)(q, k, tables, sin)
    for i in range(3):
        assert_same([t[..., i] for t in mapped], liger.rope(q, k, tables[..., i], sin))
    per_sequence = torch.rand(3, 2, *cos.shape, device=device)
    mapped = torch.vmap(liger.rope, in_dims=(None, None, 0, 0))(q, k, per_sequence, per_sequence)
    for i in range(3):
        assert_same([t[i] for t in mapped], liger.rope(q, k, per_sequence[i], per_sequence[i]))
    gate, up = inputs_of("swiglu", device)
    mapped = torch.vmap(liger.swiglu, in_dims=(1, None), out_dims=1)(gate, up[:, 0])
    assert_same([mapped], [liger.swiglu(gate, up[:, :1].expand_as(up))])


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm"])
def test_vmap_over_a_norm_weight(device, name):
    *inputs, weight = inputs_of(name, device)
    weights = torch.stack([weight, 2 * weight, -weight], -1)
    mapped = torch.vmap(CASES[name].function, in_dims=(*(None for _ in inputs), -1))(*inputs, weights)
    for i in range(3):
        expected = as_tuple(CASES[name].function(*inputs, weights[:, i]))
        assert_same([t[i] for t in as_tuple(mapped)], expected)


def test_second_derivative_is_an_error(device, name):
    """The gradient itself may be asked for with create_graph; only differentiating it again is refused."""
    function = CASES[name].function
    inputs = inputs_of(name, device)
    wanted = [t for t in inputs if t.requires_grad]
    grads = torch.autograd.grad(total(as_tuple(function(*inputs))), wanted, create_graph=True)
    assert_same(grads, results(function, inputs)[-len(wanted) :])
    for grad in grads:
        with pytest.raises(RuntimeError, match=f"the backward of {name} is not differentiable"):
            (grad.sum() + inputs[0].sum()).backward(retain_graph=True)
