# SPDX-License-Identifier: BSD-3-Clause
"""A training step that is captured in a CUDA graph once for each shape of its tokens, and then replayed.

As in torch's notes on CUDA graphs, "Whole-network capture": steps on another stream come first, gradients are
None when the capture begins, and the optimizer is capturable.
"""

import torch

WARM_UP = 3


class CapturedStep:
    """``step(tokens)`` returns a loss and leaves no gradients behind."""

    def __init__(self, step):
        self._step, self._graphs = step, {}

    def warm_up(self, batches):
        """The losses of a step on each batch without a graph; ``WARM_UP`` of them are enough."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            losses = [self._step(tokens) for tokens in batches]
        torch.cuda.current_stream().wait_stream(stream)
        return losses

    def capture(self, tokens):
        """Peak bytes allocated on the device during the capture, bytes of other owners included."""
        tokens = tokens.clone()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._step(tokens)
        self._graphs[tokens.shape] = graph, tokens, loss
        return torch.cuda.max_memory_allocated()

    def __call__(self, tokens):
        graph, given, loss = self._graphs[tokens.shape]
        given.copy_(tokens)
        graph.replay()
        return loss
