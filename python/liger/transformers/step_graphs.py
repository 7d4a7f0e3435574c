# SPDX-License-Identifier: BSD-3-Clause
"""``graph_step``: a training step of few tokens as one CUDA graph, which the host launches at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .._core.dtensor.inputs import is_dtensor
from .checkpointing.checkpoint import planners
from .checkpointing.decoder_layers import FLAG

_NAME = "liger.transformers.graph_step"
# Steps of a shape before its capture: libraries initialise themselves, the optimizer makes its states.
WARM_UP = 3
# Each graph keeps its inputs and its loss, and its capture takes time.
_MOST_SHAPES = 4
_DEVICE = "cuda"
_CAUSES = (
    "Does it wait for the device, as older transformers do for an attention mask? Does it recompute layers "
    "without preserve_rng_state=False? docs/guides/cuda_graphs.md says more"
)


def graph_step(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, max_grad_norm: float | None = None
) -> Callable[..., Tensor]:
    """A function that makes a training step of the model, from the fourth step of a shape on as one CUDA
    graph.

    With few tokens a step takes the host longer than the device. A graph launches all kernels of a step at
    once: forward, loss, backward and, with an optimizer, clipping, ``optimizer.step()`` and ``zero_grad()``.
    Every call is one step on its own batch, with the loss and the gradients of the step without a graph.

    - **Shapes.** Each shape of the inputs has a graph; all graphs share their memory. Pad batches to one
      shape, with -100 as labels. A shape that is rare, such as the last batch of an epoch, runs without a
      graph.
    - **With an optimizer**, its settings become ``capturable=True`` and its learning rates tensors, which
      schedulers and assignments fill. Other settings stay as captured. After its ``load_state_dict()``, or
      if one of several groups with the same tensor as learning rate gets another, all shapes are captured
      again.
    - **Without one**, a call adds to the gradients, so a call per micro-batch accumulates, and
      ``optimizer.step()`` and ``zero_grad()`` follow as usual. From the capture on gradients lie in the same
      memory at every step.
    - **What is captured stays.** After a change of the model (other adapters, frozen weights, ``eval()``)
      make a new function.

    The method is PyTorch's whole-network capture (PyTorch documentation, "CUDA semantics", CUDA graphs).

    Args:
        model: on one CUDA device, in training mode, patched or not. Its outputs have a ``loss``. It is called
            with ``use_cache=False``.
        optimizer: with all trainable parameters of the model, of a class with the setting ``capturable``,
            such as ``torch.optim.AdamW``. None: the step ends with the backward.
        max_grad_norm: the norm of all gradients to clip at, with an optimizer.

    Returns:
        A function of the keyword arguments of the model, Tensors on any device, such as ``input_ids``,
        ``labels`` and ``num_items_in_batch``; those that are None are left out. It returns the loss,
        detached, as a Tensor of no dimensions.

    Raises:
        TypeError: an argument of another type; an input that is not a Tensor.
        ValueError: a model on another device, on several, sharded or wrapped for several devices, with layers
            planned by :func:`checkpoint`, or that trains nothing; an optimizer without ``capturable``, or
            without a parameter of the model; ``max_grad_norm`` below 0 or without an optimizer; a fifth shape
            of the inputs; dropout in layers that are recomputed; gradients from elsewhere before a step with
            an optimizer.
        RuntimeError: a step that cannot be captured, since it waits for the device.

    Example::

        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        >>> step = liger.transformers.graph_step(model, optimizer)  # doctest: +SKIP
        >>> losses = [step(**batch) for batch in loader]  # doctest: +SKIP
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_NAME}: model must be a torch.nn.Module, not {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{_NAME}: optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if max_grad_norm is not None and (optimizer is None or not max_grad_norm >= 0):
        raise ValueError(f"{_NAME}: max_grad_norm is {max_grad_norm}, expected at least 0, and an optimizer")
    return _GraphStep(model, optimizer, max_grad_norm)


class _Graphs:
    """The graphs of a device, whose memory is one pool."""

    def __init__(self, device):
        self.stream, self.pool = torch.cuda.Stream(device), None

    def run(self, function):
        """The result of a function, without a graph, on the stream of the captures."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            result = function()
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        return result

    def capture(self, function):
        """A function that replays the call of this one, and returns its result."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, of data loaders, may allocate memory meanwhile.
        how = {"stream": self.stream, "pool": self.pool, "capture_error_mode": "thread_local"}
        with torch.cuda.device(self.stream.device), torch.cuda.graph(graph, **how):
            result = function()
        self.pool = graph.pool()

        def replay():
            graph.replay()
            return result.clone()

        return replay


class _Shape:
    """What is known of a shape of inputs."""

    def __init__(self):
        self.steps, self.inputs, self.replay = 0, None, None
        # Without an optimizer: the parameters whose gradients a step adds to.
        self.trained: set[Tensor] = set()


class _GraphStep:
    def __init__(self, model, optimizer, max_grad_norm):
        self.model, self.optimizer, self.max_grad_norm = model, optimizer, max_grad_norm
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.device = _device_of(model, self.parameters)
        self.graphs, self.shapes = _Graphs(self.device), {}
        # With an optimizer: its settings, and the learning rates that the graphs read.
        self.groups, self.rates = None, []
        if optimizer is not None:
            self._follow_optimizer()
        # Without an optimizer: the memory of gradients from the capture on.
        self.memory: dict[Tensor, Tensor] = {}

    def __call__(self, **arguments: Tensor | None) -> Tensor:
        if self.optimizer is not None:
            self._follow_optimizer()
        inputs = {name: value for name, value in arguments.items() if value is not None}
        shape = self._shape_of(inputs)
        if self.optimizer is not None and any(p.grad is not None for p in self.parameters):
            raise ValueError(
                f"{_NAME}: the model has gradients from elsewhere, which a step with an optimizer would lose: "
                "call zero_grad() first, or leave out the optimizer to accumulate"
            )
        with _without_cached_casts():
            if shape.steps < WARM_UP:
                given = {name: value.to(self.device, non_blocking=True) for name, value in inputs.items()}
                before = self._gradients()
                loss = self.graphs.run(lambda: self._train(given))
                shape.steps += 1
                for parameter, (grad, version) in self._gradients().items():
                    old, of_old = before.get(parameter, (None, 0))
                    if old is not grad or of_old != version:
                        shape.trained.add(parameter)
                return loss
            if shape.replay is None:
                self._capture(shape, inputs)
        for name, value in inputs.items():
            shape.inputs[name].copy_(value, non_blocking=True)
        self._lay_gradients(shape)
        return shape.replay()

    def _follow_optimizer(self):
        """Graphs read the states and learning rates of their capture: starts again after load_state_dict,
        which replaces both, and add_param_group, and writes learning rates that were assigned into the
        tensors."""
        if self.groups is not self.optimizer.param_groups or len(self.groups) != len(self.rates):
            _make_capturable(self.optimizer, self.parameters)
            self.groups = self.optimizer.param_groups
            self.rates = [group["lr"] for group in self.groups]
            self._start_again()
        for index, (group, rate) in enumerate(zip(self.groups, self.rates, strict=True)):
            if group["lr"] is not rate:
                if sum(rate is other for other in self.rates) > 1:
                    # The other groups keep the tensor, and the graphs read it for this one too.
                    rate = self.rates[index] = torch.empty_like(rate)
                    self._start_again()
                group["lr"] = rate.fill_(group["lr"])

    def _start_again(self):
        if self.shapes:
            self.graphs, self.shapes = _Graphs(self.device), {}

    def _shape_of(self, inputs):
        for name, value in inputs.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"{_NAME}: {name} must be a Tensor, not {type(value).__name__}")
        key = tuple(sorted((name, tuple(value.shape), str(value.dtype)) for name, value in inputs.items()))
        if key not in self.shapes and len(self.shapes) == _MOST_SHAPES:
            shapes = ", ".join(f"{name} {shape}" for name, shape, _ in key)
            raise ValueError(
                f"{_NAME}: {shapes} is shape {_MOST_SHAPES + 1} of the inputs, at most {_MOST_SHAPES} have a "
                "graph: pad the batches to one"
            )
        return self.shapes.setdefault(key, _Shape())

    def _train(self, inputs):
        loss = self.model(**inputs, use_cache=False).loss
        loss.backward()
        if self.optimizer is not None:
            if self.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _capture(self, shape, inputs):
        _check_dropout(self.model)
        given = {name: torch.empty_like(value, device=self.device) for name, value in inputs.items()}
        missed = True
        while missed:
            # A gradient that a capture makes lies in the memory of its graph, which writes it where it should
            # add: such parameters join the others for a second capture.
            aside = {p: p.grad for p in self.parameters if p not in shape.trained}
            for parameter in aside:
                parameter.grad = None
            self._lay_gradients(shape)
            try:
                # The graph of the first capture lives until here, and so does the memory of all graphs.
                replay = self.graphs.capture(lambda: self._train(given))
                missed = [p for p in aside if p.grad is not None]
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                first = str(error).partition("\n")[0]
                raise RuntimeError(f"{_NAME}: the step cannot be captured: {first} ({_CAUSES})") from error
            finally:
                for parameter, grad in aside.items():
                    parameter.grad = grad
            shape.trained.update(missed)
        shape.inputs, shape.replay = given, replay

    def _gradients(self):
        """The gradients that there are, and how often each was written, as far as torch knows."""
        return {p: (p.grad, p.grad._version) for p in self.parameters if p.grad is not None}

    def _lay_gradients(self, shape):
        """Without an optimizer: moves the gradients of a shape to the memory that the graphs add to."""
        zeros = []
        for parameter in shape.trained:
            memory = self.memory.get(parameter)
            if memory is None:
                memory = self.memory[parameter] = torch.empty_like(parameter)
            if parameter.grad is None:
                zeros.append(memory)
            elif parameter.grad is not memory:
                memory.copy_(parameter.grad)
            parameter.grad = memory
        if zeros:
            torch._foreach_zero_(zeros)


def _device_of(model, parameters):
    if not parameters:
        raise ValueError(f"{_NAME}: no parameter of the model requires a gradient")
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1 or next(iter(devices)).type != _DEVICE:
        found = " and ".join(sorted(map(str, devices)))
        raise ValueError(f"{_NAME}: the model is on {found}, expected one CUDA device")
    # Trainer wraps in DataParallel where one process sees several GPUs.
    wrappers = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}
    is_wrapped = any(type(module).__name__ in wrappers for module in model.modules())
    if is_wrapped or any(is_dtensor(p) or hasattr(p, "ds_id") for p in parameters):
        raise ValueError(f"{_NAME}: the model is sharded or wrapped for several devices, expected one device")
    if planners(model):
        raise ValueError(
            f"{_NAME}: liger.transformers.checkpoint plans the layers of the model by steps without a graph: "
            "recompute all layers, by transformers' activation checkpointing, or none"
        )
    return next(iter(devices))


def _make_capturable(optimizer, parameters):
    has = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := sum(id(p) not in has for p in parameters):
        raise ValueError(
            f"{_NAME}: the optimizer lacks {missing} of the {len(parameters)} trained parameters"
        )
    if not all("capturable" in group for group in optimizer.param_groups):
        raise ValueError(
            f"{_NAME}: {type(optimizer).__name__} has no setting capturable: take an optimizer that has, such "
            "as torch.optim.AdamW, or leave it out and call its step() after each step"
        )
    device = parameters[0].device
    for group in optimizer.param_groups:
        group["capturable"] = True
        # A number would stay what it was at the capture.
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(device)


def _check_dropout(model):
    """Layers that are recomputed draw the numbers of their dropout again, which a graph cannot repeat."""
    recomputed = [module for module in model.modules() if getattr(module, FLAG, False)]
    inside = (module for layer in recomputed for module in layer.modules() if module.training)
    if any(
        (
            getattr(m, "p", 0)
            if isinstance(m, nn.modules.dropout._DropoutNd)
            else getattr(m, "attention_dropout", 0)
        )
        for m in inside
    ):
        raise ValueError(
            f"{_NAME}: layers with dropout are recomputed, and in a graph the second forward would draw other "
            "numbers: set dropout to 0, or recompute no layers"
        )


@contextlib.contextmanager
def _without_cached_casts():
    """Autocast would keep casts of the weights from one step to the next, and a graph would read them."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
