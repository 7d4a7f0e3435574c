"""Performance goals on an H200, per row, and the evaluation of a run against them.

If a row has a ceiling, the goal is a ratio to it, measured in the same rounds, so the result does not depend on the
speed of the individual GPU.
"""

from dataclasses import dataclass

from .verdict import SAME_MEMORY_MIB, time_of

# Allowed factor over the error of a single float32 sum: kernels round at different places.
AS_EXACT = 1.05
EAGER = "torch eager"


@dataclass(frozen=True)
class Goal:
    """A bound for ``metric`` of the row ``row``: a minimum, or a maximum for times.

    Metrics: ``"of copy speed"`` and ``"TB/s"`` (minimum), ``"x <a ceiling>"`` and host ``"us"`` (maximum). ``mib``
    limits the peak memory without inputs; ``no_more_than`` limits it to that of another provider. ``exact`` limits the
    errors of the gradients to those of eager PyTorch, which accumulates in float32. One provider must meet all
    conditions.
    """

    row: str
    metric: str
    bound: float
    mib: float | None = None
    exact: bool = False
    no_more_than: str | None = None

    @property
    def asked(self):
        text = f"{'<=' if self.at_most else '>='} {self.bound:g} {self.metric}"
        text += "" if self.mib is None else f", <= {self.mib:g} MiB"
        text += "" if self.no_more_than is None else f", no more memory than {self.no_more_than}"
        return text + (", as exact as one float32 sum" if self.exact else "")

    @property
    def at_most(self):
        return self.metric == "us" or self.metric.startswith("x ")


COPY = "of copy speed"
GEMMS = "x three GEMMs"
ROPE = "q(4,32,4096,128) k(4,8,4096,128)"
HEAD = "fused_linear_ce 16384x4096x128256"
LOGPROBS = "heads logprobs Llama-3.2-1B 8192x2048x128256"
BATCH = "8x1024x4096x128256"
# The gradients of that lm_head, which every method returns, plus 128 MiB.
SMALL_MIB = (16384 + 128256) * 4096 * 2 / 2**20 + 128

GOALS = (
    Goal("rms_norm forward 16384x4096", COPY, 0.95),
    Goal("rms_norm forward 4096x4096", "TB/s", 3.3),
    Goal("rms_norm backward 16384x4096", COPY, 0.90),
    Goal("rms_norm backward 16384x8192", COPY, 0.90),
    Goal("rms_norm backward 16384x2048", COPY, 0.90),
    Goal("rms_norm backward 4096x4096", "TB/s", 2.5),
    Goal("rms_norm host time, forward with grad", "us", 25),
    Goal("rms_norm host time, forward and backward", "us", 120),
    Goal("rms_norm_gated forward 524288x128", COPY, 0.90),
    Goal("rms_norm_gated backward 524288x128", COPY, 0.85),
    Goal("rms_norm_gated forward 16384x4096", COPY, 0.95),
    Goal("rms_norm_gated backward 16384x4096", COPY, 0.90),
    Goal("rms_norm_gated forward 16384x4096 gate first, groups of 4096", COPY, 0.95),
    Goal("rms_norm_gated backward 16384x4096 gate first, groups of 4096", COPY, 0.90),
    Goal("swiglu forward 16384x14336", COPY, 1.00),
    Goal("swiglu backward 16384x14336", COPY, 1.00),
    Goal("swiglu_packed forward 16384x14336", COPY, 1.00),
    Goal("swiglu_packed backward 16384x14336", COPY, 1.00),
    Goal("geglu forward 16384x14336", COPY, 1.00),
    Goal("geglu backward 16384x14336", COPY, 1.00),
    Goal("geglu_packed forward 16384x14336", COPY, 1.00),
    Goal("geglu_packed backward 16384x14336", COPY, 1.00),
    Goal("layer_norm forward 16384x4096", COPY, 0.95),
    Goal("layer_norm backward 16384x4096", COPY, 0.90),
    Goal(f"rope forward {ROPE}", COPY, 0.95),
    Goal(f"rope backward {ROPE}", COPY, 0.95),
    Goal(f"qk_norm_rope forward {ROPE}", COPY, 0.90),
    Goal(f"qk_norm_rope backward {ROPE}", COPY, 0.90),
    Goal("cross_entropy forward and backward 8192x128256", COPY, 0.95),
    Goal("cross_entropy forward and backward 8192x32000", COPY, 0.95),
    Goal(HEAD, GEMMS, 1.03, 1640, exact=True),
    Goal("fused_linear_ce 4096x4096x128256", GEMMS, 1.05, 1550, exact=True),
    Goal("fused_linear_ce 16384x2048x128256", GEMMS, 1.08, 1070, exact=True),
    Goal("fused_linear_ce 32768x4096x32000", GEMMS, 1.03, 1020, exact=True),
    Goal(HEAD, GEMMS, 1.12, SMALL_MIB),
    Goal(f"{HEAD}, half ignored", GEMMS, 0.55),
    Goal(f"{HEAD}, prompts ignored", GEMMS, 0.55),
    Goal("heads Llama-3.2-1B 8192x2048x128256", GEMMS, 1.03, 1070),
    Goal("heads Qwen3-4B 8192x2560x151936", GEMMS, 1.03),
    Goal("heads Qwen3-8B 8192x4096x151936", GEMMS, 1.00),
    Goal("heads Qwen3.5-2B 16384x2048x248320", GEMMS, 1.03),
    Goal("heads gemma-3-270m 8192x640x262144", GEMMS, 1.10, 900),
    Goal("heads gemma-3-1b 8192x1152x262144", GEMMS, 1.08, 1150),
    Goal("heads Qwen2.5-0.5B 8192x896x151936", GEMMS, 1.08, 800),
    Goal("heads gpt-oss-20b 8192x2880x201088", GEMMS, 1.04, 1900),
    Goal("heads Phi-3 8192x3072x32064", GEMMS, 1.00, 500),
    Goal("heads Llama-3.2-1B, one class more 8192x2048x128257", GEMMS, 1.06, 1100),
    Goal("heads Llama-3.2-1B 8192x2048x128256, float16", GEMMS, 1.00, 1100),
    Goal("heads gemma-2-2b 8192x2304x256000, softcap 30", GEMMS, 1.06, 1900),
    Goal("heads Llama-3.2-1B 8192x2048x128256, bias", GEMMS, 1.05, 1100),
    Goal("heads Llama-3.2-1B 8192x2048x128256, label smoothing 0.1", GEMMS, 1.04, 1100),
    Goal("heads Llama-3-8B 512x4096x128256", GEMMS, 1.03),
    Goal("heads Llama-3.2-1B 131072x2048x128256", GEMMS, 1.03),
    # The kept exponentials, the gradients, and 64 MiB.
    Goal(f"{LOGPROBS}, budget 2004 MiB", GEMMS, 1.06, 2004 + 533 + 64),
    Goal(f"{LOGPROBS}, default budget", GEMMS, 1.38, 1100),
    Goal(f"{LOGPROBS}, budget 2004 MiB, temperature 0.7, entropy", GEMMS, 1.15),
    Goal(f"{LOGPROBS}, default budget, temperature 0.7, entropy", GEMMS, 1.48),
    # 1.15 times one read of both tensors of logits and one write.
    Goal("divergence forward and backward 8192x128256", COPY, 0.87),
    Goal(f"dpo {BATCH}", "x four GEMMs", 1.06, 1600),
    Goal(f"kto {BATCH}", "x four GEMMs", 1.06),
    Goal(f"fused_linear_jsd {BATCH}", "x four GEMMs", 1.15, 1600),
    Goal(f"jsd {BATCH}", "x four GEMMs", 1.15, 1600),
    Goal(f"orpo {BATCH}", GEMMS, 1.06),
    Goal(f"simpo {BATCH}", GEMMS, 1.06),
    Goal(f"grpo {BATCH}", GEMMS, 1.06, 1600),
    *(
        Goal(
            f"experts forward and backward {shape} 8192 tokens",
            "x dense GEMMs",
            bound,
            no_more_than="transformers eager",
        )
        for shape, bound in (("mixtral", 1.25), ("qwen3-moe", 2.0), ("gpt-oss", 1.6))
    ),
    Goal("tiled_mlp 131072x4096x12288", f"x {EAGER}", 1.20, 3200),
    *(
        Goal(f"tiled_mlp {tokens}x4096x12288", f"x {EAGER}", bound, no_more_than=EAGER)
        for tokens, bound in ((32768, 1.20), (8192, 1.20), (2048, 1.25))
    ),
)


def _value(goal, record, provider):
    """The metric of a provider, or None if the ceiling was not measured."""
    if goal.metric == "us":
        return time_of(provider)
    if goal.metric == "TB/s":
        return record["nbytes"] / time_of(provider) / 1e9
    ratio = provider["ratios"].get("device copy" if goal.metric == COPY else goal.metric[2:])
    if ratio is None or goal.metric != COPY:
        return ratio
    return 1 / ratio


def _conditions(goal, record, provider):
    """Further conditions of the goal, as [(met, description)]; met is None if a measurement is missing."""
    conditions = []
    if goal.mib is not None:
        peak = provider.get("peak_mib")
        met = None if peak is None else peak <= goal.mib + SAME_MEMORY_MIB
        conditions.append((met, "memory unknown" if peak is None else f"{peak:.0f} MiB"))
    if goal.no_more_than is not None:
        most, peak = (p.get("peak_mib") for p in (record["providers"].get(goal.no_more_than, {}), provider))
        met = None if None in (most, peak) else peak <= most + SAME_MEMORY_MIB
        conditions.append((met, "memory unknown" if met is None else f"{peak:.0f} of {most:.0f} MiB"))
    if goal.exact:
        mine, eager = (p.get("errors", {}) for p in (provider, record["providers"].get(EAGER, {})))
        names = [name for name in mine if name.startswith("d") and mine[name] and eager.get(name)]
        if names:
            worst = max(mine[name] / eager[name] for name in names)
            conditions.append((worst <= AS_EXACT, f"error {worst:.2f}x"))
        else:
            conditions.append((None, "error not compared"))
    return conditions


def _attempt(goal, record, name):
    """The result of one provider: a line of the report, and a rank by which the best is chosen."""
    provider = record["providers"][name]
    value = _value(goal, record, provider)
    if value is None:
        return None
    conditions = _conditions(goal, record, provider)
    reached = value <= goal.bound if goal.at_most else value >= goal.bound
    verdicts = [reached, *(met for met, _ in conditions)]
    met = False if False in verdicts else None if None in verdicts else True
    digits = 3 if goal.metric != "us" else 1
    words = ", ".join([f"{value:.{digits}f} {goal.metric}", *(text for _, text in conditions)])
    line = {"row": goal.row, "asked": goal.asked, "provider": name, "measured": words, "met": met}
    # A provider that violates another condition ranks below all others.
    rank = (met is not True, any(v is False for v in verdicts[1:]), value if goal.at_most else -value)
    return rank, line


def reached(records, goals=GOALS):
    """One line per goal whose row has results of liger: that of the provider of liger closest to the goal."""
    by_name = {record["name"]: record for record in records}
    lines = []
    for goal in goals:
        record = by_name.get(goal.row)
        if record is None:
            continue
        mine = [n for n, p in record["providers"].items() if p["group"] == "ours" and p["status"] == "ok"]
        attempts = [attempt for name in mine if (attempt := _attempt(goal, record, name)) is not None]
        if attempts:
            lines.append(min(attempts, key=lambda pair: pair[0])[1])
    return lines
