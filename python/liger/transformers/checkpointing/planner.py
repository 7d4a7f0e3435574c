# SPDX-License-Identifier: BSD-3-Clause
"""The steps of a plan: what each layer of a model keeps, chosen before a step and measured after it.

A planner watches two hooks: one before the first decoder layer, where a step starts, and one after the last.
It starts with full checkpointing, measures a step, and then lets layers keep their attention, or all.
"""

import itertools
import sys
import weakref
from collections import deque
from typing import Any

import torch

from . import decoder_layers, device_memory, plan_text
from .activation_bytes import Probe
from .attention_calls import intercept
from .layer_times import LayerTimer, estimated, hides_copies
from .memory_plan import MemoryPlan, Saving, path
from .step import BackwardHook, Step

# Steps in which a plan may grow; measurements that vary could otherwise change it for ever.
_MAX_GROWING = 16
# Between the starts of two steps, in units of a layer's activations: less does not change a plan.
_MIN_GROWTH = 0.25


class Planner:
    """The state of :func:`checkpoint`; a copy of the model gets a copy of it."""

    def __init__(self, model, layers, memory, tokens, agreement, store):
        self.model, self.layers, self.memory, self.tokens = model, layers, memory, tokens
        self.agreement, self.store = agreement, store
        self.switches = decoder_layers.Switches(model, layers, store)
        # The highest level of the plan, and the numbers of layers that keep nothing at any level.
        self.allowed = sys.maxsize
        self.fixed = {0} if decoder_layers.READS_BEFORE_HOOKS and not self.switches.has_wrapped else set()
        self.meter: Any = None
        self.plan: MemoryPlan | None = None
        self.step: Step | None = None
        self.probes: dict[Any, Probe] = {}
        self.timers: dict[Any, LayerTimer] = {}
        # Of each layer, by this rank; and whether all ranks have agreed on the path of the plan.
        self.savings: list[Saving] = []
        self.is_arranged = False
        # Whether the last forward was compiled code.
        self.is_compiled = False
        # Of each layer: how it keeps attention, and the reason why it cannot keep its attention alone.
        self.ways: list[str] = []
        self.refusals: list[str | None] = []
        self.longest: list[int] = []
        # Of the activations between the layers.
        self.dtype: torch.dtype | None = None
        self.starts: deque[int] = deque(maxlen=64)
        # By phase, which is whether gradients exist at the start of the step. Kept: the level of the plan.
        self.phase_start: dict[bool, int] = {}
        self.kept: dict[bool, int] = {}
        self.settled: set[bool] = set()
        self.last_start: dict[bool, int] = {}
        # Steps since the longest one, the same number on every rank.
        self.age = 0
        self.handles = [
            layers[0].register_forward_pre_hook(self._before, with_kwargs=True),
            layers[-1].register_forward_hook(self._after),
        ]

    def release(self):
        for handle in self.handles:
            handle.remove()
        self.switches.restore()

    def forget(self):
        """Discards all measurements: the next step recomputes all layers and is measured."""
        self.plan, self.step, self.is_arranged, self.probes, self.timers = None, None, False, {}, {}
        self.phase_start, self.kept, self.age = {}, {}, 0
        self.settled.clear()

    def __getstate__(self):
        # A step belongs to one graph, which copies do not have.
        return {**vars(self), "step": None, "timers": {}}

    # --- hooks ----------------------------------------------------------------------------------------------

    def _before(self, layer, args, kwargs):
        if torch.compiler.is_compiling():
            # Compiled code must not depend on measurements. It sets this whenever it runs.
            self.is_compiled = True
            return
        if torch._C._current_graph_task_id() != -1:
            return  # A backward recomputes the layer.
        self.is_compiled = False
        if not (layer.training and torch.is_grad_enabled()):
            if layer.training and decoder_layers.READS_BEFORE_HOOKS:
                self.switches.turn()  # Replaces reentrant checkpoints, which hide the steps.
            self._pause()
            return
        hidden = next(
            (t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.dim() > 1), None
        )
        if hidden is None:
            return
        if self.meter is None:
            self._begin(hidden)
        if self.switches.read() or hidden.dtype != self.dtype:
            self.dtype = hidden.dtype
            self.forget()
        now, retries, ooms = self.meter.read()
        if self.step is None or self.step.is_over or ooms > self.step.ooms:
            phase = self._phase()
            self._finish(phase, now, retries, ooms)
            self._offload_if_needed(phase, now, self._load(hidden))
            self.starts.append(now)
            self.phase_start[phase] = now
            self.step = Step(now, retries, ooms, phase, [0] * len(self.longest), phase not in self.settled)
        self.store.begin(is_new_step=not self.step.forwards)
        self._choose(self.step, hidden)

    def _after(self, layer, args, output):
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1 or self.step is None:
            return
        self.store.flush()
        hidden = output[0] if isinstance(output, tuple) else output
        if not (layer.training and isinstance(hidden, torch.Tensor) and hidden.requires_grad):
            return
        if self.step.is_measured and self.step.forwards == 1:
            # Layers that count their activations have not stored their input, as a checkpoint does.
            # Of these inputs one at most would be on the device with offload.
            counting = sum(not probe.stays for probe in self.probes.values())
            missing = min(counting, 1 if self.store.is_on else counting) * hidden.nbytes
            self.step.after_forward = self.meter.read()[0]
            self.step.forward_bytes = self.step.after_forward - self.step.start + missing
        hook = BackwardHook(self.step, self.meter)
        self.step.graphs.append(weakref.ref(hook))
        hidden.register_hook(hook)

    # --- steps ----------------------------------------------------------------------------------------------

    def _begin(self, hidden):
        decoder_layers.check_wrappers(self.model, self.layers)
        self.agreement.check_same(len(self.layers))
        if hidden.device.type == "cuda":
            meter = device_memory.CudaMemory(self.memory, hidden.device)
        else:
            meter = device_memory.CountedMemory(self.memory, self.model)
        device_memory.check_parameters(self.memory, self.model, hidden.device)
        self.meter = meter
        parameters = [p for layer in self.layers for p in layer.parameters()]
        self.trained = [p for p in parameters if p.requires_grad]
        # The statistics describe one device. Offloaded parameters are on the CPU.
        if any(p.device not in (hidden.device, torch.device("cpu")) for p in parameters):
            self.allowed = 0
            self._say("the layers are on several devices, so all of them are recomputed")
        # ZeRO-3 and FSDP1 with flat parameters store gradients elsewhere.
        self.sees_gradients = bool(self.trained) and not hasattr(self.trained[0], "ds_id")
        modules = self.layers[0].modules()
        settings = (getattr(module, "config", None) for module in modules)
        self.is_timed = hidden.is_cuda
        for layer in self.layers:
            intercept(layer)
        self.is_quadratic = any(getattr(c, "_attn_implementation", None) == "eager" for c in settings)
        self.longest = [0] * len(self._load(hidden))
        if self.tokens is not None:
            self.longest = [self.tokens, self.tokens * hidden.shape[-2]][: len(self.longest)]

    def _load(self, hidden):
        tokens = hidden.numel() // hidden.shape[-1]
        return [tokens, tokens * hidden.shape[-2]] if self.is_quadratic else [tokens]

    def _pause(self):
        """Pauses the measurement: a forward without gradients has other memory than the step."""
        if self.step is None or self.meter is None:
            return
        if self.step.backward:
            self._finish(self._phase(), *self.meter.read())
            self.step = None
        else:
            self.step.is_disturbed = True

    def _phase(self):
        return any(p.grad is not None for p in self.trained)

    def _has_grown(self, phase, now):
        """True if more memory is allocated than at the start of the last step of this phase."""
        growth = now - self.phase_start.get(phase, now)
        return growth > self.plan.layer * _MIN_GROWTH

    def _finish(self, phase, now, retries, ooms):
        """Adds the measurements of the last step; the arguments are phase and meter after it."""
        step = self.step
        if self.plan is not None and self._has_grown(phase, now):
            self.plan.outdate()
        if step is None:
            return
        has_failed = ooms > step.ooms
        if has_failed or (retries > step.retries and step.phase in self.settled):
            reason = "ran out of memory" if has_failed else "needed memory of the allocator's cache"
            self._shrink(step, has_failed, f"a step {reason}")
            if has_failed or self.plan is None:
                return
        if not step.is_measured or step.is_disturbed or not step.backward:
            return
        peak = 0 if self.meter.exact else self.meter.peak(0)
        if not self.meter.exact and peak < step.after_forward:
            # Other code has reset the peak during the step. The next one counts anew what layers save.
            self.probes = {}
            return
        is_counting = self.plan is None and not self.meter.exact
        if self.plan is None:
            kinds = [decoder_layers.kind(layer) for layer in self.layers]
            if not all(kind in self.probes and self.probes[kind].bytes for kind in kinds):
                # Adapters were added, or a function that was set before the hook ran has called a layer.
                self.probes = {kind: probe for kind, probe in self.probes.items() if kind in kinds}
                for probe in self.probes.values():
                    probe.bytes = 0
                return
            self._make_plan(kinds, step)
        inputs = len(self.layers) * step.inputs - self.store.inputs
        if self.store.is_on:
            inputs -= self.plan.counts(step.kept)[-1] * step.inputs
        counted = inputs + self.largest_cost + self.plan.cost(step.kept)
        if self.meter.exact:
            peak = self.meter.peak(counted)
        self.plan.record(
            step.phase,
            step.kept,
            peak - step.start,
            step.load,
            step.forward_bytes,
            outdated=self._has_grown(phase, now),
            is_counting=is_counting,
        )

    def _shrink(self, step, has_failed, reason):
        """Lowers the plan by half, or by a layer's bytes; below level 0 inputs go to the host."""
        if not step.kept:
            self._offload(reason)
            return
        fewer = step.kept // 2 if has_failed else self.plan.lower(step.kept)
        if fewer < self.allowed:
            self.allowed = fewer
            _, attention, everything = self.plan.counts(fewer)
            words = f"at most {everything} layers keep their activations"
            words += f" and {attention} their attention" if attention else ""
            self._say(f"{reason}: {words} from now on")

    def _offload_if_needed(self, phase, start, load):
        """Before a step for which full checkpointing alone is not enough, by measured steps."""
        if self.plan is None:
            return
        load = [max(pair) for pair in zip(load, self.longest, strict=True)]
        if (phase, 0) in self.plan.counting and self.plan.ratio(load) == 1:
            return  # The step that counted what layers save has run, and this one needs no more.
        need = self.plan.need(phase, 0, load)
        if need is not None and need > self.meter.limit - start:
            self._offload(f"a step of {load[0]} tokens does not fit with full checkpointing")

    def _offload(self, reason):
        if self.memory == "auto" and self.switches.turn_on():
            self._say(f"{reason}: inputs of layers are offloaded from now on")
            self.forget()

    def _make_plan(self, kinds, step):
        """Costs and times by the probes and timers of the last step."""
        measured = {kind: timer.microseconds() for kind, timer in self.timers.items()}
        refusal, whole = self.switches.refusal(), self.switches.whole
        planned = {kind for number, kind in enumerate(kinds) if number not in whole}
        # A layer that keeps everything has its input on the device.
        inputs = step.inputs if self.store.is_on else 0
        savings = {}
        for kind, probe in self.probes.items():
            # All times in one unit: one kind without a measurement leaves the estimates to decide.
            is_measured = kind in planned and all(map(measured.get, planned))
            counter = probe.attention
            times = measured[kind] if is_measured else estimated(probe.layer, probe.tokens, counter.flops)
            kept = 0 if refusal or counter.refusal else counter.bytes
            copied = (inputs + counter.movable) / step.forwards
            is_hidden = not is_measured or hides_copies(times[0], copied)
            leaving = counter.movable if kept and self.store.is_on and is_hidden else 0
            savings[kind] = Saving(probe.bytes + inputs, times[0], kept, times[1], leaving)
        counters = [self.probes[kind].attention for kind in kinds]
        self.switches.selective = [counter.is_selective for counter in counters]
        self.ways = [counter.way for counter in counters]
        self.refusals = [refusal or counter.refusal for counter in counters]
        self.savings = [savings[kind] for kind in kinds]
        sizes = ((saving.bytes, saving.attention_bytes, saving.leaving) for saving in self.savings)
        costs, attention, leaving = zip(*sizes, strict=True)
        self.switches.leaving = list(map(bool, leaving))
        self.plan = MemoryPlan(costs, step.load, self.meter.exact, attention, leaving, whole)
        self.largest_cost = max(costs) - inputs
        self.probes, self.timers = {}, {}

    def _arrange(self):
        """Sets the path of the plan, by numbers on which all ranks agree."""
        numbers = (
            (
                *(s.bytes, round(s.time), s.attention_bytes, round(s.attention_time)),
                *(s.attention_bytes - s.leaving, not s.attention_bytes, n in self.plan.whole),
            )
            for n, s in enumerate(self.savings)
        )
        agreed = iter(self.agreement.largest(itertools.chain.from_iterable(numbers)))
        rows = list(zip(*[agreed] * 7, strict=True))
        savings = [
            Saving(whole, time, 0 if is_refused else attention, of_attention, attention - staying)
            for whole, time, attention, of_attention, staying, is_refused, _ in rows
        ]
        self.plan.arrange(path(savings, self.fixed | {n for n, row in enumerate(rows) if row[-1]}))
        self.is_arranged = True

    def _choose(self, step, hidden):
        """Sets the layers that keep their activations, before the first of them runs."""
        step.load = [a + b for a, b in zip(step.load, self._load(hidden), strict=True)]
        step.inputs += hidden.nbytes
        step.forwards += 1
        phase, before = step.phase, self.kept.get(step.phase, 0)
        asked = before > self._fitting(step, before)
        *load, asked, lacks_plan = self.agreement.largest([*step.load, asked, self.plan is None])
        is_longer = any(a > b for a, b in zip(load, self.longest, strict=True))
        known = self.longest
        if is_longer:
            self.longest = [max(pair) for pair in zip(load, known, strict=True)]
        if is_longer or lacks_plan:
            self.settled.clear()
            self.age = 0
            step.is_measured = step.is_measured or step.forwards == 1
        if lacks_plan and self.plan is not None:
            # Another rank has discarded its plan. All ranks measure in the same steps, so that each of them
            # takes part in every agreement below.
            self.forget()
            self.step, self.phase_start[phase], before = step, step.start, 0
        elif not lacks_plan and not self.is_arranged:
            self._arrange()
        kept = before
        if is_longer or asked or phase not in self.settled:
            may_grow = phase not in self.settled and self.age < _MAX_GROWING
            kept = self._fitting(step, self.allowed if may_grow else before)
            is_final = self.plan is not None and self.plan.is_final(phase, before)
            kept, is_final = self.agreement.smallest([kept, is_final])
            if is_final and kept == before and not is_longer:
                self.settled.add(phase)
        if kept != before or (self.plan is not None and phase not in self.kept):
            self.kept[phase] = kept
            self.last_start[phase] = step.start
            self._say(plan_text.change(self, step, before, is_longer and any(known)))
        if step.forwards == 1:
            self.age += 1
            step.kept = kept
            if step.is_measured:
                self.meter.start()
        elif kept != step.kept:
            step.is_disturbed = True
        self.switches.turn(self.plan.states[kept] if kept else None)
        # All ranks count at the same time: they must recompute the same layers.
        if lacks_plan:
            self._probe()
        else:
            self.probes, self.timers = {}, {}

    def _fitting(self, step, allowed):
        """The number of layers that fit, up to ``allowed``."""
        if self.plan is None or not self.is_arranged:
            return 0
        start = step.start if self.sees_gradients else max(self.starts)
        ratio = self.plan.ratio(self.longest)

        def shortage(level):
            return self.store.shortage(ratio, self.plan.host_cost(level, ratio))

        room, most = self.meter.limit - start, min(allowed, self.allowed)
        return self.plan.max_kept(step.phase, self.longest, room, most, shortage)

    def _probe(self):
        """One layer of each kind counts what it saves; on a GPU another one is timed."""
        whole = self.switches.whole
        for number in sorted(reversed(range(len(self.layers))), key=whole.__contains__):
            kind = decoder_layers.kind(self.layers[number])
            if kind not in self.probes:
                self.probes[kind] = Probe(self.layers[number], stays=number in whole)
        counted = [probe.layer for probe in self.probes.values()]
        for probe in self.probes.values():
            self.switches.use(probe.layer, probe)
        # The first layers come last in the backward, when all kernels of a layer have been loaded.
        for number, layer in enumerate(self.layers):
            if not self.is_timed or number in self.fixed | whole:
                continue
            kind = decoder_layers.kind(layer)
            if kind not in self.timers and all(layer is not other for other in counted):
                self.timers[kind] = LayerTimer(decoder_layers.checkpointing_of(layer))
                self.switches.use(layer, self.timers[kind])

    # --- words ----------------------------------------------------------------------------------------------

    @property
    def summary(self):
        """The plan in one line."""
        return plan_text.summary(self)

    def _say(self, text):
        if self.agreement.is_first:
            print(f"liger: checkpoint: {text}", file=sys.stderr, flush=True)
