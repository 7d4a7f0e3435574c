# SPDX-License-Identifier: BSD-3-Clause
"""A float32 sum of the gradients of a weight over micro-batches, to which a backward adds without a
temporary.

The sum is ``weight.main_grad`` (as Megatron-LM and Apex name it) or ``weight.grad``. The backward of an
lm_head adds to it directly, so autograd gets no gradient of the weight.
"""

import torch

from ..dtensor.inputs import is_dtensor
from ..math.dtypes import accumulate_dtype
from ..op.arguments import described, dtype_name
from ..op.autograd import is_transformed, may_write_inputs


def refuse_dtensor(op, name, weight):
    """Raises RuntimeError for a weight that is a DTensor: before anything gathers it."""
    if is_dtensor(weight):
        raise RuntimeError(
            f"{op}: accumulate_grad_weight with {name}, a DTensor, expected a whole plain parameter"
        )


class WeightGradientSum:
    """The float32 sum (float64 for a float64 weight) of one weight.

    Args:
        op: the public function, for messages.
        name: its argument.
        weight: a leaf that requires grad.

    Raises:
        RuntimeError: autograd, hooks or a sharding framework must see the gradient of the weight, or it has
            no place for a float32 gradient.
    """

    def __init__(self, op, name, weight):
        refuse_dtensor(op, name, weight)
        self.op, self.name, self.weight = op, name, weight
        self.dtype = accumulate_dtype(weight.dtype)
        reason = self._unsupported()
        if reason is not None:
            raise RuntimeError(f"{op}: accumulate_grad_weight with {name}, {reason}")
        self._check_buffer()

    def _unsupported(self):
        weight = self.weight
        if is_transformed():
            return "which torch.func or forward mode transforms, expected a call of plain autograd"
        if hasattr(weight, "ds_id"):
            return "a parameter of DeepSpeed ZeRO-3, expected one that is whole outside of its module's call"
        if not weight.is_leaf:
            return (
                f"the result of {type(weight.grad_fn).__name__}, expected a leaf: pass the parameter itself, "
                "neither a view nor a cast"
            )
        if weight._backward_hooks:
            return "which has hooks that read its gradient (register_hook), expected none"
        return None

    def _check_buffer(self):
        """Returns (the name of the attribute that has the sum, the sum or None)."""
        weight, main_grad = self.weight, getattr(self.weight, "main_grad", None)
        what = "main_grad"
        if main_grad is None:
            what, main_grad = "grad", weight.grad
        if main_grad is None:
            # grad_dtype None: of any dtype.
            if weight.grad_dtype not in (self.dtype, None):
                raise RuntimeError(
                    f"{self.op}: accumulate_grad_weight with {self.name} of dtype {dtype_name(weight.dtype)}, which "
                    f"has no float32 gradient: set {self.name}.main_grad to a float32 tensor of its shape, "
                    f"or {self.name}.grad_dtype to torch.float32"
                )
            return what, None
        fits = (
            isinstance(main_grad, torch.Tensor)
            and not is_dtensor(main_grad)
            and main_grad.layout == torch.strided
            and main_grad.dtype == self.dtype
            and main_grad.shape == weight.shape
            and main_grad.device == weight.device
        )
        if not fits:
            raise RuntimeError(
                f"{self.op}: accumulate_grad_weight with {self.name}.{what} = {described(main_grad)}, expected a "
                f"{dtype_name(self.dtype)} tensor of shape {tuple(weight.shape)} on {weight.device}"
            )
        return what, main_grad

    def check_memory(self, others):
        """Raises RuntimeError if two elements of the sum have one place in memory, or if it shares memory
        with the weight or one of ``others``, tensors or None by argument: the backward writes the sum while
        it reads them."""
        what, main_grad = self._check_buffer()
        if main_grad is None or not may_write_inputs(main_grad, self.weight, *others.values()):
            return  # Tracers have no memory to compare.
        named = {f"{self.name}.{what}": main_grad, self.name: self.weight, **others}
        named = {name: tensor.detach() for name, tensor in named.items() if tensor is not None}
        torch.ops.liger.check_written(self.op, list(named), list(named.values()), 1)

    def is_wanted(self):
        """Inside a backward: whether it computes the gradient of the weight."""
        if not self.weight.requires_grad:
            return False  # Frozen since the forward.
        node = torch.autograd.graph.get_gradient_edge(self.weight).node
        try:
            return torch._C._will_engine_execute_node(node)
        except RuntimeError as error:
            # The only error: a leaf is among the inputs of torch.autograd.grad.
            raise RuntimeError(
                f"{self.op}: torch.autograd.grad of {self.name} with accumulate_grad_weight, expected loss.backward(): "
                "the gradient is added to main_grad or grad"
            ) from error

    def buffer(self):
        """The sum; a ``grad`` that does not exist yet is created with zeros."""
        what, main_grad = self._check_buffer()
        if main_grad is None:
            main_grad = torch.zeros_like(self.weight, dtype=self.dtype)
            setattr(self.weight, what, main_grad)
        return main_grad

    def mark_added(self):
        # Megatron-LM sets the attribute to False, and adds weight.grad to main_grad unless it is True
        # afterwards.
        if hasattr(self.weight, "grad_added_to_main_grad"):
            self.weight.grad_added_to_main_grad = True


class _accumulate_grad_weight(torch.autograd.Function):
    """The identity of some tensors. Its backward adds the gradient of a weight to a
    :class:`WeightGradientSum`.

    It has the name of the option, which torch.jit.save prints when it refuses a traced call of it.
    """

    @staticmethod
    def forward(ctx, sum_of, add, count, weight, *tensors):
        ctx.sum_of, ctx.add = sum_of, add
        ctx.saved = len(tensors) - count
        ctx.save_for_backward(weight, *tensors[count:])
        ctx.set_materialize_grads(False)
        # Not views: a view that a Function returns cannot be written in place, as in ``loss /= steps``.
        return tuple(t.clone() for t in tensors[:count])

    @staticmethod
    def backward(ctx, *grads):
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{ctx.sum_of.op}: create_graph with accumulate_grad_weight, which adds to a tensor: the gradient has "
                "no derivative"
            )
        if any(g is not None for g in grads) and ctx.sum_of.is_wanted():
            weight, *saved = ctx.saved_tensors
            total = ctx.sum_of.buffer()
            ctx.add(total, weight, saved, grads)
            ctx.sum_of.mark_added()
        return (None,) * 4 + grads + (None,) * ctx.saved


@torch.compiler.disable(reason="liger: accumulate_grad_weight adds to weight.main_grad or weight.grad")
def add_in_backward(op, name, weight, add, outputs, saved, names=()):
    """``outputs``; their backward also calls ``add(total, weight, saved, gradients of outputs)`` without
    autograd.

    Args:
        op, name, weight: as in :class:`WeightGradientSum`.
        outputs: results that were computed with the detached weight.
        saved: tensors that ``add`` needs, or None.
        names: the arguments that the first of ``saved`` may share memory with.
    """
    sum_of = WeightGradientSum(op, name, weight)
    sum_of.check_memory(dict(zip(names, saved, strict=False)))
    detached = [t if t is None else t.detach() for t in saved]
    return _accumulate_grad_weight.apply(sum_of, add, len(outputs), weight, *outputs, *detached)
