# SPDX-License-Identifier: BSD-3-Clause
"""How the fuzzer runs a case, and by which rule it compares.

Hypothesis draws sizes, options, layouts and a seed; the numbers themselves come from torch's generator by
that seed, so that a case stays small. Each is computed three times: by liger, by the formula of formulas.py
in the same dtype, and by that formula in float64.

An error may be two roundings of the result and eight of float32, in which it is computed, plus four times the
sum of two: the error of plain torch in the same dtype, and what a stable algorithm cannot avoid, the change
of the exact result where its inputs change by a rounding of their own, but at least eight of float32. Torch's
error and the size of the result are the largest of this case and of four others (twelve in long runs) with
the same options, other numbers; the change is the larger one of two (four): a number may be lucky, or small
by cancellation. Nothing is tuned by case.

LIGER_FUZZ_CASES: how many cases, in all tests together; without it the few thousand of every test run, which
are the same each time. With it they are others each time, unless LIGER_FUZZ_SEED is set; the seed is printed.
"""

import os

import hypothesis
import torch
from hypothesis import strategies as st

import liger
from liger._core.runtime.environment import triton_interpreted

CASES = int(os.environ.get("LIGER_FUZZ_CASES", "0"))
# The shares of all tests together.
SHARES = 140
# Triton's interpreter takes a hundred times as long; on a GPU every test runs once per backend, and Triton
# compiles.
DEFAULT_CASES = 100 if triton_interpreted() else 600 if torch.cuda.is_available() else 1500


@st.composite
def _dtypes(draw, halves):
    found = [torch.float32, torch.float32] if halves else [torch.float32]
    if halves:
        found.append(torch.float16)
    if halves and not triton_interpreted():  # Its bfloat16 products are wrong.
        found.append(torch.bfloat16)
    if liger._core.op.backend._requested[0] == "torch":  # The others have no float64.
        found.append(torch.float64)
    return draw(st.sampled_from(found))


dtypes, wide_dtypes = _dtypes(True), _dtypes(False)


def fuzz(share):
    """Decorator of a test that takes ``data`` (and fixtures); ``share`` of ``SHARES`` of all cases are its
    own."""

    def decorate(function):
        settings = hypothesis.settings(
            max_examples=max((CASES or DEFAULT_CASES) * share // SHARES, 5),
            deadline=None,
            database=None,
            derandomize=not CASES,
            print_blob=True,
            # What fails is small already, and shrinking takes minutes.
            phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        )

        test = settings(hypothesis.given(data=st.data())(function))
        return hypothesis.seed(SEED)(test) if CASES else test

    return decorate


SEED = int(os.environ.get("LIGER_FUZZ_SEED") or int.from_bytes(os.urandom(4), "little"))

# --- tensors ------------------------------------------------------------------------------------------------

sizes = st.sampled_from([1, 2, 3, 5, 7, 8, 16, 17, 33])
seeds = st.integers(0, 2**31 - 1)


def one_of(draw, *values):
    return draw(st.sampled_from(values))


def maybe(draw, *values):
    """None, half of the time, or one of the values."""
    return one_of(draw, *(None for _ in values), *values)


def leading(draw):
    """Sizes in front of the last dimension, of which one may be 0."""
    return draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 9]), min_size=0, max_size=3))


class Numbers:
    """Random tensors of one case, in memory that is laid out in ways that are drawn."""

    def __init__(self, draw, device, dtype):
        self.draw, self.device, self.dtype = draw, device, dtype
        self.generator = torch.Generator().manual_seed(draw(seeds))

    def normal(self, *shape, scale=1.0, dtype=None, alike=True):
        """``alike``: rows may be one row, expanded. Not rows of a head's weight: its classes would be
        alike."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        return self.lay(values.to(dtype or self.dtype), alike)

    def uniform(self, *shape, low=0.0, high=1.0, dtype=None):
        values = torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low
        return self.lay(values.to(dtype or self.dtype))

    def classes(self, vocab, *shape, ignored=(), share=0.3, dtype=None):
        """Class indices; a share of them is replaced by one of ``ignored``."""
        values = torch.randint(vocab, shape, generator=self.generator)
        for index in ignored:
            values[torch.rand(shape, generator=self.generator) < share] = index
        return self.lay(values.to(dtype or one_of(self.draw, torch.int64, torch.int64, torch.int32)))

    def flags(self, *shape, share=0.7):
        return self.lay(torch.rand(shape, generator=self.generator) < share)

    def lay(self, tensor, alike=True):
        """The same values at other places, or for "expanded" one row of them for all."""
        tensor = tensor.to(self.device)
        kind = one_of(
            self.draw, "dense", "dense", "dense", "strided", "offset", "transposed", "wide", "expanded", "rows",
            "channels last",
        )  # fmt: skip
        if tensor.dim() == 0 or kind == "dense":
            return tensor
        if kind == "strided":
            return tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])[..., ::2].copy_(tensor)
        if kind == "offset":
            return tensor.new_zeros(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
        if kind == "transposed":
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        if kind == "rows":
            return tensor.new_zeros(2 * tensor.shape[0], *tensor.shape[1:])[1::2].copy_(tensor)
        if kind == "channels last":
            return (
                tensor.movedim(min(1, tensor.dim() - 1), -1)
                .contiguous()
                .movedim(-1, min(1, tensor.dim() - 1))
            )
        if kind == "wide":
            return tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 3)[..., : tensor.shape[-1]].copy_(
                tensor
            )
        return tensor[:1].expand_as(tensor) if alike and tensor.shape[0] else tensor


# --- the comparison -----------------------------------------------------------------------------------------


_EPS_64 = torch.finfo(torch.float64).eps


def _cast(value, dtype):
    """The tensor in another dtype if it floats; None leaves it as it is."""
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floats and dtype is not None else value


def _run(function, given, wanted, upstream):
    """(outputs, gradients) by name."""
    leaves = {n: t.detach().requires_grad_() if n in wanted else t for n, t in given.items()}
    outputs = _as_dict(function(**leaves))
    graded = {n: o for n, o in outputs.items() if o.requires_grad}
    grads = {}
    if graded and wanted:
        weights = [upstream[n].to(o.device, o.dtype) for n, o in graded.items()]
        found = torch.autograd.grad(
            list(graded.values()), [leaves[n] for n in wanted], weights, allow_unused=True
        )
        grads = {
            f"gradient of {n}": torch.zeros_like(leaves[n]) if g is None else g
            for n, g in zip(wanted, found, strict=True)
        }
    return {n: o.detach() for n, o in outputs.items()} | grads


def _perturbed(given, wanted, relative, generator):
    def moved(tensor):
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return tensor.double() * (1 + relative * noise.to(tensor.device))

    return {n: moved(t) if n in wanted else _cast(t, torch.float64) for n, t in given.items()}


def _others(given, wanted, generator):
    """Other numbers in the place of those that are wanted, of the same size."""

    def another(tensor):
        values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
        finite = tensor[tensor.isfinite()].double()
        size = finite.square().mean().sqrt() if finite.numel() else 1.0
        return torch.where(tensor.isfinite(), values * size, tensor.double()).to(tensor.dtype)

    return {n: another(t) if n in wanted else t for n, t in given.items()}


def _error(actual, exact):
    """The largest absolute difference where the exact value is finite."""
    return torch.where(exact.isfinite(), actual.double() - exact, 0.0).abs().max().item()


def _largest(exact):
    return torch.where(exact.isfinite(), exact, 0.0).abs().max().item()


def _as_dict(outputs):
    return {"result": outputs} if isinstance(outputs, torch.Tensor) else outputs


MAGNITUDE = "magnitude of the terms of "


def compare(ours, formula, given, wanted, plain=None, vary=None):
    """Asserts that two functions of the arguments ``given`` agree, with the gradients of those that are
    ``wanted``.

    Each returns a tensor, or tensors by name; ``formula`` may return more than ``ours``, such as
    ``MAGNITUDE + name``: the sum of the magnitudes of the terms of a sum, some of which may cancel. ``plain``
    is torch's own function where there is one; without it the formula stands for plain torch, too. ``vary``
    names the tensors that
    have other numbers in other cases, by default those that are wanted.
    """
    if plain is None or not all(given[n].numel() for n in wanted):
        plain = formula  # Torch's group_norm fails in its backward where there is nothing.
    largest = max(torch.finfo(given[n].dtype).eps for n in wanted)
    single = min(torch.finfo(torch.float32).eps, largest)
    relative = max(8 * single, largest)
    # In float64 the formula is no more exact than what is tested, so its error is that in float32, scaled.
    tested, scale = (
        (None, 1.0) if largest > _EPS_64 else (torch.float32, _EPS_64 / torch.finfo(torch.float32).eps)
    )
    generator = torch.Generator().manual_seed(0)

    def exact_of(given):
        return _run(formula, {n: _cast(t, torch.float64) for n, t in given.items()}, wanted, upstream)

    with torch.no_grad():
        results = _as_dict(formula(**given))
    # Numbers that every dtype holds: else a gradient that is their sum alone has an error before it begins.
    upstream = {
        n: torch.randn(o.shape, generator=generator).bfloat16().double().to(o.device)
        for n, o in results.items()
    }
    mine, exact = _run(ours, given, wanted, upstream), exact_of(given)
    moved = [
        _run(formula, _perturbed(given, vary or wanted, relative, generator), wanted, upstream)
        for _ in range(4 if CASES else 2)
    ]
    draws = [given, *(_others(given, vary or wanted, generator) for _ in range(12 if CASES else 4))]
    of_plain = [
        (_run(plain, {n: _cast(t, tested) for n, t in one.items()}, wanted, upstream), exact_of(one))
        for one in draws
    ]
    for name, actual in mine.items():
        expected = exact[name]
        assert actual.shape == expected.shape, (
            f"{name}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
        )
        if expected.numel() == 0:
            continue
        if not expected.is_floating_point():
            assert torch.equal(actual.to(expected.dtype), expected), f"{name}: {actual} is not {expected}"
            continue
        finite = expected.isfinite()
        if not of_plain[0][0][name].isfinite().eq(finite).all():
            # Not even torch tells the infinities of this dtype from the finite.
            continue
        infinite = [torch.where(finite, 0.0, t.double()).nan_to_num(nan=1e9) for t in (actual, expected)]
        assert torch.equal(*infinite), f"{name}: {actual} is not {expected}"
        theirs = max(_error(p[name], e[name]) for p, e in of_plain) * scale
        size = max(_largest(e.get(MAGNITUDE + name, e[name])) for _, e in of_plain)
        floor = (2 * torch.finfo(actual.dtype).eps + 8 * single) * size + torch.finfo(actual.dtype).tiny
        if largest == _EPS_64:
            # The expected value is a float64 formula too.
            floor += 64 * _EPS_64 * size
        change, error = max(_error(m[name], expected) for m in moved), _error(actual, expected)
        assert error <= 4 * (theirs + change) + floor, (
            f"{name}: error {error:.3g}, plain torch {theirs:.3g}, rounding {floor:.3g}, input {change:.3g}"
        )
