# SPDX-License-Identifier: BSD-3-Clause
"""An lm_head with a weight that is sharded over the processes of a tensor-parallel group.

torch's ``parallelize_module`` makes weight and bias DTensors; hooks of the layer make a DTensor of the input,
and redistribute the output. transformers does this in a forward of the instance, with local tensors where
gradients are disabled. Older versions of transformers shard without DTensors, in hooks.

The loss of a head that shards its classes is :func:`liger.fused_linear_ce` of a DTensor weight. Every process
gets the complete gradient of the hidden states, as from the output of the layer.
"""

import torch

from ..._core.dtensor.inputs import is_dtensor

KIND = "vocab_parallel_fused_linear_cross_entropy"
FROM_LOGITS = ": the loss is computed from full logits"


def tensor_parallel_forward(head):
    """The forward that transformers gave the instance for tensor parallelism; None without one."""
    forward = head.__dict__.get("forward")
    return forward if _is_of_transformers(forward) else None


def _is_of_transformers(function):
    module = getattr(function, "__module__", None) or ""
    return module.startswith("transformers.") and module.endswith(".tensor_parallel")


def is_tensor_parallel(head):
    """True if torch or transformers sharded this layer for tensor parallelism. A DTensor alone does not say
    so: outside of the forward of their unit, the parameters of ``fully_shard`` are also DTensors."""
    return (
        getattr(head, "_distribute_module_applied", False)
        or hasattr(head.__dict__.get("forward"), "liger_replaced")
        or tensor_parallel_forward(head) is not None
        or _has_hooks_of_transformers(head)
    )


def _has_hooks_of_transformers(head):
    hooks = (*head._forward_pre_hooks.values(), *head._forward_hooks.values())
    return any(map(_is_of_transformers, hooks))


def _shards_classes(tensor, gathered):
    """True if each process has one block of the rows of a DTensor.

    ``gathered``: False outside of the forward of a unit of ``fully_shard``, which has sharded the tensor
    along the dimensions of the mesh before the last one.
    """
    from ..._core.dtensor.placements import is_sharded

    found = tensor.placements
    if not gathered and tensor.device_mesh.ndim > 1:
        found = found[-1:]
    sharded = [p for p in found if is_sharded(p) and p.dim == 0]
    return len(sharded) == 1 and all(p.is_replicate() for p in found if p not in sharded)


def why_from_logits(head, weight, bias, recipe, gathered=True):
    """Why a sharded head cannot compute the loss; None if it can, or if it is not sharded.

    Args:
        weight, bias: of the head, DTensors or not.
        recipe: the :class:`CausalLMRecipe` of the model.
        gathered: whether this is called within the forward of the head.
    """
    if not is_dtensor(weight):
        if _has_hooks_of_transformers(head):
            return f"its head has a shard of the weight that is no DTensor{FROM_LOGITS}"
        return None
    placements = tuple(weight.placements)
    if not _shards_classes(weight, gathered):
        return (
            f"the weight of its head is a DTensor with placements {placements}, expected shards of the classes"
            + FROM_LOGITS
        )
    if bias is not None and not (is_dtensor(bias) and _shards_classes(bias, gathered)):
        return f"its head shards the classes of the weight, but not of the bias{FROM_LOGITS}"
    if recipe.classes is not None:
        return f"it cuts off the logits of some classes, which its head shards{FROM_LOGITS}"
    if recipe.added is not None:
        return f"it adds {recipe.added} to the logits, and its head shards their classes{FROM_LOGITS}"
    if recipe.accumulate_grad_weight:
        return f"accumulate_grad_weight does not support a head that shards its classes{FROM_LOGITS}"
    return None


def whole_hidden(hidden):
    """The hidden states of all tokens, as a plain tensor."""
    return hidden.full_tensor() if is_dtensor(hidden) else hidden


class _Copies(torch.autograd.Function):
    """A copy of a loss per process, along a last dimension; the gradient is the own copy's."""

    @staticmethod
    def forward(ctx, loss, processes, rank):
        ctx.rank = rank
        return loss.unsqueeze(-1).repeat(*(1,) * loss.dim(), processes)

    @staticmethod
    def backward(ctx, grad):
        return grad[..., ctx.rank], None, None


def as_output(loss, mesh):
    """The loss as a DTensor that hooks of a head can replicate, or shard along the last dimension."""
    from torch.distributed.tensor import DTensor, Replicate

    copies = _Copies.apply(loss, mesh.size(), mesh.get_local_rank())
    return DTensor.from_local(copies, mesh, [Replicate()], run_check=False)


def own_copy(output, rank):
    """The loss, from what hooks made of :func:`as_output`: all copies, or the copy of this process."""
    copies = (output.to_local() if is_dtensor(output) else output).reshape(-1)
    return copies[rank if len(copies) > 1 else 0]
