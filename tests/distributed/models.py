# SPDX-License-Identifier: BSD-3-Clause
"""A small Llama-like model made of liger's modules, its batches, and one step of it without any sharding."""

import copy
from types import SimpleNamespace

import ranks
import torch
from cases import error
from torch import nn

import liger

# Tensor parallelism spreads them over the ranks.
HEADS = max(4, ranks.WORLD)
CONFIG = SimpleNamespace(
    vocab_size=96,
    hidden_size=8 * HEADS,
    intermediate_size=48,
    num_attention_heads=HEADS,
    hidden_act="silu",
    layers=2,
)

# Every MLP that has to work in every framework, made from a configuration.
MLPS = {
    "swiglu": lambda config: liger.nn.SwiGLUMLP.from_config(config, inplace=True),
    "tiled": lambda config: liger.nn.TiledSwiGLUMLP.from_config(config, num_shards=2),
}


class Attention(nn.Module):
    """Causal attention with rotary embedding, over as many heads as its projections give."""

    def __init__(self, config):
        super().__init__()
        size = config.hidden_size
        self.head_dim = size // config.num_attention_heads
        self.q_proj, self.k_proj = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        self.v_proj, self.o_proj = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        frequencies = 100.0 ** -(torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device), frequencies).repeat(1, 2)
        q, k = liger.rope(q, k, angles.cos().to(q.dtype), angles.sin().to(q.dtype), unsqueeze_dim=2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, config, make_mlp):
        super().__init__()
        self.input_norm = liger.nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.attention = Attention(config)
        self.post_norm = liger.nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.mlp = make_mlp(config)

    def forward(self, x):
        x = x + self.attention(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Model(nn.Module):
    """Embedding, blocks, norm, and a head that returns the summed loss over a given denominator."""

    def __init__(self, config, make_mlp, tied, ce_weight=None):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, make_mlp) for _ in range(config.layers))
        self.norm = liger.nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.head = liger.nn.LMHeadLoss(config.hidden_size, config.vocab_size, ce_weight=ce_weight)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids, target, denominator):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x), target, denominator=denominator)


def make(mlp="swiglu", tied=False, device="cpu", dtype=torch.float32, ce_weight=None):
    """The same weights for the same arguments; the weights of the norms are not trivial."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = Model(CONFIG, MLPS[mlp], tied, ce_weight)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                nn.init.uniform_(parameter, 0.5, 1.5)
    return model.to(device, dtype)


def batch(length, seed, device="cpu", rows=2):
    """(ids, target): some targets are ignored, and how many differs from batch to batch."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(CONFIG.vocab_size, (rows, length + 1), generator=generator)
    target = ids[:, 1:].clone()
    target[0, : 1 + seed % 5] = -100
    return ids[:, :-1].to(device), target.to(device)


def batches_of_ranks(lengths, device="cpu"):
    """``[[micro-batches of rank 0], [of rank 1], ...]`` from ``[[their lengths], [...]]``, which are repeated
    for more ranks."""
    return [
        [batch(length, 10 * rank + i, device) for i, length in enumerate(lengths[rank % len(lengths)])]
        for rank in range(ranks.WORLD)
    ]


def count(batches, ce_weight=None):
    """How many targets of batches are not ignored, or the sum of their class weights."""
    targets = torch.cat([target.flatten() for _, target in batches])
    targets = targets[targets != -100]
    return len(targets) if ce_weight is None else ce_weight[targets].sum()


def step(model, batches):
    """(loss, {parameter: gradient}) of all batches together, in one process."""
    denominator = count(batches)
    loss = 0.0
    for ids, target in batches:
        part = model(ids, target, denominator)
        part.backward()
        loss += part.detach()
    return loss, {name: p.grad for name, p in model.named_parameters()}


class Reference:
    """The unsharded step, in the precision under test and in float64."""

    def __init__(self, model, batches_of_ranks, dtype=torch.float32):
        batches = [b for of_rank in batches_of_ranks for b in of_rank]
        self.loss, self.grads = step(copy.deepcopy(model).to(dtype), batches)
        with liger.use_backend("torch"):
            self.exact_loss, self.exact_grads = step(copy.deepcopy(model).double(), batches)
        worst = [error(self.loss, self.exact_loss)]
        worst += [error(grad, self.exact_grads[name]) for name, grad in self.grads.items()]
        # Sharding adds a rounding to each rank's share, and changes the order of sums.
        self.limit = 2 * max(worst) + 2 * torch.finfo(dtype).eps

    def check(self, loss, grads):
        """Loss and gradients are as near to float64 as the unsharded step is, wherever that errs most."""
        assert grads.keys() == self.exact_grads.keys()
        self._check("loss", loss, self.exact_loss)
        self.check_gradients(grads)

    def check_gradients(self, grads):
        """The same of some gradients alone."""
        for name, grad in grads.items():
            self._check(name, grad, self.exact_grads[name])

    def _check(self, name, actual, exact):
        assert actual is not None, f"{name}: no gradient"
        assert actual.shape == exact.shape, f"{name}: {tuple(actual.shape)}, not {tuple(exact.shape)}"
        off = error(actual, exact)
        assert off <= self.limit, f"{name}: error {off:.3g}, limit {self.limit:.3g}"
