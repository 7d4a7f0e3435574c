"""Small helpers shared by the autograd formulas."""

import torch


def wants_grad(*tensors):
    """For each tensor, whether a gradient will be asked for: skipped work is decided before the op runs."""
    enabled = torch.is_grad_enabled()
    return tuple(enabled and t is not None and t.requires_grad for t in tensors)


def graph_is_kept():
    """Inside a backward: whether it may run again (retain_graph), so that what was saved must stay as it is."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def may_write_saved():
    """Inside a backward: whether saved tensors die with it and may be overwritten. Never while compiling."""
    return not torch.compiler.is_compiling() and not graph_is_kept()
