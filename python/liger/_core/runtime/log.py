# SPDX-License-Identifier: BSD-3-Clause
"""Diagnostics on stderr, which ``LIGER_LOG`` selects: ``dispatch``, ``plan``, or both with a comma.

``plan`` is read by the planners in C++ (csrc/host/log.h).
"""

import os
import sys

VARIABLE = "LIGER_LOG"
TOPICS = ("dispatch", "plan")


def topics():
    """The topics that ``LIGER_LOG`` names; raises ValueError for others."""
    chosen = [topic.strip() for topic in os.environ.get(VARIABLE, "").split(",") if topic.strip()]
    for topic in chosen:
        if topic not in TOPICS:
            raise ValueError(f"{VARIABLE}: unknown topic '{topic}', expected one of {', '.join(TOPICS)}")
    return chosen


def log_dispatch(op, backend, reason):
    if "dispatch" in topics():
        print(f"liger: dispatch {op} -> {backend} ({reason})", file=sys.stderr, flush=True)
