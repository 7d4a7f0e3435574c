# SPDX-License-Identifier: BSD-3-Clause
"""Starts the process of a cell, or the processes of its ranks: forked where that is safe, and else anew."""

import contextlib
import os
import signal
import subprocess
import sys
from multiprocessing import connection

from liger_bench.devices.processes import FORK, end_with_parent, rendezvous, write_output_to

from . import process

# What most cells import: forked processes then start at once.
PRELOAD = ("transformers.models.llama.modeling_llama", "liger.transformers", "liger_bench.models.trainee")


def _rank(environment, arguments):
    end_with_parent()
    os.environ.update(environment.recv())
    process.run(*arguments)


def _ranks(count, arguments):
    """Forks the ranks of a cell. The first failure ends the others, which would wait for it; returns the exit
    code."""
    # Forked before the store has threads: a lock of libc that a thread holds at a fork stays locked in the
    # child.
    pipes = [FORK.Pipe(duplex=False) for _ in range(count)]
    ranks = [FORK.Process(target=_rank, args=(receiver, arguments)) for receiver, _ in pipes]
    for rank in ranks:
        rank.start()
    with rendezvous(count) as environments:
        for (_, sender), environment in zip(pipes, environments, strict=True):
            sender.send(environment)
        running = list(ranks)
        while running:
            connection.wait([rank.sentinel for rank in running])
            ended = [rank for rank in running if rank.exitcode is not None]
            running = [rank for rank in running if rank not in ended]
            failed = [rank.exitcode for rank in ended if rank.exitcode]
            if failed:
                for rank in running:
                    rank.kill()
                return failed[0]
    return 0


class Forked:
    """A fork of this process that measures a cell, by forks of its own if the cell has several ranks.

    Args:
        cell: a Cell.
        arguments: as for ``process.run``.
        log: path of a file for what the processes print.
        variables: of the environment, to be changed.
    """

    def __init__(self, cell, arguments, log, variables):
        self._process = FORK.Process(target=self._child, args=(cell, arguments, log, variables), daemon=False)
        self._process.start()
        self.pid = self._process.pid

    @staticmethod
    def _child(cell, arguments, log, variables):
        os.environ.update(variables)
        os.setsid()
        end_with_parent()
        write_output_to(log)
        if cell.gpus == 1:
            process.run(*arguments)
            return
        code = _ranks(cell.gpus, arguments)
        if code == -signal.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)  # the driver takes it for a lack of memory on the host
        sys.exit(code)

    def wait(self, seconds):
        """The exit code, or None if the process still runs after this time."""
        self._process.join(seconds)
        return self._process.exitcode

    def kill(self):
        self._process.kill()


class Started:
    """A new Python process with this command, whose output goes to the file ``log``; methods as of Forked."""

    def __init__(self, command, log, variables):
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                command,
                env=os.environ | variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self.pid = self._process.pid

    def wait(self, seconds):
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self):
        self._process.kill()


def _visible(gpus):
    """The environment variable of a process that sees these of the GPUs that this one sees."""
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen[gpu] if seen else str(gpu) for gpu in gpus)}


def start(name, cell, record, log, *, tiny, cache, with_facts, fork, gpus):
    """A Forked or Started that measures this cell of experiment ``name`` and sees no other GPU than its
    own."""
    variables = _visible(gpus)
    if fork:
        return Forked(cell, (name, cell, str(record), tiny, str(cache), with_facts), log, variables)
    command = [sys.executable]
    if cell.gpus > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={cell.gpus}"]
    command += ["-m", "experiments.process", name, cell.key, str(record), str(cache)]
    options = [*(["--tiny"] if tiny else []), *(["--facts"] if with_facts else [])]
    return Started([*command, *options], log, variables)


def end(child):
    """Ends the process and everything that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    child.wait(30)
