"""Rotary embedding of queries and keys that are transposed views, as Hugging Face models make them."""

import torch
from harness import (
    Candidate,
    Contest,
    Row,
    backward_work,
    compiled,
    float32_reference,
    forward_work,
    liger_kernel,
    normal,
    ours,
    providers,
)

import liger

COPIES = " on copies"


def _rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _eager(t):
    cos, sin = t["cos"].unsqueeze(1), t["sin"].unsqueeze(1)
    return t["q"] * cos + _rotate_half(t["q"]) * sin, t["k"] * cos + _rotate_half(t["k"]) * sin


def _inplace(t):
    return liger.rope(t["q"], t["k"], t["cos"], t["sin"], inplace=True)


def _liger_kernel(t):
    from liger_kernel.ops import LigerRopeFunction

    return LigerRopeFunction.apply(t["q"], t["k"], t["cos"], t["sin"])


def _liger_kernel_on_copies(t):
    return _liger_kernel({**t, "q": t["q"].clone(), "k": t["k"].clone()})


def _candidates(options):
    gradients = ("grad_q", "grad_k")
    return [
        *ours(options, lambda t: liger.rope(t["q"], t["k"], t["cos"], t["sin"])),
        *ours(options, _inplace, " inplace", overwrites=("q", "k")),
        liger_kernel(_liger_kernel, overwrites=("q", "k", *gradients)),
        # Its backward overwrites the gradients all the same.
        liger_kernel(_liger_kernel_on_copies, COPIES, gradients),
        Candidate("torch eager", _eager),
        *compiled(options, _eager),
    ]


def _inputs(options, batch, q_heads, k_heads, tokens, dim):
    def make():
        heads = {"q": q_heads, "k": k_heads, "grad_q": q_heads, "grad_k": k_heads}
        tensors = {name: normal(options, batch, tokens, n, dim).transpose(1, 2) for name, n in heads.items()}
        inverse = 500000.0 ** (-torch.arange(0, dim, 2, device=options.device) / dim)
        angles = torch.arange(tokens, device=options.device)[:, None] * inverse
        angles = torch.cat((angles, angles), -1)[None]
        return {**tensors, "cos": angles.cos().to(options.dtype), "sin": angles.sin().to(options.dtype)}

    return make


def rows(options):
    batch, q_heads, k_heads, tokens, dim = options.pick(
        (4, 32, 8, 4096, 128), (4, 32, 8, 4096, 128), (2, 4, 2, 5, 8)
    )
    forward, backward = (
        (forward_work, ("q_out", "k_out"), ("q", "k")),
        (backward_work, ("grad_q", "grad_k"), ("q", "k")),
    )
    candidates = _candidates(options)
    size = f"q({batch},{q_heads},{tokens},{dim}) k({batch},{k_heads},{tokens},{dim})"
    for direction, work in (("forward", forward), ("backward", backward)):
        contests = [Contest(label="it overwrites its inputs")]
        if direction == "forward":
            contests.append(Contest(f"liger-kernel{COPIES}", "inputs kept"))
        yield Row(
            "rope",
            f"rope {direction} {size}",
            _inputs(options, batch, q_heads, k_heads, tokens, dim),
            providers(
                candidates if direction == "forward" else [c for c in candidates if COPIES not in c.name],
                *work,
            ),
            float32_reference(_eager, *work),
            nbytes=2 * 2 * batch * (q_heads + k_heads) * tokens * dim,
            contests=tuple(contests),
        )
