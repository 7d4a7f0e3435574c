"""liger.debug.tile_mass in the engine of compute capability 9.0: its counts against float64, and when it counts."""

import pytest
import torch
from cuda_graphs import capture, no_synchronisation
from logprobs_sm90 import KEPT
from sm90_engine import BESIDE, BFLOAT16, KINDS, SHAPES, SUMS, assert_same_bits, run
from tile_mass_cases import assert_counts, sloped_layer
from torch.nn.functional import linear

import liger
from liger.debug import tile_mass

pytestmark = pytest.mark.gpu


def sloped(shape, device, ignored=0.25):
    return sloped_layer(shape.rows, shape.hidden, shape.vocab, device, ignored)


def exact_logits(x, weight):
    return linear(x.double(), weight.double())


@pytest.mark.parametrize("name", SHAPES)
def test_every_kind_of_plan(sm90, name):
    """Partial tiles of rows and classes, one chunk and several; and the gradients have the same bits."""
    shape = SHAPES[name]
    layer = sloped(shape, sm90)
    plain = run(shape, *layer)
    with tile_mass() as mass:
        counted = run(shape, *layer)
    assert_same_bits([[[output.loss, output.logprobs], grads] for output, grads in (plain, counted)])
    exact = assert_counts(mass.counts(), exact_logits(*layer[:2]), layer[2])
    if shape.vocab > 2000:
        assert 0 < exact.below[2] < exact.below[0] < exact.tiles
        assert 0 < exact.below_without_target[0] < exact.below[0]


@pytest.mark.parametrize("ignored", [0.0, 0.5, 0.95])
@KINDS
def test_ignored_rows(sm90, shape, ignored):
    x, weight, target = sloped(shape, sm90, ignored)
    x[target == -100] = torch.inf
    with tile_mass() as mass:
        run(shape, x, weight, target)
    x[target == -100] = 0
    assert_counts(mass.counts(), exact_logits(x, weight), target)


@KINDS
def test_only_what_has_a_gradient(sm90, shape):
    layer = sloped(shape, sm90)
    with tile_mass() as mass:
        run(shape, *layer, trained=(False, False))
    with pytest.raises(RuntimeError, match="has computed no gradient"):
        mass.counts()
    for trained in ((True, False), (False, True)):
        with tile_mass() as mass:
            run(shape, *layer, trained=trained)
        assert_counts(mass.counts(), exact_logits(*layer[:2]), layer[2])


def test_all_rows_ignored(sm90):
    with tile_mass() as mass:
        run(BESIDE, *sloped(BESIDE, sm90, 1.0))
    with pytest.raises(RuntimeError, match="has computed no gradient"):
        mass.counts()


@KINDS
def test_losses_of_rows(sm90, shape):
    """Their gradients come from a second pass in the backward, which counts."""
    layer = sloped(shape, sm90)
    with tile_mass() as mass:
        run(shape, *layer, upstream=torch.rand(shape.rows, device=sm90), reduction="none")
    assert_counts(mass.counts(), exact_logits(*layer[:2]), layer[2])


@pytest.mark.parametrize("option", ["bias", "softcap", "label smoothing", "metrics"])
@KINDS
def test_options(sm90, shape, option):
    x, weight, target = sloped(shape, sm90)
    bias = torch.randn(shape.vocab, device=sm90).to(BFLOAT16) if option == "bias" else None
    logits = linear(x.double(), weight.double(), None if bias is None else bias.double())
    chosen = {
        "softcap": {"softcap": 15.0},
        "label smoothing": {"label_smoothing": 0.1},
        "metrics": {"return_entropy": True, "return_predicted_tokens": True},
    }.get(option, {})
    if option == "softcap":
        logits = 15 * torch.tanh(logits / 15)
    with tile_mass() as mass:
        run(shape, x, weight, target, bias=bias, **chosen)
    assert_counts(mass.counts(), logits, target)


@KINDS
def test_sums_beyond_their_range(sm90, shape):
    """Targets far below the largest logit: sums of tiles are computed a second time, from the maxima."""
    x, weight, target = sloped(shape, sm90)
    x[:: shape.rows // 3] *= 60
    with tile_mass() as mass:
        run(shape, x, weight, target)
    assert_counts(mass.counts(), exact_logits(x, weight), target, margin=5e-2)


def test_a_row_of_nan_is_below_no_threshold(sm90):
    x, weight, target = sloped(BESIDE, sm90, 0.0)
    x[3] = torch.nan
    with tile_mass() as mass:
        run(BESIDE, x, weight, target)
    exact = assert_counts(mass.counts(), exact_logits(x, weight), target)
    others = liger.debug.tile_mass_of_logits(exact_logits(x, weight)[128:], target[128:])
    assert exact.below == others.below


@KEPT
@pytest.mark.parametrize("entropy", [False, True], ids=["logprobs", "entropy"])
@KINDS
def test_log_probabilities(sm90, calls, shape, recompute, entropy):
    x, weight, target = sloped(shape, sm90)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    with tile_mass() as mass:
        found = liger.fused_linear_logprobs(
            *leaves, target, temperature=0.8, recompute=recompute, memory_budget=shape.budget,
            return_entropy=True,
        )  # fmt: skip
        (found.logprobs + (found.entropy if entropy else 0)).sum().backward()
    assert calls == [("forward", not recompute), ("backward", not recompute)]
    assert_counts(mass.counts(), exact_logits(x, weight) / 0.8, target)


# --- how it runs --------------------------------------------------------------------------------------------------


@KINDS
def test_calls_add_up_until_the_block_ends(sm90, shape):
    layer = sloped(shape, sm90)
    logits = exact_logits(*layer[:2])
    with tile_mass() as mass:
        for calls in (1, 2, 3):
            run(shape, *layer)
            assert_counts(mass.counts(), logits, layer[2], calls=calls)
    run(shape, *layer)
    assert_counts(mass.counts(), logits, layer[2], calls=3)
    with tile_mass() as later:
        run(shape, *layer)
    assert_counts(later.counts(), logits, layer[2])
    assert_counts(mass.counts(), logits, layer[2], calls=3)


def test_off_means_no_kernel(sm90):
    def kernels():
        layer = sloped(SUMS, sm90)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
            run(SUMS, *layer)
            torch.cuda.synchronize()
        gpu = torch.autograd.DeviceType.CUDA
        return [event.name for event in recorded.events() if event.device_type == gpu]

    with tile_mass():
        names = kernels()
    if not names:
        pytest.skip("the profiler records no kernels here")
    assert sum("count_tile_mass" in name for name in names) == len(SUMS.plan()[0])
    assert not any("count_tile_mass" in name for name in kernels())


def test_no_synchronisation(sm90):
    layer = sloped(BESIDE, sm90)
    x, weight = (t.requires_grad_() for t in layer[:2])

    def step():
        liger.fused_linear_ce(x, weight, layer[2]).backward()

    with tile_mass():
        step()
    with no_synchronisation(), tile_mass() as mass:
        step()
    assert_counts(mass.counts(), exact_logits(x, weight).detach(), layer[2])


def test_a_graph_counts_in_every_replay(sm90):
    static = sloped(SUMS, sm90)
    with tile_mass() as mass:
        graph, _ = capture(lambda: run(SUMS, *static))
    with pytest.raises(RuntimeError, match="has computed no gradient"), tile_mass() as mass:
        mass.counts()
    for ignored in (0.0, 0.6):
        for tensor, value in zip(static, sloped(SUMS, sm90, ignored), strict=True):
            tensor.copy_(value)
        with tile_mass() as mass:
            graph.replay()
            graph.replay()
        assert_counts(mass.counts(), exact_logits(*static[:2]), static[2], calls=2)
    graph.replay()
    assert_counts(mass.counts(), exact_logits(*static[:2]), static[2], calls=2)


def test_a_graph_without_the_counter_counts_nothing(sm90):
    static = sloped(SUMS, sm90)
    graph, _ = capture(lambda: run(SUMS, *static))
    with tile_mass() as mass:
        graph.replay()
    with pytest.raises(RuntimeError, match="has computed no gradient"):
        mass.counts()


def test_compiled_code_counts_without_recompilation(sm90):
    layer = sloped(BESIDE, sm90)
    x, weight = (t.requires_grad_() for t in layer[:2])

    @torch.compile(fullgraph=True)
    def loss_of(x, weight, target):
        return 2 * liger.fused_linear_ce(x, weight, target)

    torch.autograd.grad(loss_of(x, weight, layer[2]), (x, weight))
    with torch.compiler.set_stance("fail_on_recompile"), tile_mass() as mass:
        torch.autograd.grad(loss_of(x, weight, layer[2]), (x, weight))
    assert_counts(mass.counts(), exact_logits(x, weight).detach(), layer[2])


# --- refusals -----------------------------------------------------------------------------------------------------


def test_one_block_at_a_time(sm90):
    layer = sloped(BESIDE, sm90)
    with tile_mass() as mass:
        with pytest.raises(RuntimeError, match="another with block already counts on cuda:0"), tile_mass(0):
            pytest.fail("the block must not run")
        run(BESIDE, *layer)
    assert_counts(mass.counts(), exact_logits(*layer[:2]), layer[2])


def test_refused_during_capture(sm90):
    def step():
        refusal = pytest.raises(RuntimeError, match="begins during the capture of a CUDA graph")
        if torch.cuda.is_current_stream_capturing():
            with refusal, tile_mass():
                pytest.fail("the block must not run")
        return torch.ones(4, device=sm90)

    capture(step)


def test_the_counter_is_off_after_an_error(sm90):
    with pytest.raises(ZeroDivisionError), tile_mass():
        raise ZeroDivisionError
    with tile_mass():
        pass


def test_refused_with_another_engine_or_backend(sm90, monkeypatch):
    refusal = pytest.raises(RuntimeError, match="fused_linear_ce runs on the torch backend")
    with liger.use_backend("torch"), refusal, tile_mass():
        pytest.fail("the block must not run")
    with tile_mass() as mass:
        x, weight, target = sloped(BESIDE, sm90)
        liger.fused_linear_ce(x.float().requires_grad_(), weight.float(), target).backward()
    with pytest.raises(RuntimeError, match="has computed no gradient"):
        mass.counts()
    monkeypatch.setenv("LIGER_WGMMA", "0")
    with pytest.raises(RuntimeError, match="LIGER_WGMMA=0 selects the generic engine"), tile_mass():
        pytest.fail("the block must not run")


def test_the_op_refuses_other_memory(sm90):
    for counts in (
        torch.zeros(8, device=sm90),
        torch.zeros(7, dtype=torch.int64, device=sm90),
        torch.zeros(16, dtype=torch.int64, device=sm90)[::2],
        torch.zeros(8, dtype=torch.int64),
    ):
        with pytest.raises(RuntimeError, match=r"count_tile_mass: counts is .*expected 8 contiguous int64"):
            torch.ops.liger_sm90.count_tile_mass(0, counts)
    with pytest.raises(RuntimeError, match="count_tile_mass: device index -1 is out of range"):
        torch.ops.liger_sm90.count_tile_mass(-1, None)
