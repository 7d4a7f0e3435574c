# SPDX-License-Identifier: BSD-3-Clause
"""liger.nn: each module against torch.nn or the op beneath it; the numerics of the ops have their own
tests."""

import copy
from types import SimpleNamespace

import pytest
import torch
from cases import DTYPES, assert_as_exact_as_torch
from torch import nn

import liger
import liger.nn


def run(module, *inputs, **keywords):
    """(output, gradients of inputs, gradients of parameters by name) for an upstream gradient of ones."""
    inputs = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    module.zero_grad()
    output = module(*inputs, **keywords)
    output.sum().backward()
    parameters = {name: p.grad for name, p in module.named_parameters()}
    return output, [t.grad for t in inputs if t.is_floating_point()], parameters


def assert_like(ours, theirs, inputs, theirs_inputs=None):
    """ours is as exact as theirs, both measured against theirs in float64; parameters have the same names."""
    theirs_inputs = inputs if theirs_inputs is None else theirs_inputs
    exact = copy.deepcopy(theirs).double()
    got = run(ours, *inputs)
    plain = run(theirs, *theirs_inputs)
    want = run(exact, *(t.double() if t.is_floating_point() else t for t in theirs_inputs))
    assert_as_exact_as_torch(got[0], plain[0], want[0].to(plain[0].device), "output")
    for i, values in enumerate(zip(got[1], plain[1], want[1], strict=True)):
        assert_as_exact_as_torch(*values, f"gradient of input {i}")
    assert got[2].keys() == plain[2].keys()
    for name in plain[2]:
        assert_as_exact_as_torch(got[2][name], plain[2][name], want[2][name], name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [48, (48,), (6, 8)], ids=str)
def test_rms_norm_is_that_of_torch(device, shape, dtype):
    ours = liger.nn.RMSNorm(shape, eps=1e-5, casting_mode="gemma", device=device, dtype=dtype)
    theirs = nn.RMSNorm(shape, eps=1e-5, device=device, dtype=dtype)
    nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    last = (shape,) if isinstance(shape, int) else shape
    assert_like(ours, theirs, [torch.randn(5, 3, *last, device=device, dtype=dtype)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_default_eps_is_that_of_torch(device, dtype):
    """Of rows so small that it counts."""
    x = (1e-4 * torch.randn(5, 48)).to(device, dtype)
    ours = liger.nn.RMSNorm(48, casting_mode="gemma", device=device, dtype=dtype)
    assert_like(ours, nn.RMSNorm(48, device=device, dtype=dtype), [x])


def test_sizes_that_are_integers_of_numpy():
    numpy = pytest.importorskip("numpy")
    for cls in (liger.nn.RMSNorm, liger.nn.LayerNorm):
        assert cls(numpy.int64(8)).weight.shape == (8,)
        assert cls([numpy.int64(2), 8]).normalized_shape == (2, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [48, (48,), (6, 8)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_is_that_of_torch(device, shape, dtype, bias):
    arguments = dict(eps=1e-3, bias=bias, device=device, dtype=dtype)
    ours, theirs = liger.nn.LayerNorm(shape, **arguments), nn.LayerNorm(shape, **arguments)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter)
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    last = (shape,) if isinstance(shape, int) else shape
    assert_like(ours, theirs, [torch.randn(5, 3, *last, device=device, dtype=dtype)])
    with pytest.raises(RuntimeError, match="LayerNorm: x has shape"):
        ours(torch.randn(5, 47, device=device, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_is_that_of_torch(device, dtype, affine):
    arguments = dict(num_groups=4, num_channels=24, eps=1e-3, affine=affine, device=device, dtype=dtype)
    ours, theirs = liger.nn.GroupNorm(**arguments), nn.GroupNorm(**arguments)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), parameter)
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    assert_like(ours, theirs, [torch.randn(5, 24, 3, 7, device=device, dtype=dtype)])
    with pytest.raises(
        RuntimeError, match=r"GroupNorm: x has shape \(5, 16, 3\), expected \(batch, 24, ...\)"
    ):
        ours(torch.randn(5, 16, 3, device=device, dtype=dtype))
    with pytest.raises(
        ValueError, match="GroupNorm: num_groups is 5, expected a divisor of num_channels, 24"
    ):
        liger.nn.GroupNorm(5, 24)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_and_relu_squared(device, dtype):
    class PlainReLUSquared(nn.Module):
        def forward(self, x):
            return x.relu().square()

    x = torch.randn(5, 3, 48, device=device, dtype=dtype)
    assert torch.equal(liger.nn.Softmax(dim=-1)(x), liger.softmax(x))
    assert_like(liger.nn.ReLUSquared(), PlainReLUSquared(), [x])
    for dim in (0, 1, 2, -2, 2**63):
        with pytest.raises(ValueError, match=f"Softmax: dim is {dim}, expected -1, the last dimension"):
            liger.nn.Softmax(dim)
    for dim in (None, "-1", -0.5):
        with pytest.raises(TypeError, match=f"Softmax: dim is {dim!r}, expected -1, the last dimension"):
            liger.nn.Softmax(dim)


def test_layer_norm_without_parameters(device):
    x = torch.randn(4, 16, device=device)
    without = liger.nn.LayerNorm(16, elementwise_affine=False)
    assert list(without.parameters()) == [] and torch.equal(without(x), liger.layer_norm(x))


def test_rms_norm_options(device):
    x = torch.randn(4, 16, device=device)
    assert torch.equal(
        liger.nn.RMSNorm(16, device=device)(x), liger.rms_norm(x, eps=torch.finfo(x.dtype).eps)
    )
    without = liger.nn.RMSNorm(16, elementwise_affine=False)
    assert list(without.parameters()) == [] and torch.equal(
        without(x), liger.nn.RMSNorm(16, device=device)(x)
    )
    gemma = liger.nn.RMSNorm(16, eps=1e-6, offset=1.0, casting_mode="gemma", device=device)
    assert torch.count_nonzero(gemma.weight) == 0
    assert torch.equal(gemma(x), liger.rms_norm(x, gemma.weight, 1e-6, 1.0, "gemma"))
    with pytest.raises(RuntimeError, match=r"RMSNorm: x has shape \(4, 16\), expected \(..., 3, 16\)"):
        liger.nn.RMSNorm((3, 16), device=device)(x)


class PlainRMSNormGated(nn.Module):
    """RMSNormGated of Qwen3-Next, and of Mamba2 if there is a group size."""

    def __init__(self, hidden_size, eps, group_size, **factory):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden_size, **factory))
        self.eps, self.group_size = eps, group_size

    def _norm(self, x, size):
        rows = x.unflatten(-1, (-1, size))
        return (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2)

    def forward(self, x, gate):
        wide = torch.promote_types(x.dtype, torch.float32)
        silu = nn.functional.silu(gate.to(wide))
        if self.group_size is None:
            return (self.weight * self._norm(x.to(wide), x.shape[-1]).to(x.dtype) * silu).to(x.dtype)
        return self.weight * self._norm(x.to(wide) * silu, self.group_size).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [None, 12])
def test_rms_norm_gated_module(device, dtype, group_size):
    factory = {"device": device, "dtype": dtype}
    ours = liger.nn.RMSNormGated(48, 1e-5, group_size, norm_before_gate=group_size is None, **factory)
    theirs = PlainRMSNormGated(48, 1e-5, group_size, **factory)
    ours.load_state_dict(theirs.state_dict())
    assert_like(ours, theirs, list(torch.randn(2, 5, 3, 48, **factory)))


def test_rms_norm_gated_options(device):
    x, gate = torch.randn(2, 4, 16, device=device)
    kimi = liger.nn.RMSNormGated(16, activation="sigmoid", offset=1.0, casting_mode="gemma", device=device)
    assert torch.count_nonzero(kimi.weight) == 0
    want = liger.rms_norm_gated(x, gate, kimi.weight, 1e-6, 1.0, "gemma", activation="sigmoid")
    assert torch.equal(kimi(x, gate), want)
    with pytest.raises(
        ValueError, match="RMSNormGated: group_size is 5, expected a divisor of hidden_size, 16"
    ):
        liger.nn.RMSNormGated(16, group_size=5)


class PlainGatedMLP(nn.Module):
    def __init__(self, hidden, intermediate, bias, activation, **factory):
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(hidden, intermediate, bias, **factory)
        self.up_proj = nn.Linear(hidden, intermediate, bias, **factory)
        self.down_proj = nn.Linear(intermediate, hidden, bias, **factory)

    def forward(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_swiglu_mlp(device, dtype, bias, inplace):
    ours = liger.nn.SwiGLUMLP(24, 40, bias, inplace, device=device, dtype=dtype)
    theirs = PlainGatedMLP(24, 40, bias, nn.functional.silu, device=device, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    assert_like(ours, theirs, [torch.randn(2, 7, 24, device=device, dtype=dtype)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("inplace", [False, True])
def test_geglu_mlp(device, dtype, approximate, inplace):
    ours = liger.nn.GEGLUMLP(24, 40, True, approximate, inplace, device=device, dtype=dtype)
    theirs = PlainGatedMLP(24, 40, True, nn.GELU(approximate), device=device, dtype=dtype)
    theirs.load_state_dict(ours.state_dict())
    assert_like(ours, theirs, [torch.randn(2, 7, 24, device=device, dtype=dtype)])


def test_mlps_have_the_defaults_of_their_functions(device):
    x = torch.randn(3, 8, device=device)
    for kind in (liger.nn.GEGLUMLP, liger.nn.TiledGEGLUMLP):
        mlp = kind(8, 12, device=device)
        expected = mlp.down_proj(liger.geglu(mlp.gate_proj(x), mlp.up_proj(x)))
        torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-6)
    assert not liger.nn.SwiGLUMLP(8, 12).inplace and not liger.nn.GEGLUMLP(8, 12).inplace


def test_mlps_of_a_configuration():
    def config(**changes):
        return SimpleNamespace(**{"hidden_size": 8, "intermediate_size": 12, "hidden_act": "silu"} | changes)

    swiglu = liger.nn.SwiGLUMLP.from_config(config(mlp_bias=True), inplace=True, dtype=torch.bfloat16)
    assert swiglu.inplace and swiglu.up_proj.bias.shape == (12,) and swiglu.down_proj.weight.shape == (8, 12)
    assert {p.dtype for p in swiglu.parameters()} == {torch.bfloat16}
    for name, approximate in (("gelu", "none"), ("gelu_new", "tanh"), ("gelu_pytorch_tanh", "tanh")):
        geglu = liger.nn.GEGLUMLP.from_config(config(hidden_activation=name), device="meta")
        assert (geglu.approximate, geglu.up_proj.bias, geglu.inplace) == (approximate, None, False)
        assert geglu.up_proj.weight.is_meta
    for kind, name in ((liger.nn.SwiGLUMLP, "gelu"), (liger.nn.GEGLUMLP, "silu")):
        with pytest.raises(
            ValueError, match=f"{kind.__name__}: the activation of the configuration is '{name}'"
        ):
            kind.from_config(config(hidden_act=name))


@pytest.mark.parametrize("mlp", [liger.nn.SwiGLUMLP, liger.nn.GEGLUMLP])
@pytest.mark.parametrize("inplace", [False, True])
def test_gated_mlp_with_a_kept_graph(device, mlp, inplace):
    x = torch.randn(3, 8, device=device)
    module = mlp(8, 12, inplace=inplace, device=device)
    loss = module(x).sum()
    parameters = list(module.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, parameters), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mlp", [liger.nn.SwiGLUMLP, liger.nn.GEGLUMLP])
def test_gated_mlp_whose_projections_have_another_reader(device, mlp):
    """A hook that keeps an output, and a layer whose backward reads its own output."""
    x, kept = torch.randn(3, 8, device=device), []
    module = mlp(8, 12, inplace=True, device=device)
    handle = module.up_proj.register_forward_hook(lambda module, args, output: kept.append(output))
    loss = module(x).sum()
    before = kept[0].detach().clone()
    loss.backward()
    assert torch.equal(kept[0], before)
    handle.remove()
    module.gate_proj = nn.Sequential(module.gate_proj, nn.Sigmoid())
    results = []
    for module.inplace in (True, False):
        results.append(torch.autograd.grad(module(x).sum(), list(module.parameters())))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_apply_rotary_emb(device, unsqueeze_dim, interleaved):
    q, k = torch.randn(2, 4, 6, 8, device=device), torch.randn(2, 2, 6, 8, device=device)
    cos, sin = torch.randn(2, 1, 6, 8, device=device)
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    got = liger.nn.ApplyRotaryEmb(interleaved, unsqueeze_dim)(q, k, cos, sin)
    want = liger.rope(q, k, cos, sin, unsqueeze_dim, interleaved)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


LOSS_OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"ignore_index": 3},
    {"weight": True, "label_smoothing": 0.2},
]


def make_loss(kind, options, classes, device):
    options = dict(options)
    if options.pop("weight", False):
        generator = torch.Generator().manual_seed(1)
        options["weight"] = torch.rand(classes, generator=generator).to(device)
    return kind(**options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", LOSS_OPTIONS, ids=str)
def test_cross_entropy_loss_is_that_of_torch(device, options, dtype):
    logits = torch.randn(9, 33, device=device, dtype=dtype)
    target = torch.randint(33, (9,), device=device)
    target[2] = 3
    target[4] = options.get("ignore_index", -100)
    ours = make_loss(liger.nn.CrossEntropyLoss, options, 33, device)
    theirs = make_loss(nn.CrossEntropyLoss, options, 33, device)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    if options.get("weight") and dtype != torch.float32:
        theirs.weight = theirs.weight.to(dtype)
    got, plain = run(ours, logits, target), run(theirs, logits, target)
    want = run(make_loss(nn.CrossEntropyLoss, options, 33, device).double(), logits.double(), target)
    assert got[0].dtype == torch.float32
    assert_as_exact_as_torch(got[0], plain[0], want[0], "loss")
    assert_as_exact_as_torch(got[1][0], plain[1][0], want[1][0], "gradient")


@pytest.mark.parametrize("options", LOSS_OPTIONS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_fused_linear_loss_and_head_are_linear_and_loss(device, options, bias):
    hidden = torch.randn(2, 5, 16, device=device)
    target = torch.randint(33, (2, 5), device=device)
    target[1, 4] = options.get("ignore_index", -100)
    head = nn.Linear(16, 33, bias, device=device)
    loss = make_loss(nn.CrossEntropyLoss, options, 33, device)
    fused = make_loss(liger.nn.FusedLinearCrossEntropyLoss, options, 33, device)
    renamed = {("ce_weight" if name == "weight" else name): value for name, value in options.items()}
    if "ce_weight" in renamed:
        renamed["ce_weight"] = fused.weight
    module = liger.nn.LMHeadLoss(16, 33, bias, device=device, **renamed)
    module.load_state_dict(head.state_dict(), strict=False)
    assert torch.equal(module(hidden), head(hidden))

    def plain(x):
        value = loss(head(x).flatten(0, 1), target.flatten())
        return value.view_as(target) if value.dim() else value

    results = []
    for owner, function in [
        (head, plain),
        (head, lambda x: fused(x, head.weight, target, head.bias)),
        (module, lambda x: module(x, target)),
    ]:
        x = hidden.clone().requires_grad_()
        value = function(x)
        results.append([value, *torch.autograd.grad(value.sum(), [x, *owner.parameters()])])
    for values in results[1:]:
        for got, want in zip(values, results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_loss_modules_pass_every_option(device):
    hidden, weight = torch.randn(6, 16, device=device), torch.randn(21, 16, device=device)
    target = torch.randint(21, (6,), device=device)
    token_weight, denominator = torch.rand(6, device=device), torch.tensor(17, device=device)
    options = {"lse_square_scale": 1e-3, "softcap": 4.0, "label_smoothing": 0.1}
    metrics = ("z_loss", "token_accuracy", "argmax", "logprobs", "entropy")
    asked = {"metrics": metrics}
    tensors = {"token_weight": token_weight, "denominator": denominator}
    logits = hidden @ weight.T
    ours = liger.nn.CrossEntropyLoss(metrics=metrics, **options)(logits, target, **tensors)
    assert all(map(torch.equal, ours, liger.cross_entropy(logits, target, **options, **tensors, **asked)))
    fused = liger.nn.FusedLinearCrossEntropyLoss(
        metrics=metrics, accum_dtype=torch.float32, memory_budget=4096, **options
    )
    want = liger.fused_linear_ce(
        hidden, weight, target, **options, **tensors, **asked, accum_dtype=torch.float32, memory_budget=4096
    )
    assert all(map(torch.equal, fused(hidden, weight, target, **tensors), want))
    head = liger.nn.LMHeadLoss(16, 21, device=device, metrics=metrics, memory_budget=4096, **options)
    head.weight.data.copy_(weight)
    # With a gradient: Triton compiles another kernel, whose sums may be rounded otherwise.
    with torch.no_grad():
        assert all(map(torch.equal, head(hidden, target, **tensors), want))
    torch.testing.assert_close(head(hidden), 4.0 * torch.tanh(logits / 4.0))


def test_in_place_loss_writes_the_gradient_over_the_logits(device):
    leaf = torch.randn(5, 12, device=device, requires_grad=True)
    target = torch.randint(12, (5,), device=device)
    gradients = []
    for inplace in (False, True):
        logits = leaf * 1.0
        loss = liger.nn.CrossEntropyLoss(inplace=inplace)(logits, target)
        version = logits._version
        gradients += torch.autograd.grad(loss, [leaf])
        assert (logits._version > version) == inplace
    assert torch.equal(*gradients)


# A module -> what printing it shows of its options.
PRINTED = [
    (liger.nn.Softmax(), "Softmax(dim=-1)"),
    (liger.nn.ApplyRotaryEmb(interleaved=True), "ApplyRotaryEmb(interleaved=True, unsqueeze_dim=1)"),
    (liger.nn.GroupNorm(2, 4), "GroupNorm(2, 4, eps=1e-05, affine=True)"),
    (liger.nn.LayerNorm((2, 4), bias=False), "(2, 4), eps=1e-05, elementwise_affine=True, bias=False"),
    (liger.nn.RMSNorm(4, offset=1.0), "elementwise_affine=True, offset=1.0, casting_mode='llama'"),
    (liger.nn.RMSNormGated(8, group_size=4), "8, eps=1e-06, group_size=4, norm_before_gate=True"),
    (liger.nn.CrossEntropyLoss(softcap=30.0), "lse_square_scale=0.0, softcap=30.0"),
    (liger.nn.LMHeadLoss(4, 9), "in_features=4, out_features=9, bias=False"),
    (liger.nn.GEGLUMLP(4, 6), "approximate='none', inplace=False"),
    (liger.nn.TiledSwiGLUMLP(4, 6, num_shards=2), "activation='silu', num_shards=2, memory_budget=None"),
]


@pytest.mark.parametrize("module, shown", PRINTED, ids=lambda value: type(value).__name__)
def test_printed_options(module, shown):
    assert shown in repr(module)


def test_modules_compile_and_copy(device):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = liger.nn.RMSNorm(16, eps=1e-6, device=device)
            self.mlp = liger.nn.SwiGLUMLP(16, 24, device=device)
            self.head = liger.nn.LMHeadLoss(16, 33, device=device)

        def forward(self, x, target):
            return self.head(x + self.mlp(self.norm(x)), target)

    block, target = Block(), torch.randint(33, (2, 5), device=device)
    x = torch.randn(2, 5, 16, device=device)
    eager = run(block, x, target)
    for other in (copy.deepcopy(block), torch.compile(block, fullgraph=True, backend="aot_eager")):
        result = run(other, x, target)
        torch.testing.assert_close(result[0], eager[0])
        torch.testing.assert_close(result[1], eager[1])
        torch.testing.assert_close(list(result[2].values()), list(eager[2].values()))
