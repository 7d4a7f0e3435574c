"""The LM head with its cross entropy, forward and backward, against the three GEMMs that it cannot do without."""

import torch
import torch.nn.functional as F
from harness import (
    Candidate,
    Contest,
    Provider,
    Row,
    Work,
    compiled,
    liger_kernel,
    normal,
    ours,
    providers,
    targets,
    training_work,
)

import liger

LOW = " low-precision sum"
SMALL = f"{LOW}, small"
REFERENCE_ROWS = 2048


def _eager(t):
    return F.cross_entropy((t["input"] @ t["weight"].T).float(), t["target"])


def _ours(t, **how):
    return liger.fused_linear_ce(t["input"], t["weight"], t["target"], **how)


def _liger_kernel(t, accum_dtype):
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    # input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
    # return_z_loss, accum_dtype
    return LigerFusedLinearCrossEntropyFunction.apply(
        t["input"], t["weight"], t["target"], None, None, -100, 0.0, 0.0, "mean", None, False, accum_dtype
    )[0]


def _cut_cross_entropy(t):
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(t["input"], t["weight"], t["target"])


def liger_kernel_logits_bytes(tokens, hidden, vocabulary, element_size=2):
    """The chunk of logits that liger-kernel 0.8.5 holds by default: about as many elements as its input."""
    chunks = -(-vocabulary // hidden)
    rows = -(-tokens // chunks)
    return min(1 << (rows - 1).bit_length(), tokens) * vocabulary * element_size


def _candidates(options, tokens, hidden, vocabulary):
    low = {"accum_dtype": options.dtype}
    small = {**low, "memory_budget": liger_kernel_logits_bytes(tokens, hidden, vocabulary)}
    return [
        *ours(options, _ours),
        *ours(options, lambda t: _ours(t, **low), LOW),
        *ours(options, lambda t: _ours(t, **small), SMALL),
        liger_kernel(lambda t: _liger_kernel(t, None)),
        liger_kernel(lambda t: _liger_kernel(t, torch.float32), " fp32 sum"),
        Candidate("torch eager", _eager),
        *compiled(options, _eager),
        Candidate("cut-cross-entropy", _cut_cross_entropy, needs=("cut_cross_entropy",)),
    ]


def _three_gemms(inputs):
    """Logits and both gradients through cuBLAS, into memory that is there already."""
    x, weight = inputs["input"], inputs["weight"]
    logits = x.new_empty(x.shape[0], weight.shape[0])
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)

    def run():
        torch.mm(x, weight.T, out=logits)
        torch.mm(logits, weight, out=grad_x)
        torch.mm(logits.T, x, out=grad_weight)
        return {}

    return Work(run)


def _reference(inputs):
    """float32 throughout, a part of the rows at a time."""
    x, weight, target = inputs["input"].float(), inputs["weight"].float(), inputs["target"]
    count = (target != -100).sum()
    loss, grad_x, grad_weight = 0.0, torch.empty_like(x), torch.zeros_like(weight)
    for part in torch.arange(x.shape[0], device=x.device).split(REFERENCE_ROWS):
        logits, kept = x[part] @ weight.T, target[part] != -100
        loss = loss + F.cross_entropy(logits, target[part], reduction="sum") / count
        grad = logits.softmax(-1)
        grad[torch.arange(len(part), device=x.device), target[part].clamp_min(0)] -= 1
        grad *= (kept / count)[:, None]
        grad_x[part] = grad @ weight
        grad_weight.addmm_(grad.T, x[part])
    return {"loss": loss, "dinput": grad_x, "dweight": grad_weight}


def rows(options):
    sizes = options.pick(
        [(16384, 4096, 128256), (4096, 4096, 128256), (16384, 2048, 128256), (32768, 4096, 32000)],
        [(16384, 4096, 128256)],
        [(14, 16, 50)],
    )
    variants = options.pick((False, True), (False,), (False, True))
    for tokens, hidden, vocabulary, ignored in ((*size, ignored) for ignored in variants for size in sizes):

        def inputs(tokens=tokens, hidden=hidden, vocabulary=vocabulary, ignored=ignored):
            # Logits of standard deviation 2.5, as those of a trained model.
            std = 0.02
            return {
                "input": normal(options, tokens, hidden, std=2.5 / (std * hidden**0.5)),
                "weight": normal(options, vocabulary, hidden, std=std),
                "target": targets(options, tokens, vocabulary, ignored),
            }

        candidates = _candidates(options, tokens, hidden, vocabulary)
        if ignored:
            candidates = [c for c in candidates if c.group != "other"]
        exact = tuple(c.name for c in candidates if c.group == "ours" and LOW not in c.name)
        yield Row(
            "fused_linear_ce",
            f"fused_linear_ce {tokens}x{hidden}x{vocabulary}" + (", 1/7 ignored" if ignored else ""),
            inputs,
            [
                *providers(candidates, training_work, (), ("input", "weight")),
                Provider("three GEMMs", _three_gemms, "ceiling"),
            ],
            _reference,
            rounds=5,
            burst=1,
            contests=(
                Contest(label="it sums dW in bfloat16"),
                Contest("liger-kernel fp32 sum", "fp32 sums", exact),
            ),
        )
