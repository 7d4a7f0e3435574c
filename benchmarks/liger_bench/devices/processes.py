# SPDX-License-Identifier: BSD-3-Clause
"""Processes of one machine that measure together: how they are forked, their environment, and their end."""

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal

import torch
import torch.distributed as dist

FORK = multiprocessing.get_context("fork")
_CUDA_ERROR_NOT_INITIALIZED = 3
_PR_SET_PDEATHSIG = 1


def elsewhere(function, *arguments):
    """Its result in a process of its own, which leaves the CUDA driver of this one as it is."""
    with FORK.Pool(1) as pool:
        return pool.apply(function, arguments)


def count_gpus():
    """The number of GPUs; torch may initialise the driver to find out, so another process asks."""
    return elsewhere(torch.cuda.device_count)


def may_fork(preload=()):
    """True if a forked process can use CUDA: nothing in this process has initialised the driver.

    Args:
        preload: modules to import before, so that forked processes need not.
    """
    # Packages ask at import whether there is a GPU. torch then asks NVML, which leaves the driver as it is.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for name in preload:
        importlib.import_module(name)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == _CUDA_ERROR_NOT_INITIALIZED


def write_output_to(log):
    """What this process prints from now on goes to the file."""
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def end_with_parent():
    """The process that calls it is ended when its parent ends, also by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def rendezvous(count):
    """The environment variables of each of ``count`` ranks, as torchrun sets them.

    Their store is in this process until the context ends, as torchrun's does: a port that is only looked up
    may be taken by another process before rank 0 listens on it.
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
