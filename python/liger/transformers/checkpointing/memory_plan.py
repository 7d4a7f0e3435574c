# SPDX-License-Identifier: BSD-3-Clause
"""The number of layers that may keep their activations: arithmetic over measured steps, without a model or a
device.

A step with k kept layers needs at most the memory of a step with j < k kept layers plus the activations of k
- j layers, at every moment. Therefore each measured step bounds the steps with more kept layers, and the
smallest of the bounds counts. If two measured steps differ by more than the counted activations, all counts
are raised by that ratio.

A load is a tuple of numbers that grow with the step: its tokens, and with eager attention tokens times
length. The memory of a larger load is taken as proportional: the ratio of the loads multiplies gradients and
temporaries of the optimizer as well, so the estimate is high.
"""

import itertools
import math
from collections import defaultdict

# Factor of the counted activations until a step has confirmed them: saved_tensors_hooks do not see tensors
# that an autograd node stores as attributes.
UNCONFIRMED = 1.25


class MemoryPlan:
    """Measured steps and the bound that follows from them.

    Args:
        costs: bytes of activations of each layer, in the order of the layers.
        load: the load of the step in which they were counted.
        exact: whether the counts need no confirmation.
    """

    def __init__(self, costs, load, exact=False):
        # Bytes of the last k layers together: the backward frees their activations first.
        self.costs = [0, *itertools.accumulate(reversed(costs))]
        self.load = tuple(load)
        self.factor = 1.0 if exact else UNCONFIRMED
        self.confirmed = exact
        # Phase -> kept layers -> bytes of the peak above the start of the step.
        self.peaks = defaultdict(dict)
        # The same of smaller loads, in proportion.
        self.estimates = defaultdict(dict)
        self.forwards = {}
        # (phase, kept layers) of peaks that outdate() has marked.
        self.outdated = set()

    def cost(self, kept, ratio=1.0):
        """Bytes of activations of the last ``kept`` layers."""
        return math.ceil(self.costs[kept] * self.factor * ratio)

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

    def record(self, phase, kept, peak, load, forward=None, outdated=False):
        """Adds a measured step. One of a smaller load than the largest only lowers an outdated peak, in
        proportion.

        Args:
            phase: steps of different phases are not compared: with or without gradients at their start.
            peak: bytes of the peak above the start of the step.
            forward: bytes that the forward has left allocated, or None.
            outdated: whether the step has allocated memory that stays: outdate().

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
        if outdated or self.is_measured(phase, kept):
            peak = max(peak, peaks.get(kept, 0))
        peaks[kept] = peak
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
        self.costs = [math.ceil(cost * ratio) for cost in self.costs]
        for phase in {*self.peaks, *self.estimates}:
            known = self._known(phase)
            self.estimates[phase] = {kept: math.ceil(peak * ratio) for kept, peak in known.items()}
        # Differences between an estimate and a measured step say nothing about a layer.
        self.peaks.clear()
        self.outdated.clear()
        self.forwards = {}
        self.load = tuple(load)

    def _confirm(self, peaks, forwards):
        if not self.confirmed and 0 in forwards and len(forwards) > 1:
            self.confirmed, self.factor = True, 1.0
        if not self.confirmed:
            return
        for measured in (peaks, forwards):
            for fewer, more in itertools.combinations(sorted(measured), 2):
                counted = self.costs[more] - self.costs[fewer]
                if counted:
                    self.factor = max(self.factor, (measured[more] - measured[fewer]) / counted)

    def need(self, phase, kept, load):
        """Bytes above the start of a step that it needs at most; None if no step bounds it."""
        ratio = self.ratio(load)
        # A step that starts with allocated gradients has a lower peak above its start.
        peaks = self._known(phase) or self._known(False)
        bounds = [
            math.ceil(peak * ratio) + self.cost(kept, ratio) - self.cost(fewer, ratio)
            for fewer, peak in peaks.items()
            if fewer <= kept
        ]
        return min(bounds, default=None)

    def _known(self, phase):
        return {**self.estimates[phase], **self.peaks[phase]}

    def max_kept(self, phase, load, room, allowed):
        """The largest number of kept layers, up to ``allowed``, that needs at most ``room`` bytes; 0 if none
        does.

        At most one before the counts are confirmed: a wrong count costs the memory of one layer only.
        """
        for kept in range(allowed if self.confirmed else min(allowed, 1), 0, -1):
            need = self.need(phase, kept, load)
            if need is not None and need <= room:
                return kept
        return 0
