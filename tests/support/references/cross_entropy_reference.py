# SPDX-License-Identifier: BSD-3-Clause
"""Cross entropy as plain torch would write it, for any dtype, with every option; docs/guides/cross_entropy.md
in code."""

import torch
from cases import check_op
from torch.nn.functional import linear

import liger

# Every option alone, and all together. Tensors are made by `options` for a given size.
OPTIONS = {
    "plain": (),
    "class weights": ("ce_weight",),
    "token weights": ("token_weight",),
    "ignore_index": ("ignore_index",),
    "smoothing": ("label_smoothing",),
    "full smoothing": ("full_smoothing",),
    "z-loss": ("lse_square_scale",),
    "softcap": ("softcap",),
    "denominator": ("denominator",),
    "smoothing and class weights": ("ce_weight", "label_smoothing"),
    "z-loss and class weights": ("ce_weight", "lse_square_scale"),
    "all": ("ce_weight", "token_weight", "ignore_index", "label_smoothing", "lse_square_scale", "softcap"),
    "all and denominator": (
        "ce_weight", "token_weight", "ignore_index", "label_smoothing", "lse_square_scale", "softcap", "denominator",
    ),
}  # fmt: skip


def options(name, rows, vocab, device, reduction="mean"):
    """Keyword arguments of the public functions for one entry of OPTIONS; all inputs are random."""
    made = {
        "ce_weight": lambda: torch.rand(vocab, device=device) + 0.1,
        "token_weight": lambda: torch.rand(rows, device=device) + 0.1,
        "ignore_index": lambda: 2,
        "label_smoothing": lambda: 0.1,
        "full_smoothing": lambda: 1.0,
        "lse_square_scale": lambda: 1e-2,
        "softcap": lambda: 8.0,
        "denominator": lambda: torch.tensor(3.5, device=device),
    }
    chosen = {key: made[key]() for key in OPTIONS[name]}
    if "full_smoothing" in chosen:
        chosen["label_smoothing"] = chosen.pop("full_smoothing")
    if reduction == "none":
        chosen.pop("denominator", None)
    return {**chosen, "reduction": reduction}


def random_target(rows, vocab, device, ignore_index=-100):
    """Random classes with about a quarter of the rows ignored, but never the first."""
    target = torch.randint(0, vocab, (rows,), device=device)
    ignored = torch.rand(rows, device=device) < 0.25
    ignored[:1] = False
    target[ignored] = ignore_index
    if ignore_index >= 0:
        target[:1] = (ignore_index + 1) % vocab
    return target


def random_logits(rows, vocab, device, dtype=torch.float32, ignore_index=-100):
    logits = (3 * torch.randn(rows, vocab, device=device)).to(dtype)
    return logits, random_target(rows, vocab, device, ignore_index)


def random_layer(rows, hidden, vocab, device, dtype=torch.float32, ignore_index=-100):
    """(input, weight, bias, target) whose logits have a standard deviation of about 2."""
    made = (
        2 * torch.randn(rows, hidden, device=device),
        torch.randn(vocab, hidden, device=device) / hidden**0.5,
        torch.randn(vocab, device=device) / 4,
    )
    return *(t.to(dtype) for t in made), random_target(rows, vocab, device, ignore_index)


def rows_per_chunk(rows, weight):
    """A memory budget for chunks of so many rows (float32 sums of the weight gradient may allow more)."""
    return rows * weight.shape[0] * weight.element_size()


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def reference(
    logits, target, ce_weight=None, token_weight=None, denominator=None, ignore_index=-100, label_smoothing=0.0,
    lse_square_scale=0.0, softcap=None, reduction="mean",
):  # fmt: skip
    """A dict of the loss and all metrics for logits (N, V), in float32 or in float64 if the logits are
    that."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    vocab = logits.shape[1]
    raw = logits
    z = logits.to(dtype)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    live = target != ignore_index
    index = torch.where(live, target, 0).long()
    w = torch.ones(vocab, dtype=dtype, device=z.device) if ce_weight is None else ce_weight.to(dtype)
    t = 1.0 if token_weight is None else token_weight.to(dtype)

    lse = torch.logsumexp(z, -1)
    logp = z - lse.unsqueeze(1)
    chosen = logp.gather(1, index.unsqueeze(1)).squeeze(1)
    loss = -(1 - label_smoothing) * w[index] * chosen
    if label_smoothing:
        loss = loss - label_smoothing / vocab * (w * logp).sum(-1)
    z_loss = t * lse_square_scale * w[index] * lse.square()
    loss = torch.where(live, t * loss + z_loss, 0.0)
    z_loss = torch.where(live, z_loss, 0.0)
    if reduction != "none":
        loss, z_loss = loss.sum(), z_loss.sum()
        if denominator is not None:
            loss, z_loss = loss / denominator.to(dtype), z_loss / denominator.to(dtype)
        elif reduction == "mean":
            total = torch.where(live, w[index], 0.0).sum()
            loss, z_loss = loss / total, z_loss / total

    classes = torch.arange(vocab, device=z.device)
    largest = raw == raw.max(-1, keepdim=True).values
    predicted = torch.where(largest, classes, vocab).min(-1).values
    return {
        "loss": loss,
        "z_loss": z_loss,
        "token_accuracy": (live & (predicted == target)).sum().to(dtype) / live.sum(),
        "argmax": torch.where(live, predicted, -1),
        "logprobs": torch.where(live, chosen, 0.0),
        "entropy": torch.where(live, -(logp.exp() * logp).sum(-1), 0.0),
    }


# exp(z - lse) turns the float32 rounding of lse, here at most about this large, into a relative error.
LARGEST_LSE = 16.0

METRICS = ("z_loss", "token_accuracy", "argmax", "logprobs", "entropy")
ALL_METRICS = {"metrics": METRICS}


def shared_denominator(target, ce_weight, ignore_index=-100):
    """What a mean over this whole batch divides by, as a device tensor."""
    live = target != ignore_index
    return torch.where(live, ce_weight[torch.where(live, target, 0)], 0.0).sum()


def logit_rounding(dtype):
    """What a loss may differ by, in float32 roundings, because its logits were rounded to a half type after
    being summed in another order than plain torch's: a quarter of that rounding."""
    return torch.finfo(dtype).eps / 4 / torch.finfo(torch.float32).eps if dtype.itemsize == 2 else 0.0


def check_layer(tensors, target, accum_dtype=None, memory_budget=None, **chosen):
    """The loss of fused_linear_ce and its gradients for ``tensors``, (input, weight) or (input, weight,
    bias)."""
    check_op(
        lambda x, w, b=None: liger.fused_linear_ce(
            x, w, target, b, accum_dtype=accum_dtype, memory_budget=memory_budget, **chosen
        ),
        lambda x, w, b=None: reference(linear(x, w, b), target, **chosen)["loss"],
        tensors,
        # The logits, whose products may be summed in another order, and their lse.
        max(2 * LARGEST_LSE, logit_rounding(tensors[0].dtype)),
    )
