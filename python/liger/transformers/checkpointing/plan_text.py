# SPDX-License-Identifier: BSD-3-Clause
"""A plan in words: the line of the report, and the line of a change."""

from .device_memory import size_text


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
    nothing, attention, everything = plan.counts(kept)
    text = f"{count - everything} of {count} {name} recomputed"
    other = planner.kept.get(not phase, kept)
    if other != kept:
        others = plan.counts(other)
        text += f" ({count - others[-1]} where gradients of earlier micro-batches exist)"
    on_device, on_host = plan.attention_cost(kept, ratio), plan.host_cost(kept, ratio)
    if attention:
        average = size_text((on_device + on_host) / attention)
        text += f", {attention} of them but for attention, which keeps {average} each"
        text += " in host memory" if on_host else ""
        text += " by torch's selective checkpointing" if any(planner.switches.selective) else ""
    if everything:
        average = (plan.cost(kept, ratio) - on_device) / everything
        text += f", {everything} keep {size_text(average)} each"
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
        text += f"{left_out} layers that keep everything" if left_out else "full checkpointing"
        text += "" if planner.store.is_on else ", offload=True needs less"
    if nothing and planner.refusal is not None:
        text += f"; attention alone is not kept: {planner.refusal}"
    if planner.store.is_on and not planner.is_compiled:
        text += f"; {planner.store.summary}"
    text += _compiled(planner)
    return f"{text}; every_n_layers leaves out {left_out} layers, which keep everything" if left_out else text


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
    text = f"{count - now[-1]} of {count} layers recomputed instead of {count - then[-1]}"
    if then[1]:
        text += f", {now[1]} of them but for attention instead of {then[1]}"
    return f"{step.load[0]} tokens are more than in any step before: {text}"
