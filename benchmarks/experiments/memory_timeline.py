# SPDX-License-Identifier: BSD-3-Clause
"""Memory of training steps over time, by category: every allocation and release, from torch's own records.

On a GPU they come from ``torch.cuda.memory._record_memory_history``, on a CPU from the profiler. A tensor
that becomes the gradient of a parameter counts as one from its allocation. Other allocations belong to the
phase that they are made in: those between the end of the decoder layers' forward and the start of their
backward to the lm_head and its loss.
"""

from __future__ import annotations

import bisect
from typing import Any

import torch

CATEGORIES = (
    "weights",
    "optimizer states",
    "other",
    "gradients",
    "activations",
    "lm_head and loss",
    "optimizer",
)
# Phase of a step -> category of what is allocated in it.
PHASES = {
    "forward": "activations",
    "loss": "lm_head and loss",
    "backward": "activations",
    "optimizer": "optimizer",
}
POINTS = 600
# Of a label at the time axis, as a share of the axis.
LABEL_WIDTH = 0.04
_MARK = "liger phase "


class _CudaHistory:
    """Events of the caching allocator. A mark is the number of allocations and of releases before it."""

    def __enter__(self):
        self._marks = []
        torch.cuda.synchronize()
        self._first = self._count()
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=2_000_000)
        return self

    def __exit__(self, *error):
        torch.cuda.synchronize()
        if error[0] is None:
            traces = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
            kinds = {"alloc": 1, "free_completed": -1}
            self.events = [(kinds[e["action"]], e["addr"], e["size"]) for e in traces if e["action"] in kinds]
        torch.cuda.memory._record_memory_history(None)

    def _count(self):
        stats = torch.cuda.memory_stats()
        return stats["allocation.all.allocated"], stats["allocation.all.freed"]

    def mark(self, name):
        counts = (now - first for now, first in zip(self._count(), self._first, strict=True))
        self._marks.append((name, *counts))

    def marks(self):
        """[(name, index of the first event after it)]"""
        return [(name, event_index(self.events, *counts)) for name, *counts in self._marks]


def event_index(events, allocations, releases):
    """The index of the event after so many allocations and releases.

    A release whose memory another stream still uses completes later, so the index is between the last of
    these allocations and the next one.
    """
    places = [index for index, event in enumerate(events) if event[0] > 0]
    least = places[allocations - 1] + 1 if allocations else 0
    most = places[allocations] if allocations < len(places) else len(events)
    return min(max(allocations + releases, least), most)


class _CpuHistory:
    """Events of the CPU allocator, from the profiler. A mark is a range of no length."""

    def __enter__(self):
        activity = torch.profiler.ProfilerActivity.CPU
        self._profile = torch.profiler.profile(activities=[activity], profile_memory=True)
        self._profile.__enter__()
        return self

    def mark(self, name):
        with torch.profiler.record_function(_MARK + name):
            pass

    def __exit__(self, *error):
        self._profile.__exit__(*error)
        if error[0] is not None:
            return
        found: list[Any] = []
        waiting = list(self._profile.profiler.kineto_results.experimental_event_tree())
        while waiting:
            event = waiting.pop()
            waiting += event.children
            found.append(event)
        found.sort(key=lambda event: event.start_time_ns)
        self.events, self._found_marks = [], []
        for event in found:
            kind, fields = event.typed
            if kind == torch._C._profiler._EventType.Allocation and fields.alloc_size:
                size = abs(fields.alloc_size)
                self.events.append((1 if fields.alloc_size > 0 else -1, fields.ptr, size))
            elif event.name.startswith(_MARK):
                self._found_marks.append((event.name.removeprefix(_MARK), len(self.events)))

    def marks(self):
        return self._found_marks


def record_steps(model, call, optimizer, batches, device):
    """Runs one training step per batch and returns their memory over time.

    Args:
        model: the causal LM; its gradients are None, and its optimizer has states, or they are counted as
            they appear.
        call: the model, or what stands for it, such as its compiled form.
        optimizer: of the parameters of the model.
        batches: token ids, one tensor (batch, sequence) per step.
        device: "cuda" or "cpu".

    Returns:
        dict with "bytes" ({category: [bytes]}, up to 600 points, with the peak and the end), "phases" ([name,
        point]) and "peak" (bytes of all categories at the peak).
    """
    history = _CudaHistory() if device == "cuda" else _CpuHistory()
    gradients: list[list[int]] = []

    def after_backbone(module, arguments, output):
        if not torch.is_grad_enabled():
            return
        history.mark("loss")
        output[0].register_hook(lambda _: history.mark("backward"))

    held = _held(model, optimizer, device)
    hook = model.base_model.register_forward_hook(after_backbone)
    try:
        with history:
            for tokens in batches:
                history.mark("forward")
                call(input_ids=tokens, labels=tokens).loss.backward()
                history.mark("optimizer")
                gradients.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    finally:
        hook.remove()
    return timeline(history.events, history.marks(), gradients, held)


def _held(model, optimizer, device):
    """{category: bytes} of what exists before the first step."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    kept = {
        "weights": [*model.parameters(), *model.buffers()],
        "optimizer states": [t for t in states if torch.is_tensor(t)],
    }
    held = {
        name: sum({t.data_ptr(): t.nbytes for t in tensors if t.device.type == device}.values())
        for name, tensors in kept.items()
    }
    if device == "cuda":
        held["other"] = max(0, torch.cuda.memory_allocated() - sum(held.values()))
    return held


def timeline(events, marks, gradients, held):
    """Memory by category after every event, thinned out.

    Args:
        events: (1 for an allocation or -1 for a release, address, bytes) in order.
        marks: (name of a phase, index of its first event) in order.
        gradients: for every "optimizer" mark, addresses of the gradients that exist there.
        held: {category: bytes} before the first event.

    Returns:
        As :func:`record_steps`.
    """
    of_gradients = _allocations_at(events, [i for name, i in marks if name == "optimizer"], gradients)
    starts = [index for _, index in marks]
    level = {name: held.get(name, 0) for name in CATEGORIES}
    live: dict[int, tuple[str, int]] = {}
    rows, totals = [tuple(level.values())], [sum(level.values())]
    for index, (kind, address, size) in enumerate(events):
        if kind > 0:
            phase = marks[bisect.bisect_right(starts, index) - 1][0] if index >= starts[0] else "forward"
            category = "gradients" if index in of_gradients else PHASES[phase]
            live[address] = category, size
            level[category] += size
        elif address in live:
            category, size = live.pop(address)
            level[category] -= size
        # Releases of what was allocated before the first event: gradients of an earlier step, temporaries.
        rows.append(tuple(level.values()))
        totals.append(sum(rows[-1]))
    width = -(-len(rows) // (POINTS - 1))
    kept = [
        max(range(i, min(i + width, len(rows))), key=totals.__getitem__) for i in range(0, len(rows), width)
    ]
    # The end, which is rarely the most of its last few events.
    kept += [len(rows) - 1] * (kept[-1] != len(rows) - 1)
    return {
        "bytes": {name: [rows[i][column] for i in kept] for column, name in enumerate(CATEGORIES)},
        "phases": [[name, index // width] for name, index in marks],
        "peak": max(totals),
    }


def _allocations_at(events, indexes, addresses):
    """Indexes of the allocations that have one of these addresses when the event at an index begins.

    A gradient may be a view: the block that contains its address counts.
    """
    found: set[int] = set()
    live: dict[int, tuple[int, int]] = {}
    moments = {index: step for step, index in enumerate(indexes)}
    for index in range(len(events) + 1):
        if index in moments and moments[index] < len(addresses):
            starts = sorted(live)
            for address in addresses[moments[index]]:
                place = bisect.bisect_right(starts, address) - 1
                if place >= 0:
                    first, size = live[starts[place]]
                    if address < starts[place] + size:
                        found.add(first)
        if index < len(events):
            kind, address, size = events[index]
            if kind > 0:
                live[address] = index, size
            else:
                live.pop(address, None)
    return found


# --- picture ------------------------------------------------------------------------------------------------

COLORS = {
    "weights": "#555555", "optimizer states": "#999999", "other": "#cccccc", "gradients": "#E69F00",
    "activations": "#56B4E9", "lm_head and loss": "#D55E00", "optimizer": "#CC79A7",
}  # fmt: skip


def ticks(phases, width):
    """{point: label} of [name, point] pairs; phases too close for labels of their own share the label of the
    first."""
    marks: dict[int, str] = {}
    for name, point in phases:
        first = max(marks, default=-width)
        if point - first < LABEL_WIDTH * width:
            marks[first] += f", {name}"
        else:
            marks[point] = name
    return marks


def figure(timelines, title):
    """A panel per name of ``{name: timeline}``, side by side with one scale."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(1.2 + 4.6 * len(timelines), 4.6), layout="constrained")
    panels = made.subplots(1, len(timelines), sharey=True, squeeze=False)[0]
    made.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    top = max(line["peak"] for line in timelines.values())
    unit, name = (1 << 30, "GiB") if top >= 1 << 30 else (1 << 20, "MiB")
    for panel, (label, line) in zip(panels, timelines.items(), strict=True):
        bottom = [0.0] * len(line["bytes"]["weights"])
        for category, values in line["bytes"].items():
            if any(values):
                above = [b + v / unit for b, v in zip(bottom, values, strict=True)]
                panel.fill_between(
                    range(len(above)),
                    bottom,
                    above,
                    step="post",
                    color=COLORS[category],
                    label=category,
                    linewidth=0,
                )
                bottom = above
        panel.axhline(line["peak"] / unit, color="black", linewidth=0.8, linestyle=(0, (3, 2)))
        panel.set_title(f"{label}: {line['peak'] / unit:.2f} {name}", loc="left", fontsize=10)
        marks = ticks(line["phases"], len(bottom))
        labels = {"rotation": 60, "rotation_mode": "anchor", "fontsize": 7, "ha": "right"}
        panel.set_xticks(list(marks), list(marks.values()), **labels)
        panel.set_xticks([point for _, point in line["phases"]], minor=True)
        panel.set_xlim(0, len(bottom))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"allocated, {name}")
    found = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    for panel in panels[1:]:
        found.update(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    made.legend(
        found.values(), found.keys(), fontsize=8, ncols=len(found), loc="outside lower center", frameon=False
    )
    return made
