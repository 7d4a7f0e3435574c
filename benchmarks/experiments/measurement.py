# SPDX-License-Identifier: BSD-3-Clause
"""One cell while a process measures it, and the record that comes of it."""

import datetime
import json
import signal
import tempfile
import time
from pathlib import Path

from . import launch


class Measurement:
    """Starts the process of a cell.

    Args:
        run: the options of the run, a ``driver.Run``.
        name: of the experiment.
        cell: the Cell.
        gpus: its GPUs, counted among those that this process sees.
    """

    def __init__(self, run, name, cell, gpus=(0,)):
        self.cell = cell
        self._folder = tempfile.TemporaryDirectory(prefix="liger-experiment-")
        self._record, self._log = (Path(self._folder.name) / part for part in ("record.json", "log"))
        self._begin = time.monotonic()
        self._left = run.deadline - self._begin
        self._child = launch.start(
            name, cell, self._record, self._log, tiny=run.tiny, cache=run.cache, with_facts=run.facts is None,
            fork=run.fork, gpus=gpus,
        )  # fmt: skip

    def wait(self, seconds):
        """True if the cell is measured, or its time is over, after so many seconds at most."""
        rest = min(self.cell.seconds, self._left) - (time.monotonic() - self._begin)
        return self._child.wait(max(min(seconds, rest), 0)) is not None or rest <= 0

    def end(self):
        """The record, with its date and the seconds that it took; None if the time limit of the run has cut
        it off."""
        try:
            code = self._child.wait(0)
            launch.end(self._child)
            record = self._read(code)
        finally:
            self._folder.cleanup()
        if record is not None:
            record["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            record["seconds"] = round(time.monotonic() - self._begin, 1)
        return record

    def _read(self, code):
        if self._record.is_file():
            return json.loads(self._record.read_text())
        tail = self._log.read_text(errors="replace")[-1500:] if self._log.is_file() else ""
        if code is None:
            if self.cell.seconds > self._left:
                return None
            reason = f"not done after {self.cell.seconds:.0f} s"
            return {"status": "timeout", "reason": reason, "traceback": tail}
        # The kernel ends the process with most memory when the host has no memory left.
        status = "oom" if code == -signal.SIGKILL else "failed"
        return {"status": status, "reason": f"exit code {code}", "traceback": tail}
