# SPDX-License-Identifier: BSD-3-Clause
"""A plan in words: the line of the report, and the line of a change."""

from collections import Counter

from .device_memory import size_text
from .memory_plan import State


def summary(planner):
    """The plan of a :class:`Planner` in one line."""
    plan, count, name = planner.plan, len(planner.layers), type(planner.layers[0]).__name__
    left_out = len(planner.switches.whole)
    if plan is None or not planner.kept:
        offloaded = ", their inputs offloaded" if planner.store.is_on and not planner.is_compiled else ""
        which = f"{count - left_out} of {count}" if left_out else f"all {count}"
        return f"{which} {name} recomputed{offloaded} until a step has been measured{_compiled(planner)}"
    phase = False not in planner.kept
    kept = planner.kept[phase]
    ratio = plan.ratio(planner.longest)
    states, (nothing, attention, everything) = plan.states[kept], plan.counts(kept)
    on_device, on_host = plan.attention_cost(kept, ratio), plan.host_cost(kept, ratio)
    text = f"{nothing} of {count} {name} recompute all, {attention} keep attention"
    if attention:
        ways = {way for way, state in zip(planner.ways, states, strict=True) if state == State.ATTENTION}
        average = size_text((on_device + on_host) / attention)
        text += f" ({', '.join(sorted(ways))}, {average} each{' in host memory' if on_host else ''})"
    text += f", {everything} keep all"
    if everything:
        text += f" ({size_text((plan.cost(kept, ratio) - on_device) / everything)} each)"
    other = planner.kept.get(not phase, kept)
    if other != kept:
        text += f", or {_and(plan.counts(other))} where gradients of earlier micro-batches exist"
    text += f", at {planner.longest[0]} tokens"
    start, limit = planner.last_start[phase], planner.meter.limit
    need = plan.need(phase, kept, planner.longest)
    if need is None:
        # Only steps that started with gradients have been measured.
        text += "; peak not measured yet"
    else:
        text += f"; peak at most {size_text(start + need)} of {size_text(limit)}"
    if not planner.meter.exact and plan.is_final(phase, kept):
        text += f", measured {size_text(start + plan.peaks[phase][kept])}"
    if need is not None and start + need > limit:
        text += "; the memory is too small for "
        text += f"{left_out} layers that keep all" if left_out else "full checkpointing"
        text += "" if planner.store.is_on else ", offload=True needs less"
    refused = [
        why for why, state in zip(planner.refusals, states, strict=True) if state == State.NOTHING and why
    ]
    for reason, number in Counter(refused).items():
        text += f"; {number} cannot keep attention alone: {reason}"
    if planner.store.is_on and not planner.is_compiled:
        text += f"; {planner.store.summary}"
    text += _compiled(planner)
    return f"{text}; every_n_layers leaves out {left_out} layers, which keep all" if left_out else text


def _compiled(planner):
    if not planner.is_compiled:
        return ""
    return "; compiled code runs with this plan" + (" and offloads nothing" if planner.store.is_on else "")


def change(planner, step, before, fell_back):
    """What a step has changed; ``fell_back``: its tokens are more than in any step before.

    Args:
        before: the level of the plan until this step.
    """
    count, kept = len(planner.layers), planner.kept[step.phase]
    if not fell_back or kept >= before:
        return summary(planner)
    now, then = (planner.plan.counts(level) for level in (kept, before))
    text = f"{now[0]} of {count} layers recompute all, {now[1]} keep attention, {now[2]} keep all"
    return f"{step.load[0]} tokens are more than in any step before: {text}, instead of {_and(then)}"


def _and(counts):
    return "{}, {} and {}".format(*counts)
