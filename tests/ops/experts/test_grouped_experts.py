# SPDX-License-Identifier: BSD-3-Clause
"""grouped_experts against a loop over experts: values, all gradients, routings, memory, and what has no
effect."""

import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, check_draws
from cuda_graphs import no_synchronisation
from errors import error_about
from samples import SAMPLES
from torch.fx.experimental.proxy_tensor import make_fx

import liger
from liger._core.runtime.environment import triton_interpreted
from liger.ops.grouped_experts import grouped_mm
from liger.ops.grouped_experts.adapters import adapted_experts
from liger.ops.grouped_experts.adapters import adapter as adapters_of
from liger.ops.grouped_experts.routing import Gate

TOKENS, CHOICES, EXPERTS, HIDDEN, INTERMEDIATE = 13, 3, 5, 16, 24


def gated(gate_up, activation="silu", is_interleaved=False, alpha=1.702, limit=None):
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if is_interleaved else gate_up.chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "gpt_oss":
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def plain(
    x, index, weights, gate_up, down, gate_up_bias=None, down_bias=None, is_transposed=False, recompute=False,
    **options,
):  # fmt: skip
    """A loop over experts; the sum over the choices of a token in at least float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    for expert in range(gate_up.shape[0]):
        token, choice = torch.where(index == expert)
        first, second = (t[expert] if is_transposed else t[expert].t() for t in (gate_up, down))
        out = x[token] @ first
        out = gated(out if gate_up_bias is None else out + gate_up_bias[expert], **options) @ second
        out = out if down_bias is None else out + down_bias[expert]
        y = y.index_add(0, token, out.to(wide) * weights[token, choice, None].to(wide))
    return y.to(x.dtype)


def make(device, dtype=torch.float32, tokens=TOKENS, choices=CHOICES, experts=EXPERTS, hidden=HIDDEN,
         intermediate=INTERMEDIATE, biased=False, transposed=False):  # fmt: skip
    """The differentiable arguments: x, routing weights in float32, the two weights, the two biases."""

    def randn(*shape, fan=1):
        return (torch.randn(shape, device=device) / fan**0.5).to(dtype)

    gate_up = randn(experts, 2 * intermediate, hidden, fan=hidden)
    down = randn(experts, hidden, intermediate, fan=intermediate)
    if transposed:
        gate_up, down = (t.transpose(1, 2).contiguous() for t in (gate_up, down))
    biases = [randn(experts, 2 * intermediate), randn(experts, hidden)] if biased else []
    weights = torch.rand(tokens, choices, device=device)
    return [randn(tokens, hidden), weights, gate_up, down, *biases]


def distinct(tokens, choices, experts):
    """Distinct choices per token, as a router makes them."""
    return torch.rand(tokens, experts).topk(choices, -1).indices


ROUTINGS = {
    "distinct": lambda t, k, e: distinct(t, k, e),
    "repeated": lambda t, k, e: torch.randint(e, (t, k)),
    "one expert": lambda t, k, e: torch.full((t, k), e - 1),
    "one token each": lambda t, k, e: torch.arange(t * k).view(t, k) % e,
    "two experts": lambda t, k, e: torch.randint(2, (t, k)) * (e - 2),
    "sentinels": lambda t, k, e: torch.randint(2 * e, (t, k)),
    "sentinels alone": lambda t, k, e: torch.full((t, k), e),
}
# Limits that every dtype represents: rounded, they would move elements across the clamp.
FORMS = {
    "silu": {},
    "gelu": {"activation": "gelu"},
    "gelu_tanh interleaved": {"activation": "gelu_tanh", "is_interleaved": True},
    "gpt_oss": {"activation": "gpt_oss", "is_transposed": True, "is_interleaved": True, "limit": 0.75},
    "gpt_oss unclamped": {"activation": "gpt_oss", "alpha": 0.9},
    "silu clamped": {"limit": 0.625, "is_transposed": True},
    "gelu clamped": {"activation": "gelu", "limit": 0.625},
}


def check(index, *draws, **options):
    """Against the loop, in the same dtype and in float64. ``draws``: the differentiable arguments, once or
    more."""

    def call(function):
        return lambda x, *rest: function(x, index, *rest, **options)

    # The gradient of the routing weights is float32, but both formulas round a product of x to the dtype of x
    # first. It is a sum of other terms than the sum of the loop, which may cancel more.
    rounding = max(torch.finfo(draws[0][0].dtype).eps / torch.finfo(torch.float32).eps, 16.0)
    check_draws(call(liger.grouped_experts), call(plain), draws, intermediate=rounding)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(device, routing, dtype, recompute):
    index = ROUTINGS[routing](TOKENS, CHOICES, EXPERTS).to(device)
    check(index, make(device, dtype, biased=True), recompute=recompute)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_forms(device, form, dtype, biased):
    index = distinct(TOKENS, CHOICES, EXPERTS).to(device)
    inputs = make(device, dtype, biased=biased, transposed=FORMS[form].get("is_transposed", False))
    if form.endswith("clamped") and dtype != torch.float32:
        # Multiples of 1/2: gate and up are exact, whichever GEMM computes them, so no rounding moves one
        # across the clamp, where the gradient jumps.
        for i in (0, 2, 4)[: 3 if biased else 2]:
            inputs[i] = (2 * inputs[i]).round() / 2
    check(index, inputs, **FORMS[form])


# Sizes whose rows are no multiple of 16 bytes run as one GEMM per expert; one expert, one choice, one token.
SIZES = [
    (1, 1, 1, 8, 8), (1, 1, 4, 16, 8), (9, 1, 3, 7, 5), (6, 4, 4, 9, 16), (17, 2, 3, 16, 3), (40, 5, 5, 32, 8),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(device, sizes, dtype):
    tokens, choices, experts, hidden, intermediate = sizes
    index = distinct(tokens, choices, experts).to(device)
    # The gradient of a single routing weight is one number, of terms that cancel.
    draws = [
        make(device, dtype, tokens, choices, experts, hidden, intermediate, biased=True)
        for _ in range(16 if index.numel() == 1 else 1)
    ]
    check(index, *draws)
    check(index.int(), *draws)


def test_float64(float64_device):
    inputs = [
        t.double().requires_grad_()
        for t in make(float64_device, tokens=4, hidden=3, intermediate=2, biased=True)
    ]
    index = torch.randint(EXPERTS + 1, (4, CHOICES), device=float64_device)
    for options in FORMS.values():
        if not options.get("is_transposed"):
            torch.autograd.gradcheck(
                lambda x, *rest, o=options: liger.grouped_experts(x, index, *rest, **o), inputs
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_leading_dimensions(device, dtype):
    index = distinct(TOKENS, CHOICES, EXPERTS).to(device)
    inputs = make(device, dtype, biased=True)
    x, weights, *parameters = (t.detach() for t in inputs)
    flat = liger.grouped_experts(x, index, weights, *parameters)
    rows = slice(0, 12)
    shaped = liger.grouped_experts(
        x[rows].view(3, 4, -1), index[rows].view(3, 4, -1), weights[rows].view(3, 4, -1), *parameters
    )
    assert torch.equal(
        shaped.flatten(0, 1), liger.grouped_experts(x[rows], index[rows], weights[rows], *parameters)
    )
    torch.testing.assert_close(shaped.flatten(0, 1), flat[rows], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_in_the_dtype_of_x(device, dtype):
    x, weights, *parameters = make(device, dtype)
    check(distinct(TOKENS, CHOICES, EXPERTS).to(device), [x, weights.to(dtype), *parameters])


def test_no_tokens(device):
    x, weights, *parameters = (t.requires_grad_() for t in make(device, tokens=0, biased=True))
    y = liger.grouped_experts(
        x, torch.empty(0, CHOICES, dtype=torch.int64, device=device), weights, *parameters
    )
    assert y.shape == x.shape
    grads = torch.autograd.grad(y.sum(), [x, weights, *parameters])
    assert [g.shape for g in grads] == [t.shape for t in (x, weights, *parameters)]
    assert not any(g.any() for g in grads)


def gradients(inputs, index, upstream, **options):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = liger.grouped_experts(leaves[0], index, *leaves[1:], **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


@pytest.mark.parametrize("hidden", [HIDDEN, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_and_choices_without_effect_leave_no_trace(device, dtype, hidden):
    """Parameters of an expert without tokens, and weights of sentinels, may be NaN; their gradients are
    zero."""
    index = torch.tensor([[0, 2, 3], [3, 9, 0], [4, 5, 2]]).to(device)
    inputs = make(device, dtype, tokens=3, hidden=hidden, biased=True)
    upstream = torch.randn_like(inputs[0])
    expected = gradients(inputs, index, upstream)
    poisoned = [t.clone() for t in inputs]
    poisoned[1][index >= EXPERTS] = torch.nan
    for parameter in poisoned[2:]:
        parameter[1] = torch.nan
    found = gradients(poisoned, index, upstream)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert not found[2][index >= EXPERTS].any() and not any(g[1].any() for g in found[3:])


def test_the_same_bits_again(device):
    index, inputs = distinct(200, CHOICES, EXPERTS).to(device), make(device, torch.bfloat16, tokens=200)
    upstream = torch.randn_like(inputs[0])
    first = gradients(inputs, index, upstream)
    for _ in range(3):
        assert all(map(torch.equal, first, gradients(inputs, index, upstream)))


def test_recomputed_gradients_are_those_of_kept_activations(device):
    index, inputs = distinct(TOKENS, CHOICES, EXPERTS).to(device), make(device, biased=True)
    upstream = torch.randn_like(inputs[0])
    kept, recomputed = (gradients(inputs, index, upstream, recompute=flag) for flag in (False, True))
    assert all(map(torch.equal, kept, recomputed))


@pytest.mark.parametrize(
    "options", [{}, {"bias": True, "is_transposed": True, "activation": "gpt_oss", "limit": 7.0}]
)
def test_module(device, options):
    module = liger.nn.GroupedExperts(EXPERTS, HIDDEN, INTERMEDIATE, **options, device=device)
    x = torch.randn(TOKENS, HIDDEN, device=device)
    index = distinct(TOKENS, CHOICES, EXPERTS).to(device)
    weights = torch.rand(TOKENS, CHOICES, device=device)
    options = {name: value for name, value in options.items() if name != "bias"}
    expected = plain(x, index, weights, *module.parameters(), **options)
    torch.testing.assert_close(module(x, index, weights), expected)
    assert module.gate_up_proj.abs().max() <= HIDDEN**-0.5 and "activation=" in repr(module)


# --- memory -------------------------------------------------------------------------------------------------


def saved_bytes(function, *given):
    """Bytes of the storages that autograd saves, without the given tensors."""
    known = {t.untyped_storage().data_ptr() for t in given}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor keeps the address in use
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = function()
    del result
    return sum(size for size, _ in found.values())


@pytest.mark.skipif(triton_interpreted(), reason="the interpreter takes its time")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saved_bytes(device, dtype):
    index = distinct(64, CHOICES, EXPERTS).to(device)
    inputs = [t.requires_grad_() for t in make(device, dtype, tokens=64)]
    x, weights, *parameters = inputs

    def bytes_of(function, **options):
        return saved_bytes(lambda: function(x, index, weights, *parameters, **options), *inputs, index)

    slots = index.numel()
    assert bytes_of(liger.grouped_experts) == (slots + 1) * 2 * INTERMEDIATE * x.element_size()
    assert bytes_of(liger.grouped_experts, recompute=True) == 0
    assert 2 * bytes_of(liger.grouped_experts) <= bytes_of(plain)


def test_the_backward_writes_over_what_was_kept(device):
    inputs = [t.requires_grad_() for t in make(device)]
    kept = []

    def pack(tensor):
        if tensor.shape == (TOKENS * CHOICES + 1, 2 * INTERMEDIATE):
            kept.append(tensor)
        return tensor

    def loss():
        kept.clear()
        index = distinct(TOKENS, CHOICES, EXPERTS).to(device)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return liger.grouped_experts(inputs[0], index, *inputs[1:]).sum()

    for retain in (True, False):
        total = loss()
        (saved,), before = kept, kept[0].clone()
        total.backward(retain_graph=retain)
        assert torch.equal(saved, before) == retain


def test_a_tracer_records_two_ops():
    """Else a program would have the kernels that served the tracer's call."""
    inputs = [t.requires_grad_() for t in make("cpu")]

    def step(index, x, *rest):
        return torch.autograd.grad(liger.grouped_experts(x, index, *rest).sum(), (x, *rest))

    program = make_fx(step)(distinct(TOKENS, CHOICES, EXPERTS), *inputs)
    called = [str(node.target) for node in program.graph.nodes if "experts" in str(node.target)]
    assert called == [f"liger.grouped_experts_{direction}.default" for direction in ("forward", "backward")]
    index = distinct(TOKENS, CHOICES, EXPERTS)
    with torch.no_grad():
        found = program(index, *inputs)
    assert all(map(torch.equal, found, step(index, *inputs)))


# --- grouped GEMMs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [[0, 3, 3, 9], [4, 4, 4, 4], [0, 0, 0, 0], [2, 5, 7, 12]], ids=str)
@pytest.mark.parametrize("width", [8, 5])
def test_grouped_gemms(device, ends, width):
    rows, matrices = torch.randn(12, width, device=device), torch.randn(4, width, 8, device=device)
    others = torch.randn(12, 8, device=device)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    blocks = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
    products = [rows[block] @ matrix for block, matrix in zip(blocks, matrices, strict=True)]
    columns = torch.stack([rows[block].t() @ others[block] for block in blocks])
    sums = torch.stack([rows[block].sum(0) for block in blocks])
    for multiply in (grouped_mm.multiply_groups, grouped_mm.multiply_all):
        torch.testing.assert_close(multiply(rows, matrices, offsets)[: ends[-1]], torch.cat(products))
    for multiply in (grouped_mm.multiply_group_columns, grouped_mm.multiply_all_columns):
        torch.testing.assert_close(multiply(rows, others, offsets), columns)
    torch.testing.assert_close(grouped_mm.sum_groups(rows, offsets), sums)


def test_many_experts(device):
    """torch's kernel prepares at most 1023 groups."""
    inputs = make(device, tokens=4, choices=2, experts=1100, hidden=8, intermediate=4)
    check(torch.tensor([[0, 1099], [5, 5], [1024, 7], [1100, 1023]]).to(device), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_captured_graph_takes_another_routing(device, dtype):
    index, inputs = distinct(TOKENS, CHOICES, EXPERTS).to(device), make(device, dtype, biased=True)
    upstream = torch.randn_like(inputs[0])
    gradients(inputs, index, upstream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(inputs, index, upstream)
    index.copy_(torch.randint(EXPERTS + 1, index.shape))
    graph.replay()
    for a, b in zip(captured, gradients(inputs, index, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_bfloat16_does_not_synchronise(device):
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("torch has the kernel for compute capability 9.0 and 10.0")
    index, inputs = distinct(TOKENS, CHOICES, EXPERTS).to(device), make(device, torch.bfloat16, biased=True)
    upstream = torch.randn_like(inputs[0])
    gradients(inputs, index, upstream)
    with no_synchronisation():
        gradients(inputs, index, upstream)


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"top_k_index": lambda t: t - 9}, r"top_k_index has the element -9, expected expert indices of at least 0"),
        ({"gate_up_proj": lambda t: t.mT}, r"gate_up_proj has shape \(5, 16, 48\), expected \(5, 48, 16\)"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)  # fmt: skip
def test_bad_input(change, message):
    x, weights, gate_up, down = make("cpu")
    given = {
        "x": x, "top_k_index": distinct(TOKENS, CHOICES, EXPERTS), "top_k_weights": weights,
        "gate_up_proj": gate_up, "down_proj": down, "activation": "silu", "limit": None,
    }  # fmt: skip
    given["top_k_index"][0, 0] = 0
    for name, function in change.items():
        given[name] = function(given[name])
    with pytest.raises(error_about(message), match=f"grouped_experts: {message}"):
        liger.grouped_experts(**given)


@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [*FORMS, *ROUTINGS, "gate_up_proj", "down_proj"])
@pytest.mark.covering(2)
def test_adapters_of_frozen_weights(device, form, dtype, rank):
    """Against the sums of weights and adapters: values, gradients of x, routing weights and factors."""
    options = dict(FORMS.get(form, {}))
    is_transposed = options.pop("is_transposed", False)
    index = ROUTINGS[form if form in ROUTINGS else "distinct"](TOKENS, CHOICES, EXPERTS).to(device)
    x, weights, *parameters = make(device, dtype, biased=True, transposed=is_transposed)
    if form.endswith("clamped") or options.get("limit"):
        options["limit"] = 60.0  # which no rounding of a sum reaches
    sizes = {"gate_up_proj": (HIDDEN, 2 * INTERMEDIATE), "down_proj": (INTERMEDIATE, HIDDEN)}
    adapted = [form] if form in sizes else list(sizes)
    factors = [
        (torch.randn(EXPERTS, *shape, device=device) / 4).to(dtype)
        for name in adapted
        for shape in ((sizes[name][0], rank), (rank, sizes[name][1]))
    ]
    gate = Gate(**{"activation": "silu", "is_interleaved": False, "alpha": 1.702, "limit": None, **options})

    def pairs(factors):
        given = iter(zip(factors[::2], factors[1::2], strict=True))
        return [next(given) if name in adapted else None for name in sizes]

    def ours(x, weights, *factors):
        adapters = [pair and adapters_of(*pair, 0.75, x.dtype) for pair in pairs(factors)]
        readers = [lambda weight: weight] * 2
        return adapted_experts(x, index, weights, parameters, adapters, gate, is_transposed, readers)

    def theirs(x, weights, *factors):
        frozen = [p.to(x.dtype) for p in parameters]
        for at, pair in enumerate(pairs(factors)):
            if pair is not None:
                delta = 0.75 * (pair[0] @ pair[1])
                frozen[at] = frozen[at] + (delta if is_transposed else delta.transpose(1, 2))
        return plain(x, index, weights, *frozen, is_transposed=is_transposed, **options)

    rounding = max(torch.finfo(dtype).eps / torch.finfo(torch.float32).eps, 16.0)
    check_draws(ours, theirs, [[x, weights, *factors]], intermediate=rounding)


@pytest.mark.parametrize("name", ["grad_y", "kept", "top_k_weights", "gate_up_proj"])
def test_the_backward_op_checks_its_arguments(device, name):
    """torch.compile and torch.export call it, with tensors that autograd has not seen."""
    op = torch.ops.liger.grouped_experts_backward.default
    given = list(SAMPLES["grouped_experts_backward"](device)[0])
    place = [a.name for a in op._schema.arguments].index(name)
    given[place] = given[place][:-1]
    with pytest.raises(RuntimeError, match=f"grouped_experts: {name} has shape"):
        op(*given)
