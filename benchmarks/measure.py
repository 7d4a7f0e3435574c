"""Measures the rows of harness.py.

Time on a GPU is taken with CUDA events, one call at a time: first what must happen before the call (restoring tensors
that a provider overwrites, the forward before a backward), then a read of a buffer larger than the L2 cache, then a
spinning kernel behind which the host gets ahead, and only then the call between two events. So the figure is the time
of the device, from cold caches; where a provider waits for the device inside its call, the gap that follows is part of
its figure. ``latency`` is the same without the spinning kernel, from an idle device: it contains the host.

Providers take turns in rounds within one process, so that a chip that lowers its clock slows all of them alike.
"""

import gc
import importlib.util
import math
import statistics
import sys
import time

import torch

MIB = 1024 * 1024
# About 1 ms of an H200: longer than the host needs to issue any of the calls measured here.
SPIN_CYCLES = 1_800_000
# Calls longer than this hide their host time; their latency is not measured apart.
LATENCY_LIMIT_MS = 2.0
# A relative error (Frobenius norm) above this is a wrong result, not a rounding: bfloat16 rounds to 0.004.
WRONG = 0.03
# Further rounds of a provider are left out once it has used this much time in a row.
SECONDS_PER_PROVIDER = 2.0

PROVIDER_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
if importlib.util.find_spec("triton") is not None:
    from triton.errors import TritonError

    PROVIDER_ERRORS += (TritonError,)


# --- machines -----------------------------------------------------------------------------------------------------


class Gpu:
    """Time by CUDA events, memory by the caching allocator."""

    def __init__(self):
        size = max(4 * torch.cuda.get_device_properties().L2_cache_size, 256 * MIB)
        self._flush = torch.zeros(size // 4, dtype=torch.int32, device="cuda")
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def synchronize(self):
        torch.cuda.synchronize()

    def cold_cache(self):
        # A read: after a write, the dirty lines would be written back at the cost of the call that follows.
        self._flush.amax()

    def _timed(self, work):
        self._start.record()
        results = work.run()
        self._end.record()
        self._end.synchronize()
        del results
        return self._start.elapsed_time(self._end)

    def milliseconds(self, work):
        work.prepare()
        self.cold_cache()
        torch.cuda._sleep(SPIN_CYCLES)
        return self._timed(work)

    def latency(self, work):
        work.prepare()
        self.cold_cache()
        torch.cuda.synchronize()
        return self._timed(work)

    def peak(self, work):
        """(results, MiB allocated at the peak beyond what was allocated before)"""
        work.prepare()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = work.run()
        torch.cuda.synchronize()
        return results, (torch.cuda.max_memory_allocated() - before) / MIB

    def release(self):
        gc.collect()
        torch.cuda.empty_cache()


class Cpu:
    """Wall time, for the self-test."""

    def synchronize(self):
        pass

    def milliseconds(self, work):
        work.prepare()
        start = time.perf_counter()
        work.run()
        return (time.perf_counter() - start) * 1e3

    def latency(self, work):
        return self.milliseconds(work)

    def peak(self, work):
        work.prepare()
        return work.run(), None

    def release(self):
        gc.collect()


# --- measuring ----------------------------------------------------------------------------------------------------


def relative_error(actual, exact):
    """Frobenius norm of the difference over that of the exact value; nan if either is not finite."""
    difference = torch.linalg.vector_norm(actual.detach().float() - exact.float())
    return (difference / torch.linalg.vector_norm(exact.float()).clamp_min(1e-30)).item()


def spread(samples):
    """Median, least and quartiles of a list of times."""
    if len(samples) < 2:
        return {"median": samples[0], "min": samples[0], "q25": samples[0], "q75": samples[0], "n": 1}
    q25, median, q75 = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median": median, "min": min(samples), "q25": q25, "q75": q75, "n": len(samples)}


class Contestant:
    """A provider in a row: its work, or the reason why it has none."""

    def __init__(self, provider):
        self.provider, self.work, self.samples, self.seconds = provider, None, [], 0.0
        self.record = {"group": provider.group, "status": "ok"}
        missing = [name for name in provider.needs if importlib.util.find_spec(name) is None]
        if missing:
            self.drop("missing", f"not installed: {', '.join(missing)}")

    @property
    def alive(self):
        return self.record["status"] in ("ok", "wrong")

    def drop(self, status, reason):
        self.work = None
        self.record.update(status=status, reason=reason)

    def attempt(self, action, *arguments):
        """Runs a step in the provider's context. The code of a provider may fail in many ways: that is a result."""
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


def _in_rounds(contestants, rounds, visit):
    """Every contestant in every round, beginning with another one each time."""
    for contestant in contestants:
        contestant.seconds = 0.0
    for index in range(rounds):
        shift = index % len(contestants)
        for contestant in contestants[shift:] + contestants[:shift]:
            if contestant.seconds < SECONDS_PER_PROVIDER or index < 3:
                contestant.attempt(visit, contestant)


def _inspect(machine, contestants, exact):
    """Peak memory and errors of one run each."""

    def visit(contestant):
        results, peak = machine.peak(contestant.work)
        contestant.record["peak_mib"] = peak
        if contestant.provider.group != "ceiling":
            contestant.check(results, exact)

    for contestant in contestants:
        contestant.attempt(visit, contestant)


def _measure_device(row, machine, contestants, inputs):
    _inspect(machine, contestants, row.reference(inputs) if row.reference else {})
    machine.release()

    def time_it(contestant):
        contestant.samples += [machine.milliseconds(contestant.work) for _ in range(row.burst)]

    _in_rounds(contestants, row.rounds, time_it)
    for contestant in contestants:
        if contestant.samples and contestant.alive:
            contestant.record["ms"] = spread(contestant.samples)
            contestant.samples = []
    quick = [c for c in contestants if c.alive and c.record["ms"]["median"] < LATENCY_LIMIT_MS]

    def latency(contestant):
        contestant.samples.append(machine.latency(contestant.work))

    if quick:
        _in_rounds(quick, row.rounds, latency)
    for contestant in quick:
        if contestant.alive:
            contestant.record["latency_ms"] = spread(contestant.samples)


def _measure_host(row, machine, contestants):
    def time_it(contestant):
        work = contestant.work
        machine.synchronize()
        start = time.perf_counter()
        for _ in range(row.burst):
            work.run()
        contestant.samples.append((time.perf_counter() - start) * 1e6 / row.burst)
        machine.synchronize()

    _in_rounds(contestants, row.rounds, time_it)
    for contestant in contestants:
        if contestant.alive:
            contestant.record["host_us"] = spread(contestant.samples)


def measure(row, machine):
    """The record of a row: for each provider its times, peak memory, errors and status.

    ``status`` is ``"ok"``, ``"wrong"`` (measured, but its results are not right), ``"failed"`` or ``"missing"``.
    """
    torch.manual_seed(0)
    inputs = row.inputs()
    contestants = [Contestant(provider) for provider in row.providers]
    for contestant in contestants:
        contestant.work = contestant.attempt(contestant.provider.make, inputs)

    def warm_up(contestant):
        contestant.work.prepare()
        contestant.work.run()
        machine.synchronize()

    for contestant in contestants:
        contestant.attempt(warm_up, contestant)
    if row.kind == "host":
        _measure_host(row, machine, contestants)
    else:
        _measure_device(row, machine, contestants, inputs)
    for contestant in contestants:
        contestant.work = None
    machine.release()
    return {
        "op": row.op,
        "name": row.name,
        "kind": row.kind,
        "nbytes": row.nbytes,
        "ceiling": row.ceiling,
        "contests": [{"baseline": c.baseline, "label": c.label, "ours": list(c.ours)} for c in row.contests],
        "providers": {c.provider.name: c.record for c in contestants},
    }


def measure_all(rows, machine, after_row=lambda records: None):
    """The records of rows, one after the other; ``after_row`` sees all records so far."""
    records = []
    for row in rows:
        start = time.perf_counter()
        records.append(measure(row, machine))
        print(f"  {row.name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        after_row(records)
    return records
