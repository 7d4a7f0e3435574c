"""Prints the CUDA architecture to build for the first visible GPU: 80, 90a, 100a, ..."""

import torch

major, minor = torch.cuda.get_device_capability()
# From Hopper on, the instructions that belong to one architecture alone are the "a" variant.
print(f"{major}{minor}{'a' if major >= 9 else ''}")
