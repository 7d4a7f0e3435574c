# SPDX-License-Identifier: BSD-3-Clause
"""What the forward of fused_linear_logprobs keeps for its backward: which, when, for how long."""

import gc
import random
import weakref

import pytest
import torch
from cases import DTYPES, assert_as_exact_as_torch
from test_fused_linear_logprobs import BUDGETS, OPTIONS, ROWS, VOCAB, leaves, make, plain, results
from torch.utils.checkpoint import checkpoint

import liger
from liger._core.head import kept_logits, lm_head
from liger._core.head.sm90_plan import ENGINE, plan_chunks_sm90

MIB = 1 << 20


def kept(*tensors, **options):
    return liger.fused_linear_logprobs(*tensors, recompute=False, metrics=("entropy", "argmax"), **options)


@pytest.mark.covering(2)
@pytest.mark.parametrize("entropy", [False, True], ids=["logprobs", "entropy"])
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_float64(device, dtype, options, budget, entropy):
    options = OPTIONS[options]
    tensors = make(device, dtype)
    mine = results(lambda *t: kept(*t, memory_budget=BUDGETS[budget], **options), leaves(tensors), entropy)
    torchs = results(lambda *t: plain(*t, **options), leaves(tensors), entropy)
    exact = results(lambda *t: plain(*t, **options), leaves(tensors, torch.float64), entropy)
    names = ("logprobs", "entropy", "hidden", "weight", "bias")
    for name, a, b, c in zip(names, mine, torchs, exact, strict=True):
        assert_as_exact_as_torch(a, b, c, name, intermediate=8.0)


@pytest.fixture
def products(monkeypatch):
    """Rows of every GEMM of the head: logits, then gradients."""
    rows = []
    real_logits, real_product = lm_head.write_linear, lm_head.product

    def write_linear(x, *rest):
        rows.append(x.shape[0])
        return real_logits(x, *rest)

    def product(a, b, out, **how):
        rows.append(a.shape[b.shape[0] != VOCAB])
        return real_product(a, b, out, **how)

    monkeypatch.setattr(lm_head, "write_linear", write_linear)
    monkeypatch.setattr(lm_head, "product", product)
    return rows


@pytest.mark.parametrize(("recompute", "count"), [(False, 3), (True, 4), (None, 4)])
def test_products(products, recompute, count):
    hidden, weight, targets, bias = leaves(make("cpu"))
    logprobs = liger.fused_linear_logprobs(
        hidden, weight, targets, bias, temperature=0.7, recompute=recompute
    )
    assert products == [ROWS]
    logprobs.sum().backward()
    assert sum(products) == count * ROWS


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_what_needs_a_gradient(device, products, frozen):
    tensors = leaves(make(device)[:3])
    tensors[frozen].requires_grad_(False)
    (wanted,) = torch.autograd.grad(kept(*tensors).logprobs.sum(), tensors[1 - frozen])
    both = leaves(tensors)
    others = torch.autograd.grad(plain(*both)[0].sum(), both[1 - frozen])
    torch.testing.assert_close(wanted, *others, rtol=1e-4, atol=1e-5)
    if device.type == "cpu":
        assert products == [ROWS, ROWS]


def test_without_a_gradient_nothing_is_kept(products):
    tensors = make("cpu")
    out = kept(*tensors)
    with torch.no_grad():
        kept(*leaves(tensors))
    assert not out.logprobs.requires_grad
    ones = [None if t is None else t.requires_grad_() if t.is_floating_point() else t for t in make("cpu")]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        liger.fused_linear_logprobs(*ones, temperature=0.7)
    assert (ROWS, VOCAB) not in saved


def test_it_is_kept_until_the_backward(device):
    """Whatever else the caller refers to."""
    tensors = leaves(make(device))
    saved = []

    def pack(tensor):
        if tensor.shape == (ROWS, VOCAB) or tensor.shape == (ROWS, -(-VOCAB // 4) * 4):
            saved.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = kept(*tensors)
    assert len(saved) == 1 and saved[0]() is not None
    out.logprobs.sum().backward()
    gc.collect()
    assert saved[0]() is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(device, reentrant):
    tensors = leaves(make(device))
    wanted = [t for t in tensors if t.requires_grad]

    def function(*t):
        return tuple(kept(*t))[:2]

    logprobs, entropy = checkpoint(function, *tensors, use_reentrant=reentrant)
    (logprobs.sum() + entropy.sum()).backward()
    out = kept(*tensors)
    expected = torch.autograd.grad(out.logprobs.sum() + out.entropy.sum(), wanted)
    assert all(torch.equal(t.grad, other) for t, other in zip(wanted, expected, strict=True))


# --- the choice ---------------------------------------------------------------------------------------------


class OnGpu:
    """Stands for a tensor on a GPU of compute capability 9.0."""

    is_cuda = True

    def __init__(self, *shape, dtype=torch.bfloat16):
        self.shape, self.dtype, self.device = shape, dtype, torch.device("cuda", 0)


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(kept_logits, "_engine_is_chosen", lambda: True)
    monkeypatch.setattr(kept_logits, "_device_has_engine", lambda index: True)


def choice(rows, hidden, vocab, budget=None, recompute=None, bias=None, softcap=None, dtype=torch.bfloat16):
    x, weight = (OnGpu(n, hidden, dtype=dtype) for n in (rows, vocab))
    return kept_logits.choose(x, weight, bias, softcap, budget, recompute)


def test_exponentials_where_they_fit_the_budget(engine, monkeypatch):
    llama = 8192, 2048, 128256
    needed = 2 * 8192 * 128256
    assert kept_logits.exponentials_bytes(8192, 128256) == needed == 2004 * MIB
    assert choice(*llama) == choice(*llama, needed - 1) == "nothing"
    assert choice(*llama, needed) == "exponentials"
    assert choice(2048, *llama[1:]) == "exponentials"  # 501 of 512 MiB
    assert choice(*llama, recompute=False) == "exponentials"
    assert choice(*llama, needed, recompute=True) == "nothing"
    monkeypatch.setenv("LIGER_MEMORY_BUDGET", "2G")
    assert choice(*llama) == "exponentials"
    assert choice(*llama, needed - 1) == "nothing"


@pytest.mark.parametrize(
    "case",
    [{"bias": 1}, {"softcap": 30.0}, {"dtype": torch.float32}, {"rows": 255}, {"hidden": 1000}],
    ids=str,
)
def test_logits_where_the_engine_does_not_take_the_call(engine, case):
    case = {"rows": 1024, "hidden": 1024, "vocab": 1024, **case}
    assert choice(**case) == "nothing"
    assert choice(**case, recompute=False) == "logits"


def test_dtypes_and_hidden_sizes_of_the_engine(engine):
    assert choice(1024, 1024, 1024, dtype=torch.float16) == "exponentials"
    assert choice(1024, 1040, 1024) == "exponentials"
    assert choice(1024, 1048, 1024) == "nothing"


@pytest.mark.parametrize(("chosen", "present"), [(True, False), (False, True)])
def test_logits_without_the_engine(monkeypatch, chosen, present):
    monkeypatch.setattr(kept_logits, "_engine_is_chosen", lambda: chosen)
    monkeypatch.setattr(kept_logits, "_device_has_engine", lambda index: present)
    assert choice(1024, 1024, 1024) == "nothing"
    assert choice(1024, 1024, 1024, recompute=False) == "logits"


def test_the_engine_takes_what_is_chosen():
    draw = random.Random(0)
    for _ in range(500):
        rows, hidden, vocab = draw.randint(1, 40000), draw.randint(1, 8192), draw.randint(1, 300000)
        hidden = draw.choice([hidden, ENGINE.hidden_unit * (hidden // ENGINE.hidden_unit + 1)])
        if kept_logits.sizes_for_engine(rows, hidden):
            assert plan_chunks_sm90(rows, hidden, vocab, True, True, True).chunks


# --- bad input ----------------------------------------------------------------------------------------------


def raw_forward(keep):
    hidden, weight, targets, bias = make("cpu")
    return torch.ops.liger.fused_linear_logprobs_forward(
        hidden, weight, targets, bias, 0.7, -100, None, None, True, False, keep=keep, need_grad_weight=True
    )


def test_unknown_word():
    with pytest.raises(RuntimeError, match="keep is 'all', expected 'nothing', 'logits' or 'exponentials'"):
        raw_forward("all")


def test_exponentials_without_the_engine():
    with pytest.raises(
        RuntimeError, match="keep is 'exponentials', expected 'nothing' or 'logits': the wgmma"
    ):
        raw_forward("exponentials")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kept, rows: (kept[:-1], rows), r"kept has shape \(22, 37\), expected \(23, 37\)"),
        (lambda kept, rows: (kept, rows[:1]), r"kept_rows has shape \(1, 23\), expected \(3, 23\)"),
        (lambda kept, rows: (None, rows), "kept has shape None"),
    ],
)
def test_what_another_forward_has_kept(change, message):
    hidden, weight, targets, bias = make("cpu")
    *_, kept, rows = raw_forward("logits")
    grad = torch.ones(ROWS)
    arguments = hidden, weight, targets, bias, 0.7, -100, None, None, None, True, True, True, "logits"
    torch.ops.liger.fused_linear_logprobs_backward(grad, grad, *arguments, kept, rows)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.liger.fused_linear_logprobs_backward(grad, grad, *arguments, *change(kept, rows))
