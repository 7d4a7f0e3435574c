# SPDX-License-Identifier: BSD-3-Clause
"""The arithmetic of kept layers, and the counting of saved bytes."""

import pytest
import torch

pytest.importorskip("transformers")

from liger.transformers.checkpointing.activation_bytes import Probe
from liger.transformers.checkpointing.memory_plan import UNCONFIRMED, MemoryPlan, Saving, State, path


def plan_of(costs=(10, 10, 10, 10), load=(100,), exact=True):
    plan = MemoryPlan(costs, load, exact)
    plan.record(False, 0, 50, load)
    return plan


@pytest.mark.parametrize("room, kept", [(49, 0), (50, 0), (59, 0), (60, 1), (89, 3), (90, 4), (1000, 4)])
def test_the_most_layers_that_fit(room, kept):
    assert plan_of().max_kept(False, (100,), room, 4) == kept


def test_the_last_layers_count():
    assert plan_of(costs=(7, 1, 30, 2)).max_kept(False, (100,), 82, 4) == 2


def test_a_measured_step_is_a_better_bound():
    plan = plan_of()
    plan.record(False, 2, 55, (100,))
    assert plan.need(False, 2, (100,)) == 55 and plan.need(False, 3, (100,)) == 65
    assert plan.need(False, 1, (100,)) == 60


def test_a_measured_step_above_its_bound_raises_all_costs():
    plan = plan_of()
    plan.record(False, 2, 90, (100,))
    assert plan.need(False, 2, (100,)) == 90 and plan.need(False, 3, (100,)) == 110


def test_a_longer_step_needs_more_in_proportion():
    plan = plan_of()
    assert plan.need(False, 0, (150,)) == 75 and plan.need(False, 2, (150,)) == 105
    assert plan.need(False, 2, (50,)) == plan.need(False, 2, (100,)) == 70
    assert not plan.record(False, 2, 1, (99,))
    assert plan.record(False, 2, 100, (150,))
    assert plan.need(False, 1, (150,)) == 90 and plan.need(False, 3, (150,)) == 115


def test_the_larger_ratio_of_two_loads_counts():
    assert plan_of(load=(100, 1000)).need(False, 0, (100, 2000)) == 100


def test_counts_have_a_margin_until_a_forward_confirms_them():
    plan = plan_of(exact=False)
    assert plan.need(False, 2, (100,)) == 50 + 20 * UNCONFIRMED
    plan.record(False, 0, 50, (100,), forward=5)
    plan.record(False, 1, 55, (100,), forward=17)
    assert plan.factor == pytest.approx(1.2)
    assert plan.need(False, 3, (100,)) == 55 + 24


def test_a_phase_without_a_measurement_has_the_bound_of_the_other():
    plan = plan_of()
    assert plan.need(True, 1, (100,)) == 60
    plan.record(True, 0, 30, (100,))
    assert plan.need(True, 1, (100,)) == 40 and plan.need(False, 1, (100,)) == 60


def test_an_outdated_peak_is_a_bound_until_it_is_measured_again():
    plan = plan_of()
    plan.record(True, 0, 40, (100,))
    plan.outdate()
    assert not plan.is_measured(False, 0) and not plan.is_measured(True, 0)
    assert plan.need(False, 1, (100,)) == 60 and plan.need(True, 1, (100,)) == 50
    plan.record(False, 0, 30, (100,), outdated=True)
    assert not plan.is_measured(False, 0) and plan.need(False, 1, (100,)) == 60
    for peak, need in ((35, 45), (32, 45), (36, 46)):
        plan.record(False, 0, peak, (100,))
        assert plan.is_measured(False, 0) and plan.need(False, 1, (100,)) == need
    plan.record(False, 0, 70, (100,), outdated=True)
    assert not plan.is_measured(False, 0) and plan.need(False, 1, (100,)) == 80
    assert not plan.is_measured(True, 0)


def test_a_smaller_step_lowers_an_outdated_peak_in_proportion():
    plan = plan_of()
    plan.record(False, 0, 20, (80,))
    assert plan.need(False, 0, (100,)) == 50
    plan.outdate()
    plan.record(False, 0, 20, (80,), outdated=True)
    assert plan.need(False, 0, (100,)) == 50
    plan.record(False, 0, 32, (80,))
    assert plan.need(False, 0, (100,)) == 40 and not plan.is_measured(False, 0)
    plan.record(False, 0, 36, (80,))
    assert plan.need(False, 0, (100,)) == 40
    plan.record(False, 1, 10, (80,))
    assert plan.need(False, 1, (100,)) == 50


def test_an_outdated_peak_does_not_raise_costs():
    plan = plan_of()
    plan.record(False, 1, 90, (100,), outdated=True)
    assert plan.factor == 1.0
    plan.record(False, 1, 75, (100,))
    assert plan.factor == 2.5


def test_peaks_of_another_load_are_not_outdated():
    plan = plan_of()
    plan.outdate()
    plan.record(False, 0, 70, (200,))
    assert plan.is_measured(False, 0) and plan.need(False, 0, (200,)) == 70


def test_no_measurement_no_layer():
    assert MemoryPlan([1, 1], (5,)).max_kept(False, (5,), 10**9, 2) == 0


# --- paths --------------------------------------------------------------------------------------------------

A, E = State.ATTENTION, State.EVERYTHING


def test_short_sequences_keep_whole_layers():
    """Attention spares 4.3 ms per GiB, a whole layer 4.5: the plan is the one of whole layers."""
    savings = [Saving(1000, 4.5, 100, 0.43)] * 3
    assert path(savings) == [(2, E), (1, E), (0, E)]
    assert path(savings, fixed={0}) == [(2, E), (1, E)]


def test_long_sequences_keep_attention_first():
    savings = [Saving(1000, 10.0, 100, 5.0)] * 3
    assert path(savings) == [(2, A), (1, A), (0, A), (2, E), (1, E), (0, E)]
    assert path(savings, fixed={0, 1}) == [(2, A), (2, E)]


def test_attention_with_the_most_time_per_byte_comes_first():
    """Layers with a sliding window between full ones, and one without attention that could be kept."""
    full, sliding, other = Saving(1000, 10.0, 100, 6.0), Saving(1000, 5.0, 100, 1.0), Saving(1000, 5.0)
    assert path([full, sliding, other, full, sliding]) == [
        (3, A), (0, A), (4, A), (1, A), (4, E), (3, E), (2, E), (1, E), (0, E),
    ]  # fmt: skip


@pytest.mark.parametrize("saving", [Saving(100, 1.0, 100, 1.0), Saving(100, 1.0, 0, 1.0), Saving(0, 0.0)])
def test_attention_that_spares_no_memory_is_not_kept(saving):
    assert path([saving]) == [(0, E)]


def with_attention(exact=True):
    plan = MemoryPlan([10, 10, 10], (100,), exact, [2, 2, 2])
    plan.arrange(path([Saving(10, 1.0, 2, 0.9)] * 3))
    return plan


def test_levels():
    plan = with_attention()
    assert [plan.cost(level) for level in range(7)] == [0, 2, 4, 6, 14, 22, 30]
    assert [plan.counts(level) for level in (0, 2, 3, 4, 6)] == [
        (3, 0, 0), (1, 2, 0), (0, 3, 0), (0, 2, 1), (0, 0, 3),
    ]  # fmt: skip
    assert plan.attention_cost(4) == 4 and plan.layer == 10
    assert [plan.lower(level) for level in (6, 5, 4, 3, 0)] == [4, 3, 2, 0, 0]
    plan.record(False, 0, 50, (100,))
    assert [plan.max_kept(False, (100,), room, 9) for room in (51, 52, 57, 64, 72, 99)] == [0, 1, 3, 4, 5, 6]


def test_layers_that_keep_everything_at_any_level():
    plan = MemoryPlan([10, 20, 30, 40], (100,), False, [2] * 4, whole={1, 3})
    assert plan.upgrades == [(2, E), (0, E)] and plan.states[0] == (State.NOTHING, E, State.NOTHING, E)
    plan.arrange(path([Saving(10, 1.0, 2, 0.9)] * 4, fixed={1, 3}))
    assert plan.upgrades == [(2, A), (0, A), (2, E), (0, E)]
    assert [plan.counts(level) for level in (0, 2, 4)] == [(2, 0, 2), (0, 2, 2), (0, 0, 4)]
    plan.record(False, 0, 150, (100,), forward=5)
    # A layer more than those is the first to need confirmation.
    assert plan.max_kept(False, (100,), 1000, 9) == 3 and plan.lower(3) == plan.lower(0) == 0
    assert [plan.max_kept(False, (100,), room, 9) for room in (100, 152, 189)] == [0, 1, 2]
    plan.record(False, 3, 183, (100,), forward=38)
    assert plan.confirmed and plan.factor == pytest.approx(31 / 30)
    assert plan.max_kept(False, (100,), 1000, 9) == 4


def test_attention_needs_no_confirmation_and_one_layer_does():
    plan = with_attention(exact=False)
    plan.record(False, 0, 50, (100,), forward=5)
    assert plan.max_kept(False, (100,), 1000, 9) == 4
    plan.record(False, 3, 56, (100,), forward=11)
    assert not plan.confirmed and plan.max_kept(False, (100,), 1000, 9) == 4
    plan.record(False, 4, 66, (100,), forward=21)
    assert plan.confirmed and plan.attention_factor == 1.0 and plan.factor == pytest.approx(1.2)
    assert plan.max_kept(False, (100,), 1000, 9) == 6


def test_attention_that_needs_more_than_counted():
    plan = with_attention()
    plan.record(False, 0, 50, (100,))
    plan.record(False, 3, 62, (100,))
    assert plan.attention_factor == 2.0 and plan.cost(3) == 12 and plan.need(False, 3, (100,)) == 62
    plan.record(False, 1, 70, (100,))
    # A fifth of a layer's bytes say nothing.
    assert plan.attention_factor == 2.0


def test_a_longer_step_needs_more_attention():
    plan = with_attention()
    plan.record(False, 0, 50, (100,))
    assert plan.need(False, 3, (150,)) == 75 + 9
    plan.record(False, 0, 75, (150,))
    assert plan.cost(3) == 9 and plan.cost(6) == 45


def test_another_path_forgets_what_its_levels_meant():
    plan = with_attention()
    plan.record(False, 0, 50, (100,))
    plan.record(False, 3, 51, (100,))
    plan.arrange(list(plan.upgrades))
    assert plan.is_measured(False, 3)
    plan.arrange(path([Saving(10, 1.0)] * 3))
    assert plan.is_measured(False, 0) and not plan.is_measured(False, 3) and plan.need(False, 3, (100,)) == 80


# --- counted bytes ------------------------------------------------------------------------------------------


def test_probe_counts_each_saved_storage_once():
    layer = torch.nn.Linear(8, 4)
    probe, x = Probe(layer), torch.randn(3, 8, requires_grad=True)

    def call(x):
        hidden = layer(x).exp()  # saves x and the weight, which are not the layer's own, and the exponentials
        return (hidden * hidden).view(-1) * hidden.t().reshape(
            -1
        )  # the exponentials again, their square, a copy

    probe(call, x).sum().backward()
    assert probe.bytes == 3 * 3 * 4 * 4
    grads = x.grad, layer.weight.grad
    x.grad, layer.weight.grad = None, None
    call(x).sum().backward()
    assert all(map(torch.equal, grads, (x.grad, layer.weight.grad)))


def test_attention_that_leaves_the_device():
    """Two layers' are on the device at a time; the bytes that stay count for every layer."""
    plan = MemoryPlan([100] * 4, [10], True, [10] * 4, [8] * 4)
    plan.arrange(path([Saving(100, 5.0, 10, 1.0, 8)] * 4))
    assert [state for _, state in plan.upgrades[:4]] == [State.ATTENTION] * 4
    assert [plan.cost(level) for level in range(7)] == [0, 10, 20, 22, 24, 122, 220]
    assert [plan.host_cost(level, 1.5) for level in range(7)] == [0, 0, 0, 12, 24, 12, 0]
    plan.record(False, 0, 1000, [20])
    assert plan.cost(4) == 48 and plan.host_cost(4) == 32
    room = 1000 + 45
    assert plan.max_kept(False, [20], room, 4) == 3
    assert plan.max_kept(False, [20], room, 4, lambda level: 16 * max(level - 2, 0)) == 2
    # Cheap attention comes first if it leaves, else whole layers.
    assert path([Saving(100, 5.0, 10, 0.5)])[0] == (0, State.EVERYTHING)
    assert path([Saving(100, 5.0, 10, 0.5, 8)])[0] == (0, State.ATTENTION)
