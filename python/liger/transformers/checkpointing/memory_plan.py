# SPDX-License-Identifier: BSD-3-Clause
"""What each layer may keep: arithmetic over measured steps, without a model or a device.

A layer recomputes all, all but its attention, or nothing. Upgrades, one layer at a time, make a path from a
plan in which all layers recompute all to one in which none does (:func:`path`). A level is a number of steps
on that path; with a path that upgrades whole layers, it is the number of layers that keep their activations.

A step at level k needs at most the memory of a step at a level j < k plus the bytes of the upgrades between
them, at every moment. Therefore each measured step bounds the steps at higher levels, and the smallest of the
bounds counts. If two steps differ by more than the counted bytes, the counts are raised by that ratio.

A load is a tuple of numbers that grow with the step: its tokens, and with eager attention tokens times
length. The memory of a larger load is taken as proportional: the ratio of the loads multiplies gradients and
temporaries of the optimizer as well, so the estimate is high.
"""

import enum
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

# Factor of the counted activations until a step has confirmed them: saved_tensors_hooks do not see tensors
# that an autograd node stores as attributes.
UNCONFIRMED = 1.25


# Attention comes first where it spares at least this many times the time per byte of a whole layer. At 1024
# tokens both spare nearly the same, a recomputation costs more than the device is busy with it, and whole
# layers were faster by 0.9 %.
_ATTENTION_FIRST = 1.5

# Layers whose offloaded attention is on the device at a time: in the forward a layer and the one before,
# whose copies are under way; in the backward a layer and the one before.
_PASSING = 2

# Attention whose counted bytes differ by less than this share of a layer says nothing about its counts.
_MIN_DIFFERENCE = 0.25


class State(enum.IntEnum):
    """What a layer keeps."""

    NOTHING = 0
    ATTENTION = 1
    EVERYTHING = 2


@dataclass(frozen=True)
class Saving:
    """What keeping spares in a layer: in any unit of time and of bytes that all layers share.

    Attributes:
        bytes: of all activations.
        time: of the recomputation.
        attention_bytes: of what attention saves beyond its inputs; 0 where it cannot be kept alone.
        attention_time: of its forward.
        leaving: the part of attention_bytes that waits for the backward in host memory.
    """

    bytes: int
    time: float
    attention_bytes: int = 0
    attention_time: float = 0.0
    leaving: int = 0


def path(savings, fixed=()):
    """The upgrades that a growing plan makes, one layer at a time: (number of the layer, its new state).

    Attention comes first in each layer in which it spares much more time per byte of the device than the
    whole layer, by time per byte, then whole layers from the end: the backward frees the last layers first.

    Args:
        savings: a :class:`Saving` per layer.
        fixed: the numbers of layers that stay as they are.
    """
    free = [n for n in range(len(savings)) if n not in fixed]
    first = [n for n in free if _attention_first(savings[n])]
    first.sort(key=lambda n: (savings[n].attention_time / savings[n].attention_bytes, n), reverse=True)
    whole = [(n, State.EVERYTHING) for n in reversed(free)]
    return [(n, State.ATTENTION) for n in first] + whole


def first_states(count, whole):
    """What each layer keeps before any upgrade; ``whole``: the numbers of layers that keep everything."""
    return [State.EVERYTHING if number in whole else State.NOTHING for number in range(count)]


def _attention_first(saving):
    if not 0 < saving.attention_bytes < saving.bytes:
        return False
    stays = saving.attention_bytes - saving.leaving
    return saving.attention_time * saving.bytes >= _ATTENTION_FIRST * saving.time * stays


class MemoryPlan:
    """Measured steps and the bound that follows from them.

    Args:
        costs: bytes of all activations of each layer, in the order of the layers.
        load: the load of the step in which they were counted.
        exact: whether the counts need no confirmation.
        attention: bytes of the attention of each layer alone.
        leaving: the part of them that leaves the device.
        whole: the numbers of layers that keep everything at any level.
    """

    def __init__(self, costs, load, exact=False, attention=None, leaving=None, whole=()):
        nothing = [0] * len(costs)
        self.whole = whole
        self.layers = list(costs), list(attention or nothing), list(leaving or nothing)
        self.load = tuple(load)
        self.factor = 1.0 if exact else UNCONFIRMED
        # The same for attention: its tensors are known, so its counts need no confirmation.
        self.attention_factor = 1.0
        self.confirmed = exact
        # Phase -> level -> bytes of the peak above the start of the step.
        self.peaks = defaultdict(dict)
        # The same of smaller loads, in proportion.
        self.estimates = defaultdict(dict)
        self.forwards = {}
        # (phase, level) of peaks that outdate() has marked; of peaks of steps that count what layers save.
        self.outdated, self.counting = set(), set()
        self.arrange(path([Saving(cost, 1.0) for cost in costs], whole))

    def arrange(self, upgrades):
        """Sets the path. With another one than before, measurements above level 0 mean nothing."""
        if upgrades == getattr(self, "upgrades", None):
            return
        self.upgrades = upgrades
        for measured in (*self.peaks.values(), *self.estimates.values(), self.forwards):
            for level in [level for level in measured if level]:
                del measured[level]
        states = first_states(len(self.layers[0]), self.whole)
        self.states = [tuple(states)]
        for number, state in upgrades:
            states[number] = state
            self.states.append(tuple(states))
        self._count()

    def _count(self):
        # By level: bytes of layers that keep everything; of kept attention on the device, and on the host.
        self.costs = []
        for states in self.states:
            rows = list(zip(states, *self.layers, strict=True))
            whole = sum(row[1] for row in rows if row[0] == State.EVERYTHING)
            kept = [row[2:] for row in rows if row[0] == State.ATTENTION]
            away = sum(sorted((leaving for _, leaving in kept), reverse=True)[_PASSING:])
            self.costs.append((whole, sum(attention for attention, _ in kept) - away, away))

    def counts(self, level):
        """The number of layers that recompute all, that recompute all but attention, and that keep all."""
        return tuple(self.states[level].count(state) for state in State)

    def cost(self, level, ratio=1.0):
        """Bytes that a level keeps on the device."""
        whole, attention, _ = self.costs[level]
        return math.ceil((whole * self.factor + attention * self.attention_factor) * ratio)

    def attention_cost(self, level, ratio=1.0):
        """The part of :meth:`cost` that is attention of layers that recompute the rest."""
        return math.ceil(self.costs[level][1] * self.attention_factor * ratio)

    def host_cost(self, level, ratio=1.0):
        """Bytes of attention that a level keeps in host memory."""
        return math.ceil(self.costs[level][2] * ratio)

    @property
    def layer(self):
        """Bytes of the last layer's activations."""
        return self.layers[0][-1] * self.factor

    def lower(self, level):
        """The highest level with at least the bytes of a layer, or all, less."""
        most = max(self.cost(level) - self.layer, self.cost(0))
        return max(lower for lower in range(level + 1) if self.cost(lower) <= most)

    def ratio(self, load):
        """The ratio of a load to the measured load; 1 for smaller loads."""
        return max(1.0, *(a / b for a, b in zip(load, self.load, strict=True)))

    def outdate(self):
        """Marks all peaks, because a step has allocated memory that stays, as the first step of an optimizer
        allocates its states. The next steps start with that memory, and a peak above the start of the step
        also counts it. A marked peak is a bound, until a step with as many kept layers replaces it.
        """
        self.outdated.update((phase, kept) for phase, peaks in self.peaks.items() for kept in peaks)

    def is_measured(self, phase, kept):
        """True if there is a peak of this phase and number of kept layers that is not outdated."""
        return kept in self.peaks[phase] and (phase, kept) not in self.outdated

    def is_final(self, phase, kept):
        """True if another step at this level would measure the same peak."""
        return self.is_measured(phase, kept) and (phase, kept) not in self.counting

    def record(self, phase, kept, peak, load, forward=None, outdated=False, is_counting=False):
        """Adds a measured step. One of a smaller load only lowers an outdated peak, in proportion.

        Args:
            phase: steps of different phases are not compared: with or without gradients at their start.
            peak: bytes of the peak above the start of the step.
            forward: bytes that the forward has left allocated, or None.
            outdated: whether the step has allocated memory that stays: outdate().
            is_counting: whether layers have counted what they save. Such a step may need more than the steps
                after it, so the next one at its level replaces its peak.

        Returns:
            Whether the step was recorded.
        """
        if any(a < b for a, b in zip(load, self.load, strict=True)):
            if (phase, kept) in self.outdated and not outdated:
                ratio = max(b / a for a, b in zip(load, self.load, strict=True))
                self.peaks[phase][kept] = min(self.peaks[phase][kept], math.ceil(peak * ratio))
            return False
        if tuple(load) != self.load:
            self._scale(load)
        peaks = self.peaks[phase]
        if outdated or self.is_final(phase, kept):
            peak = max(peak, peaks.get(kept, 0))
        peaks[kept] = peak
        if is_counting:
            self.counting.add((phase, kept))
        else:
            self.counting.discard((phase, kept))
        if outdated:
            self.outdated.add((phase, kept))
        else:
            self.outdated.discard((phase, kept))
        if forward is not None:
            self.forwards[kept] = max(forward, self.forwards.get(kept, 0))
        self._confirm({k: peak for k, peak in peaks.items() if self.is_measured(phase, k)}, self.forwards)
        return True

    def _scale(self, load):
        ratio = self.ratio(load)
        self.layers = tuple([math.ceil(cost * ratio) for cost in costs] for costs in self.layers)
        self._count()
        for phase in {*self.peaks, *self.estimates}:
            known = self._known(phase)
            self.estimates[phase] = {kept: math.ceil(peak * ratio) for kept, peak in known.items()}
        # Differences between an estimate and a measured step say nothing about a layer.
        self.peaks.clear()
        self.outdated.clear()
        self.counting.clear()
        self.forwards = {}
        self.load = tuple(load)

    def _confirm(self, peaks, forwards):
        wholes = {self.costs[level][0] for level in forwards}
        if not self.confirmed and self.costs[0][0] in wholes and len(wholes) > 1:
            self.confirmed, self.factor = True, 1.0
        if not self.confirmed:
            return
        pairs = [
            (measured[more] - measured[fewer], *self._difference(fewer, more))
            for measured in (peaks, forwards)
            for fewer, more in itertools.combinations(sorted(measured), 2)
        ]
        for seen, whole, attention in pairs:
            if not whole and attention > self.layer * _MIN_DIFFERENCE:
                self.attention_factor = max(self.attention_factor, seen / attention)
        for seen, whole, attention in pairs:
            if whole:
                self.factor = max(self.factor, (seen - attention * self.attention_factor) / whole)

    def _difference(self, fewer, more):
        return (b - a for a, b in zip(self.costs[fewer][:2], self.costs[more][:2], strict=True))

    def need(self, phase, kept, load):
        """Bytes above the start of a step that it needs at most at a level; None if no step bounds it."""
        ratio = self.ratio(load)
        # A step that starts with allocated gradients has a lower peak above its start, which bounds no other.
        peaks = self._known(phase) or self._known(False)
        bounds = [
            math.ceil(peak * ratio) + self.cost(kept, ratio) - self.cost(fewer, ratio)
            for fewer, peak in peaks.items()
            if fewer <= kept
        ]
        return min(bounds, default=None)

    def _known(self, phase):
        return {**self.estimates[phase], **self.peaks[phase]}

    def max_kept(self, phase, load, room, allowed, shortage=lambda level: 0):
        """The highest level, up to ``allowed``, that needs at most ``room`` bytes; 0 if none does.

        ``shortage`` of a level: bytes that stay on the device for lack of host memory.

        Before the counts are confirmed at most one layer keeps its activations: a wrong count costs the
        memory of one layer only.
        """
        for kept in range(min(allowed, len(self.upgrades)), 0, -1):
            if self.confirmed or self.counts(kept)[State.EVERYTHING] <= len(self.whole) + 1:
                need = self.need(phase, kept, load)
                if need is not None and need + shortage(kept) <= room:
                    return kept
        return 0
