# SPDX-License-Identifier: BSD-3-Clause
"""The streams of a device between which tensors and host memory are copied."""

import torch


class CudaStreams:
    """The stream that computes, and two for copies, of one GPU."""

    def __init__(self, device):
        self.device = device
        self.leave, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def current(self):
        return torch.cuda.current_stream(self.device)

    @staticmethod
    def block(size):
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def empty(self, shape, stride, dtype):
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    @staticmethod
    def copy(stream, target, source):
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    @staticmethod
    def used_by(tensor, stream):
        tensor.record_stream(stream)


class NoStreams:
    """The same on a CPU, where every copy is done when it returns."""

    def __init__(self, device):
        self.device = device
        self.leave = self.back = self

    def current(self):
        return self

    def record_event(self):
        return None

    def wait_event(self, event):
        pass

    @staticmethod
    def block(size):
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def empty(self, shape, stride, dtype):
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    @staticmethod
    def copy(stream, target, source):
        target.copy_(source)

    @staticmethod
    def used_by(tensor, stream):
        pass
