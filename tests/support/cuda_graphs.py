# SPDX-License-Identifier: BSD-3-Clause
"""Capture of a function in a CUDA graph, and calls that must not wait for the device."""

import contextlib

import torch


def capture(function, warm_up=1):
    """(graph, results of the captured call), after ``warm_up`` calls on another stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


@contextlib.contextmanager
def no_synchronisation():
    """A call in the block that waits for the device raises RuntimeError."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
