"""The dtypes that the ops compute in."""

import torch


def accumulate_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32
