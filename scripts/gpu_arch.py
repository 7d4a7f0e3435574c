"""Prints the CUDA architecture to build for the first visible GPU: 80, 90a, 100a, ... Exit code 1 without a
GPU."""

import sys

import torch

if not torch.cuda.is_available():
    sys.exit(1)
major, minor = torch.cuda.get_device_capability()
# From Hopper on, architecture-specific instructions need the "a" variant.
print(f"{major}{minor}{'a' if major >= 9 else ''}")
