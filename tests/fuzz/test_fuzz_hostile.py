# SPDX-License-Identifier: BSD-3-Clause
"""Numbers at which formulas lose their digits, against torch's own functions.

Rows with a common offset of up to 3e38, infinities, numbers whose squares overflow, options at the ends of
their range, layouts of all kinds. The rule is the rule of :func:`cases.assert_as_exact_as_torch`: what
engine.py allows beside it, the change of the exact result by a rounding of the inputs, is as large as the
result here. Where plain torch in the same dtype gives infinity or NaN for a finite number, or the other way
round, nothing is compared.
"""

import formulas
import torch
import torch.nn.functional as F
from cases import DTYPES
from engine import Numbers, fuzz, maybe, one_of, sizes
from hypothesis import strategies as st

import liger

EPS = torch.finfo(torch.float32).eps
OFFSETS = (0.0, 0.0, 1e4, -1e8, 1e18, -1e30, 3e38)
SPECIALS = (torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-40, 0.0)


def hostile(draw, numbers, *shape, specials=SPECIALS, offsets=OFFSETS):
    """Rows that ``numbers.dtype`` has exactly: an offset per tensor, and some elements replaced by a special
    one."""
    dtype = numbers.dtype
    offset = one_of(draw, *offsets)
    if abs(offset) > torch.finfo(dtype).max:
        offset = 0.0
    step = max(0.125, 2 * torch.finfo(dtype).eps * abs(offset))
    values = torch.randint(-40, 3, shape, generator=numbers.generator).double() * step + offset
    if values.numel() and draw(st.booleans()):
        where = torch.rand(shape, generator=numbers.generator) < one_of(draw, 0.05, 0.3)
        values[where] = one_of(draw, *specials)
    values = torch.where(
        values.isfinite(), values.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max), values
    )
    return numbers.lay(values.to(dtype))


def run(function, tensors, wanted, upstream, dtype=None):
    leaves = {}
    for name, tensor in tensors.items():
        wide = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        leaves[name] = wide.detach().requires_grad_() if name in wanted else wide
    result = function(**leaves)
    if upstream is None:
        upstream = torch.randn(result.shape, dtype=torch.float64)
    gradients = torch.autograd.grad(
        result, [leaves[name] for name in wanted], upstream.to(result.device, result.dtype), allow_unused=True
    )
    gradients = (
        torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(wanted, gradients, strict=True)
    )
    return upstream, {
        "result": result.detach(),
        **{f"gradient of {n}": g for n, g in zip(wanted, gradients, strict=True)},
    }


def check(ours, plain, tensors, wanted, inherent=(0.0, 0.0)):
    """``inherent``: errors that no result, and no gradient, is without."""
    torch.manual_seed(0)
    upstream, mine = run(ours, tensors, wanted, None)
    _, theirs = run(plain, tensors, wanted, upstream)
    _, exact = run(plain, tensors, wanted, upstream, torch.float64)
    for name, found in mine.items():
        right, other = exact[name], theirs[name]
        assert found.shape == right.shape, name
        # What overflows in this dtype alone is no infinity of the formula.
        kind = [t.to(found.dtype).isfinite() for t in (right, other)]
        compared = kind[0] == kind[1]
        finite = compared & kind[0]
        rounded = right.to(found.dtype)
        same = [(t == rounded) | (t.isnan() & rounded.isnan()) for t in (found, other)]
        apart = compared & ~kind[0] & same[1] & ~same[0]
        assert not apart.any(), f"{name}: {found[apart]} is not {right[apart]}"
        assert found[finite].isfinite().all(), f"{name}: {found[finite]} is not {right[finite]}"
        if not finite.any():
            continue
        errors = [(t[finite].double() - right[finite]).abs().max().item() for t in (found, other)]
        eps = 2 * torch.finfo(found.dtype).eps + 8 * EPS
        floor = eps * right[finite].abs().max().item() + torch.finfo(found.dtype).tiny
        floor += inherent[name != "result"]
        assert errors[0] <= 2 * errors[1] + floor, (
            f"{name}: error {errors[0]:.3g}, torch {errors[1]:.3g}, {floor:.3g}"
        )


def front(draw):
    return tuple(draw(st.lists(st.sampled_from([0, 1, 2, 5]), min_size=1, max_size=2)))


@fuzz(1)
def test_softmax(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, one_of(draw, torch.float32, *DTYPES))
    x = hostile(draw, numbers, *front(draw), draw(sizes))
    check(liger.softmax, lambda x: F.softmax(x, -1), {"x": x}, ["x"])


@fuzz(5)
def test_cross_entropy(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, one_of(draw, torch.float32, *DTYPES))
    rows, vocab = one_of(draw, 0, 1, 3, 7), one_of(draw, 2, 3, 17, 64)
    logits = hostile(draw, numbers, rows, vocab, specials=(-torch.inf, torch.inf, torch.nan, 3e38, -3e38))
    target = numbers.classes(vocab, rows, ignored=(-100,))
    softcap, smoothing = maybe(draw, 1e-3, 30.0, 1e30, 3e38), one_of(draw, 0.0, 0.1)
    reduction = one_of(draw, "mean", "sum", "none")

    def plain(logits, target):
        # An ignored row has no gradient in liger, whatever is there.
        z = torch.where(target.unsqueeze(1) == -100, 0.0, formulas.up(logits))
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        return F.cross_entropy(z, target.long(), reduction=reduction, label_smoothing=smoothing)

    options = {"softcap": softcap, "label_smoothing": smoothing, "reduction": reduction}
    # tanh rounds the logits again, by two units of float32 where torch may round by none.
    live = logits[(target != -100).unsqueeze(1) & logits.isfinite()].double()
    rounded = (
        0.0 if softcap is None or not live.numel() else 4 * EPS * live.abs().max().clamp(max=softcap).item()
    )
    check(
        lambda **given: liger.cross_entropy(**given, **options),
        plain,
        {"logits": logits, "target": target},
        ["logits"],
        (rounded * (rows if reduction == "sum" else 1), rounded),
    )


@fuzz(3)
def test_head(device, data):
    """Hidden states of the unit matrix, so that the transposed weight are the logits."""
    draw = data.draw
    numbers = Numbers(draw, device, one_of(draw, torch.float32, *DTYPES))
    rows, vocab = one_of(draw, 1, 3, 7), one_of(draw, 2, 3, 17)
    weight = hostile(draw, numbers, vocab, rows, specials=(3e38, -3e38, 0.0))
    x = torch.eye(rows, dtype=numbers.dtype, device=device)
    target = numbers.classes(vocab, rows, ignored=(-100,))
    reduction = one_of(draw, "mean", "sum", "none")

    def plain(input, weight, target):
        z = torch.where(target.unsqueeze(1) == -100, 0.0, F.linear(input, weight))
        return F.cross_entropy(formulas.up(z), target.long(), reduction=reduction)

    check(
        lambda **given: liger.fused_linear_ce(**given, reduction=reduction),
        plain,
        {"input": x, "weight": weight, "target": target},
        ["weight"],
    )


@fuzz(4)
def test_divergences(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, one_of(draw, torch.float32, *DTYPES))
    rows, vocab = one_of(draw, 1, 3, 7), one_of(draw, 2, 3, 17)
    # Differences of larger numbers overflow.
    given = {"specials": (-1e30, 0.0), "offsets": OFFSETS[:-1]}
    student, teacher = (hostile(draw, numbers, rows, vocab, **given) for _ in range(2))
    kind, temperature = (
        one_of(draw, "forward_kl", "reverse_kl", "jsd", "tvd"),
        one_of(draw, 1.0, 1e-3, 1e3, 1e30),
    )
    function = {"jsd": liger.jsd, "tvd": liger.tvd}.get(kind, liger.kl_div)
    options = {"reverse": kind == "reverse_kl"} if function is liger.kl_div else {}

    def plain(student, teacher):
        return formulas.distance(
            kind, student, teacher, None, None, None, 0.5, temperature, False, -100, "none"
        )

    check(
        lambda **given: function(**given, temperature=temperature, reduction="none", **options),
        plain,
        {"student": student, "teacher": teacher},
        ["student"],
        # Logarithms of probabilities cancel, and so do the probabilities.
        (8 * EPS, 8 * EPS / temperature),
    )


@fuzz(2)
def test_norms(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, one_of(draw, torch.float32, *DTYPES))
    name, width = one_of(draw, "rms_norm", "layer_norm"), draw(sizes.filter(lambda n: n > 1))
    # Squares of more than 1e19 overflow, here and there.
    x = hostile(
        draw,
        numbers,
        *front(draw),
        width,
        specials=(torch.inf, torch.nan, 1e-40, 0.0, 1e15),
        offsets=OFFSETS[:-2],
    )
    weight = numbers.normal(width)
    eps = one_of(draw, 1e-6, 1e-30, 0.5)

    def plain(x, weight):
        wide = formulas.up(x)
        if name == "layer_norm":
            return F.layer_norm(wide, (width,), weight.to(wide.dtype), None, eps).to(x.dtype)
        return F.rms_norm(wide, (width,), weight.to(wide.dtype), eps).to(x.dtype)

    options = {"casting_mode": "gemma"} if name == "rms_norm" else {}
    given = {"x": x, "weight": weight}
    if name == "layer_norm":
        # The mean is rounded: so much of the standard deviation.
        spread = (x.double().var(-1, correction=0) + eps).sqrt()
        rounded = EPS * x.double().abs().amax(-1) / spread if x.numel() else spread
        finite = rounded[rounded.isfinite()]
        size = finite.max().item() * weight.abs().max().item() if finite.numel() else 0.0
        check(
            lambda x, weight: liger.layer_norm(x, weight, None, eps),
            plain,
            given,
            ["x"],
            (size, size / eps**0.5),
        )
    else:
        check(lambda x, weight: liger.rms_norm(x, weight, eps, **options), plain, given, ["x"])


@fuzz(1)
def test_gated(device, data):
    draw = data.draw
    numbers = Numbers(draw, device, one_of(draw, torch.float32, *DTYPES))
    name = one_of(draw, "silu", "gelu", "gelu_tanh", "relu_squared")
    shape = (*front(draw), draw(sizes))
    gate, up = (hostile(draw, numbers, *shape) for _ in range(2))
    if name == "relu_squared":
        check(liger.relu_squared, lambda x: F.relu(formulas.up(x)).square().to(x.dtype), {"x": gate}, ["x"])
        return
    activation = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[name]
    options = {} if name == "silu" else {"approximate": "tanh" if name == "gelu_tanh" else "none"}

    def ours(gate, up):
        return (liger.swiglu if name == "silu" else liger.geglu)(gate, up, **options)

    def plain(gate, up):
        return (activation(formulas.up(gate)) * formulas.up(up)).to(gate.dtype)

    check(ours, plain, {"gate": gate, "up": up}, ["gate", "up"])
