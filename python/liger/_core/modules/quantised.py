# SPDX-License-Identifier: BSD-3-Clause
"""Recognition of quantised weights."""

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..dtensor.inputs import is_dtensor


def is_quantised(weight: object) -> bool:
    """True if a weight is a tensor subclass without data of its own, other than a DTensor; torchao's weights
    are.

    It has the shape and the dtype of the weight that it stands for, and only linear layers accept it: no op
    of liger does.
    """
    # The type of most weights answers it at once.
    plain = type(weight) is nn.Parameter
    return not plain and is_traceable_wrapper_subclass(weight) and not is_dtensor(weight)
