# SPDX-License-Identifier: BSD-3-Clause
"""The report of ``liger demo``: comparison of the runs, as text and as a figure."""

import statistics

import torch

from ._format import human_bytes, table

NOISE = "Tokens/s on a CPU that has other work to do are noise; losses and memory do not depend on it."
# Steps excluded from tokens/s: caches fill, kernels compile, the optimizer allocates its state.
WARMUP_STEPS = 3


def device_name(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads != 1 else ''}"


def headline(size, device):
    return (
        f"A Llama of {size.layers} layers, hidden {size.hidden}, vocabulary {size.vocab}, {size.dtype}, "
        f"on {device_name(device)}: {size.steps} steps of {size.batch} x {size.sequence} tokens"
    )


def allowed_difference(plain, nudged):
    """The largest difference between losses that agree: four times the effect of one rounding of every weight
    (the "nudged" run), plus sixteen float32 roundings of the loss."""
    rounding = max(abs(a - b) for a, b in zip(plain, nudged, strict=True))
    return 4 * rounding + 16 * torch.finfo(torch.float32).eps * max(plain)


def compare(runs, size):
    """Agreement of the losses in every step (:func:`allowed_difference`), ratios of speed and memory."""
    plain, liger, nudged = (runs[kind]["losses"] for kind in ("unpatched", "liger", "nudged"))
    differences = [abs(a - b) for a, b in zip(plain, liger, strict=True)]
    rounding = max(abs(a - b) for a, b in zip(plain, nudged, strict=True))
    allowed = allowed_difference(plain, nudged)
    speed = {kind: _tokens_per_second(run, size) for kind, run in runs.items()}
    return {
        "largest_difference": max(differences),
        "difference_by_rounding": rounding,
        "allowed_difference": allowed,
        # Compares each step: max() may ignore a NaN, but every comparison with NaN is false.
        "agree": all(difference <= allowed for difference in differences),
        "tokens_per_second": speed,
        "speedup": speed["liger"] / speed["unpatched"],
        "memory_ratio": runs["unpatched"]["peak_memory"] / runs["liger"]["peak_memory"],
    }


def _excluded(run):
    return min(WARMUP_STEPS, len(run["seconds"]) - 1)


def _tokens_per_second(run, size):
    return size.tokens / statistics.median(run["seconds"][_excluded(run) :])


def text(results):
    """The losses of every step, the verdict on them, and a table of speed and memory."""
    runs, comparison = results["runs"], results["comparison"]
    plain, liger = runs["unpatched"]["losses"], runs["liger"]["losses"]
    losses = table(
        [
            (str(step + 1), f"{a:.6f}", f"{b:.6f}", f"{b - a:+.1e}")
            for step, (a, b) in enumerate(zip(plain, liger, strict=True))
        ],
        header=("step", "unpatched", "with liger", "difference"),
    )
    verdict = (
        f"The losses {'agree' if comparison['agree'] else 'DISAGREE'}: largest difference "
        f"{comparison['largest_difference']:.1e}, allowed {comparison['allowed_difference']:.1e} "
        f"(moving every weight by one {results['size']['dtype']} rounding makes "
        f"{comparison['difference_by_rounding']:.1e})"
    )
    speed = comparison["tokens_per_second"]
    summary = table(
        [
            (
                f"tokens/s (median after {_excluded(runs['liger'])} steps)",
                f"{speed['unpatched']:,.0f}",
                f"{speed['liger']:,.0f}",
                f"{comparison['speedup']:.2f} x",
            ),
            (
                memory_label(results),
                human_bytes(runs["unpatched"]["peak_memory"]),
                human_bytes(runs["liger"]["peak_memory"]),
                _less(comparison["memory_ratio"]),
            ),
        ],
        header=("", "unpatched", "with liger", ""),
    )
    on_cpu = results["device"].startswith("CPU")
    note = f"\n{NOISE}\n" if on_cpu else ""
    return f"\n{losses}\n\n{verdict}\n\n{summary}\n{note}"


def memory_label(results):
    if not results["device"].startswith("CPU"):
        return "peak memory, model included"
    if all(run["memory_exact"] for run in results["runs"].values()):
        return "peak memory of training, above the model"
    return "peak memory of training, at most"


def _less(ratio):
    return f"{ratio:.2f} x less" if ratio >= 1 else f"{1 / ratio:.2f} x more"


def picture(results, path):
    """Writes a PNG with loss curves, memory and speed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs, comparison, size = results["runs"], results["comparison"], results["size"]
    grey, green, ink = "#9aa0a6", "#12805c", "#202124"
    style = {
        "font.size": 11,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": "#dadce0",
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": ink,
        "ytick.color": ink,
    }
    with pyplot.rc_context(style):
        drawn, (left, middle, right) = pyplot.subplots(
            1, 3, figsize=(12, 4.4), width_ratios=[2.4, 1, 1], layout="constrained"
        )
        steps = range(1, len(runs["liger"]["losses"]) + 1)
        left.plot(steps, runs["unpatched"]["losses"], color=grey, linewidth=5, label="unpatched")
        left.plot(steps, runs["liger"]["losses"], color=green, linewidth=1.6, label="with liger")
        left.set(title="Same losses", xlabel="step", ylabel="loss")
        left.grid(axis="y", color="#f1f3f4")
        left.legend(frameon=False)
        left.text(
            0.02,
            0.04,
            f"largest difference {comparison['largest_difference']:.1e}\n"
            f"allowed {comparison['allowed_difference']:.1e}",
            transform=left.transAxes,
            color="#5f6368",
        )
        memory = [runs[kind]["peak_memory"] for kind in ("unpatched", "liger")]
        speed = [comparison["tokens_per_second"][kind] for kind in ("unpatched", "liger")]
        _bars(middle, memory, [human_bytes(v) for v in memory], (grey, green))
        middle.set_title(f"Peak memory: {_less(comparison['memory_ratio'])}")
        middle.set_xlabel(memory_label(results), fontsize=8, color="#5f6368")
        _bars(right, speed, [f"{v:,.0f}" for v in speed], (grey, green))
        right.set_title(f"Tokens/s: {comparison['speedup']:.2f} x")
        drawn.suptitle(
            f"Llama, {runs['liger']['parameters'] / 1e6:,.0f} M parameters, vocabulary {size['vocab']}, "
            f"{size['batch']} x {size['sequence']} tokens per step, {size['dtype']}, {results['device']}",
            fontsize=10,
            color="#5f6368",
        )
        drawn.savefig(path, dpi=160)
        pyplot.close(drawn)


def _bars(axes, values, labels, colors):
    bars = axes.bar(["unpatched", "with liger"], values, color=colors, width=0.62)
    axes.bar_label(bars, labels, padding=3)
    axes.set_ylim(0, max(values) * 1.12)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
