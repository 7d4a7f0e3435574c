"""Processes of one machine that measure together: their environment, and their end."""

import contextlib
import ctypes
import signal

import torch.distributed as dist

_PR_SET_PDEATHSIG = 1


def end_with_parent():
    """The process that calls it is ended when its parent ends, also by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def rendezvous(count):
    """The environment variables of each of ``count`` ranks, as torchrun sets them.

    Their store is in this process until the context ends, as that of torchrun: a port that is only looked up may be
    taken by another process before rank 0 listens on it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    yield [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
