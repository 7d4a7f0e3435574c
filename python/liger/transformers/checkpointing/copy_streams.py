# SPDX-License-Identifier: BSD-3-Clause
"""The streams of a device between which tensors and host memory are copied."""

import torch


class Streams:
    """The stream that computes, and two for copies. Elsewhere than on a GPU copies are done on return."""

    def __init__(self, device):
        self.device = device
        # torch.cpu has streams that do nothing; the modules of other devices have none, or others.
        self._module = torch.cuda if device.type == "cuda" else torch.cpu
        self.leave, self.back = self._module.Stream(device), self._module.Stream(device)

    def current(self):
        return self._module.current_stream(self.device)

    def block(self, size):
        pinned = self.device.type == "cuda"
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def empty(self, shape, stride, dtype):
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def copy(self, stream, target, source):
        with self._module.stream(stream):
            target.copy_(source, non_blocking=self._module is torch.cuda)

    @staticmethod
    def used_by(tensor, stream):
        if tensor.is_cuda:
            tensor.record_stream(stream)
