# SPDX-License-Identifier: BSD-3-Clause
"""``bench_model --own-processes`` and ``--ranks``: every contestant in a process of its own, or in one per
rank.

On several ranks, GPU ``rank`` with nccl or the CPU with gloo, decoder layers and root are wrapped by
``fully_shard``. Batches differ between ranks. Time is the slowest rank's, peak memory the maximum of the
largest, the first loss their mean. The results are saved after every contestant, and a second run measures
those that are not in the file yet.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from ..devices import on_ranks
from ..devices.processes import FORK, end_with_parent, may_fork, rendezvous, write_output_to
from ..measure import spread
from .contestants import entered
from .report import GIB, tokens_per_second, write
from .sizes import size_of
from .trainee import SAME_LOSS, Trainee, random_batches

# Samples of a contestant on several ranks, of one step each.
ROUNDS = 4
# Seconds for one contestant; after a rank has failed, seconds until the others are ended.
LIMIT, STRAGGLER = 240.0, 10.0
# With less time left, in seconds, no contestant is started.
LEAST = 20.0
# What most contestants import: forked ranks then start at once.
PRELOAD = ("transformers.models.llama.modeling_llama", "liger.transformers")


# --- a rank -------------------------------------------------------------------------------------------------


class LoneTrainee(Trainee):
    """A Trainee that is the only one in its process: everything that is allocated counts, workspaces
    included."""

    def idle_bytes(self):
        return torch.cuda.memory_allocated()


class ShardedTrainee(LoneTrainee):
    """A Trainee on one of several ranks."""

    def shard(self):
        on_ranks.shard(self.model, self.device)
        if self.device == "cuda":
            torch.cuda.empty_cache()  # Each rank made the whole model in float32.

    def burst(self, batches, first):
        dist.barrier()
        super().burst(batches, first)

    def record(self, reference):
        """The measurements of all ranks; every rank must call it."""
        samples, host, peak, loss = self.samples, self.host, self.peak or 0, self.loss
        record = super().record(reference)
        largest = torch.tensor([*samples, *host, peak], dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        largest = largest.tolist()
        mean = torch.tensor(loss, dtype=torch.float64, device=self.device)
        dist.all_reduce(mean)
        record.update(
            first_loss=mean.item() / dist.get_world_size(),
            ms=spread(largest[: len(samples)]),
            host_ms=spread(largest[len(samples) : -1]),
            peak_bytes=int(largest[-1]) or None,
        )
        return record


def _measure_rank(spec, path):
    """The first rank writes the record, or the first one that fails."""
    rank, ranks, gpu = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), not spec["self_test"]
    size, kind = size_of(spec["size"], spec["self_test"], spec["checkpointing"]), LoneTrainee
    if gpu:
        torch.cuda.set_device(rank)
    if ranks > 1:
        # The plans of ranks are compared on the CPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
        size, kind = replace(size, rounds=ROUNDS, burst=1), ShardedTrainee
    (contestant,) = entered(size, spec["backends"], only=[spec["name"]], **spec["entry"])
    trainee = kind(contestant, size, "cuda" if gpu else "cpu")
    batches = random_batches(size, spec["shape"], trainee.device, seed=1 + rank)
    for action, *arguments in (
        (trainee.build,),
        (trainee.warm_up, batches),
        *((trainee.burst, batches, i * size.burst) for i in range(size.rounds)),
    ):
        trainee.attempt(action, *arguments)
        if trainee.failure is not None:
            if not path.exists():
                status, reason = trainee.failure
                failure = {"group": contestant.group, "status": status, "reason": reason}
                path.write_text(json.dumps(failure))
            # The others wait for this rank in a collective, and so would the end of the process group.
            os._exit(1)
    record = trainee.record(None)
    if rank == 0:
        path.write_text(json.dumps(record))
    if ranks > 1:
        dist.destroy_process_group()


# --- all ranks of a contestant ------------------------------------------------------------------------------


class _Forked:
    """A rank, forked from this process; methods as of Popen."""

    def __init__(self, variables, folder):
        self._process = FORK.Process(target=self._run, args=(variables, folder))
        self._process.start()

    @staticmethod
    def _run(variables, folder):
        end_with_parent()
        os.environ.update(variables)
        write_output_to(folder / f"{variables['RANK']}.log")
        _measure_rank(json.loads((folder / "spec.json").read_text()), folder / "record.json")

    def poll(self):
        return self._process.exitcode

    def kill(self):
        self._process.kill()

    def wait(self):
        self._process.join()


def _start(variables, folder, fork):
    """A rank with these environment variables."""
    if fork:
        return _Forked(variables, folder)
    root = Path(__file__).parents[__name__.count(".")]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | variables | {"PYTHONPATH": path}
    command = [sys.executable, "-m", __name__, str(folder / "spec.json"), str(folder / "record.json")]
    with open(folder / f"{variables['RANK']}.log", "wb") as log:
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, preexec_fn=end_with_parent
        )


def _wait(processes, seconds):
    """Ends all of them; returns whether they ended by themselves within this time."""
    deadline = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                deadline = min(deadline, time.monotonic() + STRAGGLER)
            if time.monotonic() > deadline:
                return any(process.poll() for process in processes)
            time.sleep(0.05)
        return True
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(spec, ranks, seconds, fork=False):
    """The record of one contestant at one shape; None if it takes longer than that. ``fork``: whether that is
    safe."""
    with tempfile.TemporaryDirectory(prefix="liger-ranks-") as name:
        folder = Path(name)
        (folder / "spec.json").write_text(json.dumps(spec))
        with rendezvous(ranks) as environments:
            ended = _wait([_start(variables, folder, fork) for variables in environments], seconds)
        if (folder / "record.json").exists():
            return json.loads((folder / "record.json").read_text())
        if not ended:
            return None
        logs = "\n".join(
            (folder / f"{rank}.log").read_text(errors="replace")[-1500:] for rank in range(ranks)
        )
        return {"status": "failed", "reason": f"the ranks ended without a result:\n{logs}"}


# --- all contestants ----------------------------------------------------------------------------------------


def _earlier(path):
    """The rows of an earlier run."""
    return json.loads(path.read_text())["rows"] if path is not None and path.is_file() else []


def _row(records, shape, ranks):
    """The row of a shape; a new one is added."""
    wanted = {"batch": shape[0], "sequence": shape[1], "ranks": ranks}
    for record in records:
        if all(record.get(name, 1) == value for name, value in wanted.items()):
            return record
    records.append({**wanted, "providers": {}})
    return records[-1]


def _is_done(provider):
    """True if an earlier run has measured it. Packages can be installed later, and failures repaired."""
    return provider is not None and (
        provider["status"] in ("ok", "wrong") or "out of memory" in provider["reason"]
    )


def _compare(record):
    """Marks providers with another first loss than the unpatched model."""
    measured = [p for p in record["providers"].values() if "first_loss" in p]
    reference = next((p["first_loss"] for p in measured if p["group"] == "plain"), None)
    for provider in measured:
        if reference is not None and not abs(provider["first_loss"] / reference - 1) <= SAME_LOSS:
            reason = f"loss {provider['first_loss']:.5g}, unpatched {reference:.5g}"
            provider.update(status="wrong", reason=reason)


def _say(text):
    print(f"  {text}", file=sys.stderr, flush=True)


def _described(record, provider):
    if "ms" not in provider:
        return f"{provider['status']}: {provider['reason'].strip().splitlines()[-1][:160]}"
    text = f"{provider['ms']['median']:.0f} ms, {tokens_per_second(record, provider) / 1e3:.1f} thousand tokens/s"
    peak = provider["peak_bytes"]
    return text if peak is None else f"{text}, {peak / GIB:.2f} GiB"


def measure(parsed, size, backends, facts, entry):
    """One record per shape, as of ``bench_model.measure``, with "ranks"; saved after every contestant.

    Args:
        parsed: the arguments of ``bench_model``.
        facts: the environment.
        entry: options of :func:`entered`.
    """
    chosen = entered(size, backends, only=parsed.only, **entry)
    records = _earlier(parsed.json)
    fork = may_fork(PRELOAD)
    start, left, longest = time.monotonic(), [], LEAST
    for shape in parsed.shapes or size.shapes:
        record = _row(records, shape, parsed.ranks)
        for contestant in chosen:
            name = contestant.name
            if _is_done(record["providers"].get(name)):
                continue
            now = time.monotonic()
            remaining = float("inf") if parsed.minutes is None else start + 60 * parsed.minutes - now
            spec = {
                "size": parsed.size, "self_test": parsed.self_test, "checkpointing": size.checkpointing,
                "backends": backends, "entry": entry, "name": name, "shape": shape,
            }  # fmt: skip
            failure = Trainee(contestant, size, "cpu").failure
            if failure is not None:
                provider = dict(zip(("status", "reason"), failure, strict=True))
            elif remaining < longest:
                provider = None
            else:
                provider = run(spec, parsed.ranks, min(LIMIT, remaining), fork)
            seconds = time.monotonic() - now
            if provider is None and remaining >= LIMIT:
                provider = {"status": "failed", "reason": f"not done after {LIMIT:.0f} s"}
            if provider is None:
                left.append(f"{shape[0]}x{shape[1]} {name}")
                continue
            record["providers"][name] = {"group": contestant.group, **provider, "seconds": round(seconds, 1)}
            _compare(record)
            if provider["status"] == "ok":
                longest = max(longest, seconds)
            _say(
                f"{shape[0]}x{shape[1]} {name}: {_described(record, record['providers'][name])}, {seconds:.0f} s"
            )
            if parsed.json:
                write(parsed.json, facts, records, size)
    if left:
        _say(f"no time left for {'; '.join(left)}; run it again")
    return [record for record in records if record["providers"]]


if __name__ == "__main__":
    _measure_rank(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
