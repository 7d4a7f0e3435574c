# SPDX-License-Identifier: BSD-3-Clause
"""The transformation between the lm_head of a model and its logits, as its forward applies it."""

import contextlib
from typing import NamedTuple

import torch
from torch import nn

from ..transformers.head.kind import linear_layers

# Names of the softcap of logits in configurations.
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# Exceptions of a forward that needs more of its base model or its head than the stubs below have.
_ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


class Transform(NamedTuple):
    """Transformation of ``hidden @ weight.T + bias`` before the softmax, as arguments of the ops."""

    temperature: float = 1.0
    softcap: float | None = None
    logits_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, model, temperature):
        """From a model and a sampling temperature.

        With the logit scale s and the softcap c of a model, ``c * tanh(s * z / c) / T`` equals
        ``C * tanh(z / C) / (T / s)`` with ``C = c / s``.

        Raises:
            ValueError: a scale that is not positive; logits that are more than a scale and a softcap of what
                the head returns; a base model that does not get the token ids; no base model.
        """
        config = model.config.get_text_config()
        scale = _logit_scale(config)
        if not scale > 0.0:
            raise ValueError(
                f"liger.trl: the logits of {config.model_type} are scaled by {scale}, expected a positive number"
            )
        softcaps = (getattr(config, name, None) for name in _SOFTCAPS)
        softcap = next((c for c in softcaps if c is not None), None)
        configured = cls(1.0 / scale, None if softcap is None else softcap / scale)
        # Some models have the text configuration of another one and leave its scale out.
        for transform in dict.fromkeys((configured, cls())):
            if _matches_forward(transform, model):
                return transform._replace(temperature=temperature * transform.temperature)
        raise ValueError(
            f"liger.trl: {type(model).__name__} does more than scale and cap the logits of its lm_head, has layers "
            "before it, or computes the embeddings that its base model gets: only its forward has the right "
            "log-probabilities"
        )

    def __call__(self, product):
        """The transformed logits, in the dtype of ``product``."""
        if self.softcap is not None:
            product = self.softcap * torch.tanh(product / self.softcap)
        return product / self.temperature


def _logit_scale(config):
    """The factor of the logits, which architectures store under different names."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        value = getattr(config, name, None)
        if value is not None:
            return value
    divisor = getattr(config, "logits_scaling", None)
    if divisor is None:
        return 1.0
    return divisor if config.model_type == "hyperclovax" else 1.0 / divisor


def model_without_head(model):
    """The base model, which returns the hidden states that the head gets.

    Raises:
        ValueError: the model has none.
    """
    base = model.base_model
    if base is model:
        base = getattr(model, "model", None)
    if not isinstance(base, nn.Module):
        raise ValueError(
            f"liger.trl: {type(model).__name__} has no base model, expected a causal language model with a base model "
            "that returns hidden states"
        )
    return base


# --- the forward with stubs ---------------------------------------------------------------------------------


class _Output:
    """The result of a base model: its first field is the hidden states, the others are None."""

    def __init__(self, hidden):
        self.last_hidden_state = hidden

    def __getattr__(self, name):
        return None

    def __getitem__(self, index):
        return (self.last_hidden_state,)[index]


class _Stub(nn.Module):
    """Calls a function in place of a module, and has its tensors and numbers, but not its submodules."""

    def __init__(self, module, function):
        super().__init__()
        self.__dict__["module"], self.function, self.arguments = module, function, None

    def forward(self, *args, **kwargs):
        self.arguments = (*args, *kwargs.values())
        return self.function(*args)

    def __getattr__(self, name):
        value = getattr(self.__dict__["module"], name)
        if not isinstance(value, nn.Module):
            return value
        if name == "decoder":
            # Some forwards call the only submodule of their base model instead of it.
            return self
        raise AttributeError(name)


@contextlib.contextmanager
def _replaced(model, stubs):
    """Context manager: these submodules of a model are replaced by stubs. No hook of theirs runs."""
    stubs = {stub.module: stub for stub in stubs}
    before = [
        (parent._modules, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child in stubs
    ]
    for children, name, child in before:
        children[name] = stubs[child]
    try:
        yield
    finally:
        for children, name, child in before:
            children[name] = child


def _matches_forward(transform, model):
    """True if a model makes its logits by this transformation of its base model's result for the same ids.

    The forward runs with a base model that returns known hidden states and a head that is a cheap linear
    function: no weight is read, so the model may be sharded.
    """
    base, lm_head = model_without_head(model), model.get_output_embeddings()
    linear = next(iter(linear_layers(lm_head)), None)
    if linear is None:
        return True
    device, dtype = linear.weight.device, linear.weight.dtype
    if device.type == "meta":
        device = torch.device("cpu")
    # Multiples of 1/4, which are exact in 16 bits, from -32 to 31.75.
    hidden = (torch.arange(2 * linear.in_features, device=device) * 37 % 256 - 128).to(dtype) / 4
    hidden = hidden.view(1, 2, -1)
    index = torch.arange(linear.out_features, device=device) % linear.in_features
    bias = 0.0 if linear.bias is None else (torch.arange(linear.out_features, device=device) % 8).to(dtype)

    def product(x):
        return x[..., index] + bias

    stubs = _Stub(base, lambda *args: _Output(hidden)), _Stub(lm_head, product)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
    try:
        with _replaced(model, stubs), torch.no_grad():
            logits = type(model).forward(model, input_ids=ids).logits
    except _ERRORS:
        # It calls submodules of the base model, or reads more of its result than the hidden states.
        return False
    # A base model that does not get the ids gets embeddings, which the forward computes.
    if stubs[1].arguments is None or not any(argument is ids for argument in stubs[0].arguments or ()):
        return False
    expected = transform(product(hidden).float())
    tolerance = 8 * torch.finfo(dtype).eps
    return logits.shape == expected.shape and torch.allclose(
        logits.float(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
    )
