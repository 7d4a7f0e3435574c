# SPDX-License-Identifier: BSD-3-Clause
"""Measurement of the rows of harness.py.

Calls cycle through several sets of inputs. The results of the first timed call are compared with the
reference.

GPU time is measured with CUDA events, one call at a time. The order is: preparation (restoring tensors that a
provider overwrites, the forward before a backward), a read of a buffer larger than the L2 cache, a spin
kernel that hides the launch time of the host, an event, the call, an event. So the result is device time with
cold caches. If a provider synchronises inside its call, the gap on the device counts. ``latency`` omits the
spin kernel and starts from an idle device, so it includes host time.

Providers alternate in rounds within one process, in a new random order each time, so that clock changes
affect all of them. For the same reason the ratio to a ceiling is the median of the ratios of the rounds. GEMM
rows need more: for a tenth of a second after a call that left the tensor cores idle, the clock is higher than
the power limit sustains. Before every call of such a row the device runs the same GEMMs, for ``Row.heat_ms``,
as in training.
"""

import gc
import importlib.util
import math
import random
import statistics
import sys
import time

import torch

MIB = 1024 * 1024
# About 1 ms on an H200: longer than the launch time of any call measured here.
SPIN_CYCLES = 1_800_000
# Longer calls hide their host time, so their latency is not measured.
LATENCY_LIMIT_MS = 2.0
# A relative error (Frobenius norm) above this is not a rounding error; bfloat16 rounds to 0.004.
WRONG = 0.03
# Duration of one GEMM of heat().
MS_PER_HEATING = 1.6
# Time limit of a provider per row; further rounds are skipped.
SECONDS_PER_PROVIDER = 2.0
# Slower first calls, in seconds, are reported during the run.
SLOW_START = 4.0

# What a failing provider may raise: libraries derive errors from Exception itself, as CUTLASS does in Python.
PROVIDER_ERRORS = (Exception,)


# --- devices ------------------------------------------------------------------------------------------------


class Gpu:
    """Time by CUDA events, memory by the caching allocator."""

    def __init__(self):
        size = max(4 * torch.cuda.get_device_properties().L2_cache_size, 256 * MIB)
        self._flush = torch.zeros(size // 4, dtype=torch.int32, device="cuda")
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._heater = None

    def synchronize(self):
        torch.cuda.synchronize()

    def cold_cache(self):
        # A read: after a write, the write-back of dirty lines would slow the timed call.
        self._flush.amax()

    def heat(self, milliseconds):
        """Launches GEMMs that take ``milliseconds`` on an H200, asynchronously."""
        if milliseconds and self._heater is None:
            self._heater = [torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        for _ in range(round(milliseconds / MS_PER_HEATING)):
            torch.mm(*self._heater[:2], out=self._heater[2])

    def _timed(self, work, see=None):
        self._start.record()
        results = work.run()
        self._end.record()
        self._end.synchronize()
        if see is not None:
            see(results)
        del results
        work.release()
        return self._start.elapsed_time(self._end)

    def milliseconds(self, work, see=None, heat_ms=0):
        """Device time of a call after ``heat_ms`` of GEMMs; ``see(results)`` runs after the timed part."""
        work.prepare()
        self.heat(heat_ms)
        self.cold_cache()
        torch.cuda._sleep(SPIN_CYCLES)
        return self._timed(work, see)

    def latency(self, work):
        """Time of host and device together."""
        work.prepare()
        self.cold_cache()
        torch.cuda.synchronize()
        return self._timed(work)

    def peak(self, work):
        """Peak memory of a call in MiB, minus the memory allocated before it."""
        work.prepare()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work.run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        work.release()
        return (peak - before) / MIB

    def release(self):
        gc.collect()
        torch.cuda.empty_cache()


class Cpu:
    """Wall time, for the self-test."""

    def synchronize(self):
        pass

    def milliseconds(self, work, see=None, heat_ms=0):
        work.prepare()
        start = time.perf_counter()
        results = work.run()
        seconds = time.perf_counter() - start
        if see is not None:
            see(results)
        work.release()
        return seconds * 1e3

    def latency(self, work):
        return self.milliseconds(work)

    def peak(self, work):
        return None

    def release(self):
        gc.collect()


# --- measuring ----------------------------------------------------------------------------------------------


def relative_error(actual, exact):
    """Frobenius norm of the difference over the norm of the exact value; nan if either is not finite."""
    difference = torch.linalg.vector_norm(actual.detach().float() - exact.float())
    return (difference / torch.linalg.vector_norm(exact.float()).clamp_min(1e-30)).item()


def spread(samples):
    """Median, least and quartiles of a list of times."""
    if len(samples) < 2:
        return {"median": samples[0], "min": samples[0], "q25": samples[0], "q75": samples[0], "n": 1}
    q25, median, q75 = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": median, "min": min(samples), "q25": q25, "q75": q75, "n": len(samples)}


class Contestant:
    """A provider in a row: its works, one per set of inputs, or the reason why it has none."""

    def __init__(self, provider):
        self.provider, self.works, self.rounds, self.seconds = provider, [], [], 0.0
        self.record = {"group": provider.group, "status": "ok"}
        missing = [name for name in provider.needs if importlib.util.find_spec(name) is None]
        if missing:
            self.drop("missing", f"not installed: {', '.join(missing)}")

    @property
    def alive(self):
        return self.record["status"] in ("ok", "wrong")

    def drop(self, status, reason):
        self.works = []
        self.record.update(status=status, reason=reason)

    def attempt(self, action, *arguments):
        """Runs a step in the provider's context. The code of a provider may fail in many ways: that is a
        result."""
        if not self.alive:
            return None
        start = time.perf_counter()
        try:
            with self.provider.context():
                return action(*arguments)
        except PROVIDER_ERRORS as error:
            self.drop("failed", f"{type(error).__name__}: {error}".strip()[:600])
            return None
        finally:
            self.seconds += time.perf_counter() - start

    def samples(self):
        return [sample for samples in self.rounds for sample in samples]

    def ratio(self, ceiling):
        """The time as a multiple of the ceiling's: the median over the rounds."""
        pairs = zip(self.rounds, ceiling.rounds, strict=False)
        return statistics.median(statistics.median(mine) / statistics.median(its) for mine, its in pairs)

    def check(self, results, exact):
        errors = {
            name: relative_error(results[name], value) for name, value in exact.items() if name in results
        }
        # JSON has no nan.
        self.record["errors"] = {
            name: value if math.isfinite(value) else None for name, value in errors.items()
        }
        wrong = [f"{name} {value:.2g}" for name, value in errors.items() if not value <= WRONG]
        if wrong:
            self.record.update(status="wrong", reason="relative error: " + ", ".join(wrong))


def _visit(contestant, machine, visit):
    """``visit(contestant)``, or None if that fails."""
    was_alive = contestant.alive
    result = contestant.attempt(visit, contestant)
    if was_alive and not contestant.alive:
        # The tensors of a failed call may be part of reference cycles, and take gigabytes.
        machine.release()
    return result


def _in_rounds(contestants, machine, rounds, visit):
    """Every contestant in every round, in another order each time; ``visit(contestant)`` returns samples."""
    for contestant in contestants:
        contestant.seconds, contestant.rounds = 0.0, []
    for index in range(rounds):
        for contestant in random.Random(index).sample(contestants, len(contestants)):
            if contestant.seconds < SECONDS_PER_PROVIDER or index < 3:
                samples = _visit(contestant, machine, visit)
                if samples is not None:
                    contestant.rounds.append(samples)


def _measure_device(row, machine, contestants, inputs):
    def inspect(contestant):
        contestant.record["peak_mib"] = machine.peak(contestant.works[0])

    for contestant in contestants:
        _visit(contestant, machine, inspect)
    exact = row.reference(inputs) if row.reference else {}
    machine.release()

    def time_it(contestant):
        done = len(contestant.samples())
        works = [contestant.works[(done + i) % row.sets] for i in range(row.burst)]
        samples = []
        for work in works:
            first = not (done or samples or contestant.provider.group == "ceiling")
            see = (lambda results: contestant.check(results, exact)) if first else None
            samples.append(machine.milliseconds(work, see, row.heat_ms))
        return samples

    _in_rounds(contestants, machine, row.rounds, time_it)
    timed = [contestant for contestant in contestants if contestant.alive]
    ceilings = [contestant for contestant in timed if contestant.provider.group == "ceiling"]
    for contestant in timed:
        contestant.record["ms"] = spread(contestant.samples())
        contestant.record["ratios"] = {c.provider.name: contestant.ratio(c) for c in ceilings}

    quick = [c for c in timed if c.record["ms"]["median"] < LATENCY_LIMIT_MS]
    if quick:
        _in_rounds(quick, machine, row.rounds, lambda contestant: [machine.latency(contestant.works[0])])
    for contestant in quick:
        if contestant.alive:
            contestant.record["latency_ms"] = spread(contestant.samples())


def _measure_host(row, machine, contestants):
    def time_it(contestant):
        work = contestant.works[0]
        work.prepare()
        machine.synchronize()
        start = time.perf_counter()
        for _ in range(row.burst):
            work.run()
        seconds = time.perf_counter() - start
        machine.synchronize()
        return [seconds * 1e6 / row.burst]

    _in_rounds(contestants, machine, row.rounds, time_it)
    for contestant in contestants:
        if contestant.alive:
            contestant.record["host_us"] = spread(contestant.samples())


def measure(row, machine):
    """The record of a row: for each provider its times, peak memory, errors and status.

    ``status`` is ``"ok"``, ``"wrong"`` (measured, but its results are not right), ``"failed"`` or
    ``"missing"``. ``first_s`` is the time of the first calls, with all compilation.
    """
    start = time.perf_counter()
    torch.manual_seed(0)
    sets = [row.inputs() for _ in range(row.sets)]
    contestants = [Contestant(provider) for provider in row.providers]

    def warm_up(contestant):
        contestant.works = [contestant.provider.make(inputs) for inputs in sets]
        for work in contestant.works:
            work.prepare()
            work.run()
            machine.synchronize()
            work.release()

    for contestant in contestants:
        _visit(contestant, machine, warm_up)
        contestant.record["first_s"] = contestant.seconds
    if row.kind == "host":
        _measure_host(row, machine, contestants)
    else:
        _measure_device(row, machine, contestants, sets[0])
    for contestant in contestants:
        contestant.works = []
    machine.release()
    return {
        "op": row.op,
        "name": row.name,
        "work": row.work,
        "shape": row.shape,
        "kind": row.kind,
        "nbytes": row.nbytes,
        "ceilings": [p.name for p in row.providers if p.group == "ceiling"],
        "contests": [{"baseline": c.baseline, "label": c.label, "ours": list(c.ours)} for c in row.contests],
        "providers": {c.provider.name: c.record for c in contestants},
        "seconds": time.perf_counter() - start,
    }


def measure_all(rows, machine, after_row=lambda records: None, minutes=None):
    """The records of rows, one after the other; ``after_row`` sees all records so far. No row starts after
    ``minutes``."""
    records, start = [], time.monotonic()
    for row in rows:
        if minutes is not None and time.monotonic() - start >= 60 * minutes:
            break
        records.append(measure(row, machine))
        slow = {n: p["first_s"] for n, p in records[-1]["providers"].items() if p["first_s"] > SLOW_START}
        starts = "".join(f", {name} started in {seconds:.0f} s" for name, seconds in slow.items())
        print(f"  {row.name}: {records[-1]['seconds']:.1f} s{starts}", file=sys.stderr, flush=True)
        after_row(records)
    return records
