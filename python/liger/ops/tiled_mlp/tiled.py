# SPDX-License-Identifier: BSD-3-Clause
"""Runs a token-wise module on one shard of tokens at a time, so that its activations exist for one shard
only.

The forward saves only its inputs. The backward reruns each shard with the random numbers and the autocast
state of the forward, and differentiates it. Parameters are inputs of the autograd function, so each gets one
gradient and the hooks of DDP, FSDP and ZeRO run once.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint

from ..._core.dtensor.inputs import is_dtensor
from ..._core.math.dtypes import accumulate_dtype
from ..._core.op.arguments import ANYTHING, FLAG, FUNCTION, INTEGER, TENSOR, check
from ..._core.op.arguments import arguments as rules_of
from ..._core.op.autograd import (
    differentiable_once,
    graph_of_its_own,
    is_transformed,
    recording_tracer,
    without_base,
)

# By default a shard has as many tokens as x has features, as in the source of the method, but at least so
# many.
_MIN_ROWS = 1024


def _modules_of(function):
    """The modules among a callable, the object of a bound method, and the function and arguments of a
    partial."""
    if isinstance(function, torch.nn.Module):
        return [function]
    if isinstance(function, functools.partial):
        values = (function.func, *function.args, *function.keywords.values())
        return [module for value in values for module in _modules_of(value)]
    return _modules_of(function.__self__) if hasattr(function, "__self__") else []


def _parameters_of(function, extra):
    """The distinct tensors that require grad among the parameters of the modules of ``function`` and
    ``extra``."""
    parameters = itertools.chain(*(module.parameters() for module in _modules_of(function)), extra)
    return list({id(p): p for p in parameters if p.requires_grad}.values())


class _AutocastState:
    """The autocast settings at construction; :meth:`restored` enters them again."""

    def __init__(self, device_type):
        self.autocasts = [
            {
                "device_type": kind,
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in {device_type, "cpu"}
            if torch.amp.is_autocast_available(kind)
        ]

    @contextlib.contextmanager
    def restored(self):
        with contextlib.ExitStack() as stack:
            for autocast in self.autocasts:
                stack.enter_context(torch.autocast(**autocast))
            yield


class _RandomState:
    """The state of the random number generators of the CPU and of one device."""

    def __init__(self, device):
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self):
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


class _Sharding:
    """The split of x and of the other per-token tensors into shards, and the call of the function on one
    shard."""

    def __init__(self, function, x, arguments, keywords, num_shards):
        self.function, self.keywords = function, keywords
        self.leading = x.shape[:-1]
        self.rows = self.leading.numel()
        # A shard has the number of dimensions of x: modules may unpack (batch, tokens, features).
        self.ones = (1,) * max(x.dim() - 2, 0)
        step = max(-(-self.rows // num_shards), 1)
        self.shards = [slice(i, min(i + step, self.rows)) for i in range(0, max(self.rows, 1), step)]
        # Positions of the tensors that are sharded; every shard gets the other arguments whole. The tensors
        # themselves are not kept here: autograd saves and frees them.
        self.arguments = [None if isinstance(value, torch.Tensor) else value for value in arguments]
        self.sharded = [i for i, value in enumerate(arguments) if isinstance(value, torch.Tensor)]

    def flat(self, tensor):
        return tensor.reshape(self.rows, *tensor.shape[len(self.leading) :])

    def shard_of(self, flat, shard):
        rows = flat[shard]
        return rows.reshape((*self.ones, *rows.shape) if self.leading else rows.shape[1:])

    def call(self, x, tensors, shared):
        """The output of a shard, as rows."""
        arguments = list(self.arguments)
        for i, tensor in zip(self.sharded, tensors, strict=True):
            arguments[i] = tensor
        output = self.function(x, *arguments, **self.keywords, **shared)
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"tiled: the module returned {type(output).__name__}, expected one tensor")
        if output.dim() != x.dim() or output.shape[:-1] != x.shape[:-1]:
            raise ValueError(
                f"tiled: a shard of shape {tuple(x.shape)} gave an output of shape {tuple(output.shape)}, expected "
                f"{(*x.shape[:-1], '*')}: the module does not treat every token alone"
            )
        return output.reshape(-1, output.shape[-1])


def _run_shards(sharding, flats, shared, states):
    """The output of all shards in one tensor. Appends the random state before each shard to ``states``,
    unless None."""
    result = None
    for shard in sharding.shards:
        if states is not None:
            states.append(_RandomState(flats[0].device))
        x, *tensors = (sharding.shard_of(flat, shard) for flat in flats)
        output = sharding.call(x, tensors, shared)
        if len(sharding.shards) == 1:
            result = output.view(*sharding.leading, output.shape[-1])
        else:
            if result is None:
                result = output.new_empty(*sharding.leading, output.shape[-1])
                rows = result.view(sharding.rows, output.shape[-1])
            rows[shard] = output
        del output
    return result


def _refuse_unknown_leaves(output, known):
    """Raises RuntimeError if the graph of a shard has a leaf that would silently get no gradient."""
    # Known tensors that are no leaves have a history outside the shard: the search stops there.
    seen, stack = {t.grad_fn for t in known}, [output.grad_fn]
    known = {id(t) for t in known}
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = node.variable if node.name() == "torch::autograd::AccumulateGrad" else None
        if leaf is not None and id(leaf) not in known:
            raise RuntimeError(
                f"tiled: the function uses a tensor of shape {tuple(leaf.shape)} that requires grad and is neither an "
                "argument nor a parameter of its module; name it in parameters=[...]"
            )
        stack.extend(next_node for next_node, _ in node.next_functions)


class _GradientSum:
    """The float32 sum over shards of the gradient of a tensor that all shards use."""

    def __init__(self, like, single):
        self.dtype, self.single, self.total = like.dtype, single, None

    def add(self, grad):
        if grad is None:
            return
        if self.total is None:
            self.total = grad if self.single else grad.to(accumulate_dtype(self.dtype), copy=True)
        else:
            self.total.add_(grad)

    def result(self):
        total, self.total = self.total, None
        return None if total is None else total.to(self.dtype)


def _memory_of(tensor):
    """The address of the storage, for a DTensor of its local tensor's storage (its own has no address)."""
    return (tensor.to_local() if is_dtensor(tensor) else tensor).untyped_storage().data_ptr()


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sharding, names, find_parameters, preserve_rng_state, *tensors):
        ctx.sharding, ctx.names, ctx.autocast = sharding, names, _AutocastState(tensors[0].device.type)
        ctx.find_parameters, ctx.states = find_parameters, [] if preserve_rng_state else None
        count = 1 + len(sharding.sharded)
        # Parameters are not saved: hooks on saved tensors (checkpoint, save_on_cpu) would return copies.
        ctx.save_for_backward(*tensors[: count + len(names)])
        shared = dict(zip(names, tensors[count : count + len(names)], strict=True))
        result = _run_shards(sharding, [sharding.flat(t) for t in tensors[:count]], shared, ctx.states)
        if not is_compiling() and any(autocast["enabled"] for autocast in ctx.autocast.autocasts):
            # The cached casts of parameters were made without grad mode. In torch 2.10 the next user of the
            # parameters would get these casts, and no gradient.
            torch.clear_autocast_cache()
        memory = {_memory_of(t) for t in tensors}
        if _memory_of(result) in memory:
            return result.clone()
        return without_base(result) if result._is_view() and not is_dtensor(result) else result

    @staticmethod
    @differentiable_once("tiled", dependencies=lambda ctx: ctx.find_parameters())
    def backward(ctx, grad_output):
        sharding, tensors = ctx.sharding, ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]
        count = 1 + len(sharding.sharded)
        per_token = tensors[:count]
        shared = [t.detach().requires_grad_(n) for t, n in zip(tensors[count:], needed[count:], strict=False)]
        parameters = ctx.find_parameters()
        expected = len(needed) - len(tensors)
        if len(parameters) != expected:
            raise RuntimeError(
                f"tiled: {len(parameters)} parameters require grad in the backward, {expected} did in the forward"
            )
        flats = [sharding.flat(t.detach()) for t in per_token]
        grad_output = sharding.flat(grad_output)
        # new_empty of the upstream gradient: if that is batched (is_grads_batched), these must also be.
        grads = [
            grad_output.new_empty(t.shape, dtype=t.dtype, device=t.device) if n else None
            for t, n in zip(flats, needed, strict=False)
        ]
        sums = [_GradientSum(t, len(sharding.shards) == 1) for t in (*shared, *parameters)]
        device = per_token[0].device
        forked = torch.random.fork_rng(
            [device] if device.type == "cuda" else [], enabled=ctx.states is not None
        )
        with forked:
            for i, shard in enumerate(sharding.shards):
                inputs = [
                    sharding.shard_of(t, shard).detach().requires_grad_(n)
                    for t, n in zip(flats, needed, strict=False)
                ]
                if ctx.states is not None:
                    ctx.states[i].restore()
                with torch.enable_grad(), graph_of_its_own(), ctx.autocast.restored():
                    output = sharding.call(inputs[0], inputs[1:], dict(zip(ctx.names, shared, strict=True)))
                if i == 0:
                    _refuse_unknown_leaves(output, (*inputs, *shared, *parameters))
                shard_grads = itertools.repeat(None)
                if output.requires_grad:
                    leaves = [t for t in (*inputs, *shared, *parameters) if t.requires_grad]
                    shard_grads = iter(
                        torch.autograd.grad(output, leaves, grad_output[shard], allow_unused=True)
                    )
                del output
                for grad in grads:
                    if grad is not None:
                        value = next(shard_grads)
                        grad[shard] = 0 if value is None else value.reshape(grad[shard].shape)
                for total, leaf in zip(sums, (*shared, *parameters), strict=True):
                    if leaf.requires_grad:
                        total.add(next(shard_grads))
        grads = [None if g is None else g.view(t.shape) for g, t in zip(grads, per_token, strict=True)]
        return None, None, None, None, *grads, *(total.result() for total in sums)


@rules_of(function=FUNCTION, num_shards=INTEGER, parameters=ANYTHING, preserve_rng_state=FLAG)
def tiled(
    function: Callable[..., torch.Tensor],
    x: torch.Tensor,
    *arguments: Any,
    num_shards: int | None = None,
    parameters: Iterable[torch.Tensor] = (),
    preserve_rng_state: bool = True,
    **keywords: Any,
) -> torch.Tensor:
    """``function(x, *arguments, **keywords)`` for a token-wise function, computed one shard of tokens at a
    time.

    For MLPs of any kind, experts, projections with dropout. :func:`liger.tiled_mlp` does the same for gated
    MLPs with less recomputation and no graph per shard.

    Args:
        function: a module, a bound method of one, a ``functools.partial`` of these, or any callable. It
            returns one tensor with the leading shape of its first argument. A function that mixes tokens
            (attention, batch statistics) gives wrong results without an error: only the shape of the output
            is checked.
        x: (..., H), any dtype. A shard has as many dimensions: a shard of (B, T, H) is (1, tokens, H) and may
            span several batches.
        arguments: tensors among them have one entry per token, (..., any) with the leading shape of x, and
            are sharded as x is. Every shard gets the other arguments whole.
        num_shards: number of shards of equal size, at most the number of tokens. None: as many tokens per
            shard as x has features, but at least 1024.
        parameters: further tensors that the function uses and that require grad. Parameters of modules are
            found; tensors to which a plain function or a lambda refers must be listed here, or the backward
            raises.
        preserve_rng_state: whether the backward reruns shards with the random numbers of the forward, on the
            CPU and on the device of x.
        keywords: every shard gets them whole. Tensors among them may require grad.

    Returns:
        A tensor with the leading shape of x. Gradients of parameters and of tensors among the keywords are
        summed over shards in float32 and rounded once. x itself need not require grad. Under
        ``torch.compile`` every shard is a ``torch.utils.checkpoint``, and the compiler sums the gradients.
        Under the transforms of ``torch.func`` and in the programs of ``torch.export`` and other tracers
        shards keep their activations, so no memory is saved.

    Raises:
        RuntimeError: a sparse, nested or quantised tensor; in the backward, a tensor that requires grad and
            is not listed.
        ValueError: num_shards out of range; a tensor among the arguments, or an output, without the leading
            shape of x.
        TypeError: an argument of another type, or an output that is not one tensor.

    Example::

        >>> mlp = torch.nn.Sequential(torch.nn.Linear(64, 192), torch.nn.GELU(), torch.nn.Linear(192, 64))
        >>> y = liger.tiled(mlp, torch.randn(2, 1000, 64), num_shards=4)

    Source: Arctic Long Sequence Training, arXiv 2506.13996.
    """
    if x.dim() == 0:
        raise RuntimeError("tiled: x has shape (), expected at least one dimension")
    rows = x.shape[:-1].numel()
    if num_shards is None:
        num_shards = max(-(-rows // max(x.shape[-1], _MIN_ROWS)), 1)
    if not 1 <= num_shards <= max(rows, 1):
        raise ValueError(
            f"tiled: num_shards is {num_shards}, expected at least 1 and at most the number of tokens, {rows}"
        )
    for i, value in enumerate(arguments):
        if not isinstance(value, torch.Tensor):
            continue
        check("tiled", f"argument {i + 2}", value, TENSOR)
        if value.shape[: x.dim() - 1] != x.shape[:-1]:
            raise ValueError(
                f"tiled: argument {i + 2} has shape {tuple(value.shape)}, expected the leading shape of x, "
                f"{tuple(x.shape[:-1])}; pass a tensor that all tokens share by keyword"
            )
    shared = {name: value for name, value in keywords.items() if isinstance(value, torch.Tensor)}
    others = {name: value for name, value in keywords.items() if name not in shared}
    sharding = _Sharding(function, x, arguments, others, num_shards)
    tensors = [x, *(arguments[i] for i in sharding.sharded)]
    if recording_tracer() is not None:
        return _traceable(sharding, tensors, shared)
    if torch.compiler.is_compiling():
        checkpointed = functools.partial(
            checkpoint, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )
        return _traceable(sharding, tensors, shared, checkpointed)
    if is_transformed():
        return _traceable(sharding, tensors, shared)
    find_parameters = functools.partial(_parameters_of, function, tuple(parameters))
    preserve_rng_state = preserve_rng_state and torch.is_grad_enabled()
    inputs = (*tensors, *shared.values(), *find_parameters())
    return _Tiled.apply(sharding, tuple(shared), find_parameters, preserve_rng_state, *inputs)


def _traceable(sharding, tensors, shared, run=lambda call, *shards: call(*shards)):
    """The output of all shards without an autograd function, for compilers and transforms.
    ``run(call, *tensors)`` calls one shard."""
    flats = [sharding.flat(t) for t in tensors]

    def call(x, *others):
        return sharding.call(x, others, shared)

    outputs = [run(call, *(sharding.shard_of(flat, shard) for flat in flats)) for shard in sharding.shards]
    result = torch.cat(outputs)
    return result.view(*sharding.leading, result.shape[-1])
