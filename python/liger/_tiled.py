"""Any module that treats every token alone, run a shard of tokens at a time: its activations never exist for all.

The forward saves its inputs only; the backward runs one shard after the other again, under the random numbers and the
autocast of the forward, and takes its gradient. Parameters are inputs of the autograd function, so that each gets one
gradient and the hooks of DDP, FSDP and ZeRO run once.
"""

import contextlib
import functools
import itertools

import torch
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint

from ._core.arguments import ANYTHING, FLAG, FUNCTION, INTEGER
from ._core.arguments import arguments as rules_of
from ._core.autograd import differentiable_once, is_transformed
from ._core.dtypes import accumulate_dtype

# Shards of the default number have as many tokens as x has features, as in the source, but at least so many.
_LEAST_ROWS = 1024


def _modules_of(function):
    """The modules whose parameters a callable uses, as far as it can be told: itself, its object, its parts."""
    if isinstance(function, torch.nn.Module):
        return [function]
    if isinstance(function, functools.partial):
        values = (function.func, *function.args, *function.keywords.values())
        return [module for value in values for module in _modules_of(value)]
    return _modules_of(function.__self__) if hasattr(function, "__self__") else []


def _parameters_of(function, given):
    found = itertools.chain(*(module.parameters() for module in _modules_of(function)), given)
    return list({id(p): p for p in found if p.requires_grad}.values())


class _Settings:
    """Autocast as it is now, to be entered again."""

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
    def again(self):
        with contextlib.ExitStack() as stack:
            for autocast in self.autocasts:
                stack.enter_context(torch.autocast(**autocast))
            yield


class _RandomState:
    """The state of the generators of the CPU and of one device."""

    def __init__(self, device):
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self):
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


class _Cut:
    """How x and the tensors that go with its tokens are cut, and how shards are called."""

    def __init__(self, function, x, arguments, keywords, num_shards):
        self.function, self.keywords = function, keywords
        self.leading = x.shape[:-1]
        self.rows = self.leading.numel()
        # A shard has the number of dimensions of x: modules may unpack (batch, tokens, features).
        self.ones = (1,) * max(x.dim() - 2, 0)
        step = max(-(-self.rows // num_shards), 1)
        self.shards = [slice(i, min(i + step, self.rows)) for i in range(0, max(self.rows, 1), step)]
        # Where among the arguments the tensors are; the others go to every shard as they are.
        self.arguments = list(arguments)
        self.cut = [i for i, value in enumerate(arguments) if isinstance(value, torch.Tensor)]

    def flat(self, tensor):
        return tensor.reshape(self.rows, *tensor.shape[len(self.leading) :])

    def part(self, flat, shard):
        rows = flat[shard]
        return rows.reshape((*self.ones, *rows.shape) if self.leading else rows.shape[1:])

    def call(self, x, tensors, shared):
        """The output of a shard, seen as rows."""
        arguments = list(self.arguments)
        for i, tensor in zip(self.cut, tensors, strict=True):
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


def _run(cut, flats, shared, states):
    """The output of all shards, each written to its place."""
    result = None
    for shard in cut.shards:
        if states is not None:
            states.append(_RandomState(flats[0].device))
        x, *tensors = (cut.part(flat, shard) for flat in flats)
        output = cut.call(x, tensors, shared)
        if len(cut.shards) == 1:
            result = output
        else:
            if result is None:
                result = output.new_empty(cut.rows, output.shape[-1])
            result[shard] = output
        del output
    return result.view(*cut.leading, result.shape[-1])


def _refuse_unknown_leaves(output, known):
    """Raises where the graph of a shard reaches a leaf that would silently get no gradient."""
    # What is known and no leaf has a history outside the shard.
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


class _Sum:
    """The sum over shards of the gradient of a tensor that every shard uses, in float32."""

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


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cut, names, find_parameters, preserve_rng_state, *tensors):
        ctx.cut, ctx.names, ctx.settings = cut, names, _Settings(tensors[0].device.type)
        ctx.find_parameters, ctx.states = find_parameters, [] if preserve_rng_state else None
        count = 1 + len(cut.cut)
        # Not the parameters: hooks on saved tensors (checkpoint, save_on_cpu) would give back others than the module's.
        ctx.save_for_backward(*tensors[: count + len(names)])
        shared = dict(zip(names, tensors[count : count + len(names)], strict=True))
        result = _run(cut, [cut.flat(t) for t in tensors[:count]], shared, ctx.states)
        if not is_compiling() and any(autocast["enabled"] for autocast in ctx.settings.autocasts):
            # Its casts of parameters were made without grad mode. torch 2.10 would hand them to whoever uses the
            # parameters next, without a gradient.
            torch.clear_autocast_cache()
        places = {t.untyped_storage().data_ptr() for t in tensors}
        return result.clone() if result.untyped_storage().data_ptr() in places else result

    @staticmethod
    @differentiable_once("tiled", also=lambda ctx: ctx.find_parameters())
    def backward(ctx, grad_output):
        cut, tensors = ctx.cut, ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]
        count = 1 + len(cut.cut)
        per_token = tensors[:count]
        shared = [t.detach().requires_grad_(n) for t, n in zip(tensors[count:], needed[count:], strict=False)]
        parameters = ctx.find_parameters()
        expected = len(needed) - len(tensors)
        if len(parameters) != expected:
            raise RuntimeError(
                f"tiled: {len(parameters)} parameters require grad in the backward, {expected} did in the forward"
            )
        flats = [cut.flat(t.detach()) for t in per_token]
        grad_output = cut.flat(grad_output)
        # Of the upstream gradient, which may be one of a batch (is_grads_batched): then so are these.
        grads = [
            grad_output.new_empty(t.shape, dtype=t.dtype, device=t.device) if n else None
            for t, n in zip(flats, needed, strict=False)
        ]
        sums = [_Sum(t, len(cut.shards) == 1) for t in (*shared, *parameters)]
        device = per_token[0].device
        forked = torch.random.fork_rng(
            [device] if device.type == "cuda" else [], enabled=ctx.states is not None
        )
        with forked:
            for i, shard in enumerate(cut.shards):
                parts = [
                    cut.part(t, shard).detach().requires_grad_(n) for t, n in zip(flats, needed, strict=False)
                ]
                if ctx.states is not None:
                    ctx.states[i].restore()
                with torch.enable_grad(), ctx.settings.again():
                    output = cut.call(parts[0], parts[1:], dict(zip(ctx.names, shared, strict=True)))
                if i == 0:
                    _refuse_unknown_leaves(output, (*parts, *shared, *parameters))
                found = itertools.repeat(None)
                if output.requires_grad:
                    leaves = [t for t in (*parts, *shared, *parameters) if t.requires_grad]
                    found = iter(torch.autograd.grad(output, leaves, grad_output[shard], allow_unused=True))
                del output
                for grad in grads:
                    if grad is not None:
                        value = next(found)
                        grad[shard] = 0 if value is None else value.reshape(grad[shard].shape)
                for total, leaf in zip(sums, (*shared, *parameters), strict=True):
                    if leaf.requires_grad:
                        total.add(next(found))
        grads = [None if g is None else g.view(t.shape) for g, t in zip(grads, per_token, strict=True)]
        return None, None, None, None, *grads, *(total.result() for total in sums)


@rules_of(function=FUNCTION, num_shards=INTEGER, parameters=ANYTHING, preserve_rng_state=FLAG)
def tiled(function, x, *arguments, num_shards=None, parameters=(), preserve_rng_state=True, **keywords):
    """``function(x, *arguments, **keywords)`` of a function that treats every token alone, a shard of tokens at a time.

    For MLPs of any kind, experts, projections with dropout. :func:`liger.tiled_mlp` does the same for gated MLPs with
    less recomputation and no graph per shard.

    Args:
        function: a module, a bound method of one, a ``functools.partial`` of these, or any callable. It returns one
            tensor with the leading shape of its first argument. What mixes tokens (attention, batch statistics) gives
            wrong results that cannot always be told: the shape of the output is all that is checked.
        x: (..., H). A shard has as many dimensions: of (B, T, H) it is (1, tokens, H), cut without regard to B.
        arguments: tensors among them go with the tokens: (..., any), with the leading shape of x, cut as x is. Others
            go to every shard as they are.
        num_shards: of equal size, at most as many as there are tokens. None: shards of as many tokens as x has
            features, but at least 1024.
        parameters: further tensors that require grad and that the function uses. Parameters of modules are found;
            what a bare function or a lambda refers to must be named here, or the backward raises.
        preserve_rng_state: whether the backward sees the random numbers of the forward, on the CPU and the device of x.
        keywords: go to every shard whole. Tensors among them may require grad.

    Returns:
        A tensor of the leading shape of x. Gradients of parameters and of tensors among the keywords are summed over
        shards in float32 and rounded once. Works where x needs no gradient. Under ``torch.compile`` every shard is a
        checkpoint of torch, whose gradients the compiler sums. Under the transforms of ``torch.func`` shards keep their
        activations: nothing is saved.

    Raises:
        RuntimeError: num_shards out of range; in the backward, a tensor that requires grad and is not known.
        ValueError: a tensor among the arguments without the leading shape of x, an output with another one.
        TypeError: an argument of another type, an output that is not one tensor.

    Source: Arctic Long Sequence Training, arXiv 2506.13996.
    """
    if x.dim() == 0:
        raise RuntimeError("tiled: x has shape (), expected at least one dimension")
    rows = x.shape[:-1].numel()
    if num_shards is None:
        num_shards = max(-(-rows // max(x.shape[-1], _LEAST_ROWS)), 1)
    if not 1 <= num_shards <= max(rows, 1):
        raise RuntimeError(
            f"tiled: num_shards is {num_shards}, expected at least 1 and at most the number of tokens, {rows}"
        )
    for i, value in enumerate(arguments):
        if isinstance(value, torch.Tensor) and value.shape[: x.dim() - 1] != x.shape[:-1]:
            raise ValueError(
                f"tiled: argument {i + 2} has shape {tuple(value.shape)}, expected the leading shape of x, "
                f"{tuple(x.shape[:-1])}; pass a tensor that all tokens share by keyword"
            )
    shared = {name: value for name, value in keywords.items() if isinstance(value, torch.Tensor)}
    others = {name: value for name, value in keywords.items() if name not in shared}
    cut = _Cut(function, x, arguments, others, num_shards)
    tensors = [x, *(arguments[i] for i in cut.cut)]
    if torch.compiler.is_compiling():
        keep_less = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=preserve_rng_state)
        return _joined(cut, tensors, shared, keep_less)
    if is_transformed():
        return _joined(cut, tensors, shared)
    find_parameters = functools.partial(_parameters_of, function, tuple(parameters))
    preserve_rng_state = preserve_rng_state and torch.is_grad_enabled()
    given = (*tensors, *shared.values(), *find_parameters())
    return _Tiled.apply(cut, tuple(shared), find_parameters, preserve_rng_state, *given)


def _joined(cut, tensors, shared, run=lambda call, *parts: call(*parts)):
    """The shards as code that a compiler or a transform can follow, each called by ``run``."""
    flats = [cut.flat(t) for t in tensors]

    def call(x, *others):
        return cut.call(x, others, shared)

    outputs = [run(call, *(cut.part(flat, shard) for flat in flats)) for shard in cut.shards]
    result = torch.cat(outputs)
    return result.view(*cut.leading, result.shape[-1])
