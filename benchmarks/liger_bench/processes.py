"""Processes of one machine that measure together: their environment, and their end."""

import ctypes
import signal
import socket

_PR_SET_PDEATHSIG = 1


def end_with_parent():
    """The process that calls it is ended when its parent ends, also by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def environments(count):
    """The environment variables of each of ``count`` ranks, as torchrun sets them, with a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
