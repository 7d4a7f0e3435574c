"""Root-mean-square normalisation as a module."""

import torch
from torch import nn

from ..ops.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimensions; the constructor of :class:`torch.nn.RMSNorm`.

    ``y = x * rsqrt(mean(x^2) + eps) * (offset + weight)``, with statistics in float32.

    Args:
        normalized_shape: the size of the last dimension, or the sizes of the last dimensions.
        eps: added to the mean square; None means ``torch.finfo(x.dtype).eps``.
        elementwise_affine: whether there is a weight. It starts so that ``offset + weight`` is one.
        offset: added to the weight; 1.0 for Gemma, whose weights are stored around zero.
        casting_mode: where the roundings to the dtype of x happen: ``"llama"``, ``"gemma"`` or ``"none"``, as in
            :func:`liger.rms_norm`.
        device, dtype: of the weight.

    Shape:
        x: (..., *normalized_shape); the result has the shape and dtype of x.

    Raises:
        RuntimeError: an x that does not end in normalized_shape, or what :func:`liger.rms_norm` refuses.
    """

    def __init__(
        self,
        normalized_shape,
        eps=None,
        elementwise_affine=True,
        offset=0.0,
        casting_mode="llama",
        device=None,
        dtype=None,
    ):
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        self.normalized_shape = tuple(shape)
        self.eps, self.offset, self.casting_mode = eps, offset, casting_mode
        self.elementwise_affine = elementwise_affine
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self):
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x):
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        dims = len(self.normalized_shape)
        if x.shape[-dims:] != self.normalized_shape:
            raise RuntimeError(
                f"RMSNorm: x has shape {tuple(x.shape)}, expected (..., {', '.join(map(str, self.normalized_shape))})"
            )
        if dims == 1:
            return rms_norm(x, self.weight, eps, self.offset, self.casting_mode)
        weight = None if self.weight is None else self.weight.flatten()
        y = rms_norm(x.flatten(-dims), weight, eps, self.offset, self.casting_mode)
        return y.unflatten(-1, self.normalized_shape)

    def extra_repr(self):
        return (
            f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}, "
            f"offset={self.offset}, casting_mode={self.casting_mode!r}"
        )
