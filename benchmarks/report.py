"""What comes out of a run: the environment, the tables, the verdict and the plots."""

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from pathlib import Path

import torch

# Two allocators' roundings and a few per-row statistics; below this, memory is the same.
SAME_MEMORY_MIB = 1.0
ROOT = Path(__file__).resolve().parent.parent


def _output(*command):
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(module, distribution):
    """The version of an importable module; one that merely lies on the path has no metadata."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def environment(options):
    gpu = options.device == "cuda"
    # A copy without its history is told which commit it is.
    commit = os.environ.get("LIGER_COMMIT") or _output("git", "rev-parse", "HEAD")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "modified": bool(_output("git", "status", "--porcelain", "--untracked-files=no")) if commit else None,
        "device": torch.cuda.get_device_name() if gpu else platform.machine(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if gpu
        else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton", "triton"),
        "liger_kernel": _version("liger_kernel", "liger-kernel"),
        "quack": _version("quack", "quack-kernels"),
        "cut_cross_entropy": _version("cut_cross_entropy", "cut-cross-entropy"),
        "size": options.size,
        "backends": list(options.backends),
        "dtype": str(options.dtype).removeprefix("torch."),
    }


# --- verdict ------------------------------------------------------------------------------------------------------


def _time(provider):
    """The figure that decides: device time in ms, or host time in us."""
    return (provider.get("ms") or provider.get("host_us") or {}).get("median")


def _no_more_memory(mine, theirs):
    if mine is None or theirs is None:
        return None
    return mine <= theirs + SAME_MEMORY_MIB


def judge(record, contest):
    """One line of the verdict, or None where the row has no result of ours or of the baseline.

    Ours is the fastest of those that are right and take no more memory; if none is both faster and as small, the
    fastest of all.
    """
    baseline = record["providers"].get(contest["baseline"])
    if baseline is None or baseline["status"] != "ok":
        return None
    named = contest["ours"]
    mine = {
        name: provider
        for name, provider in record["providers"].items()
        if provider["group"] == "ours" and provider["status"] == "ok" and (not named or name in named)
    }
    if not mine:
        return None
    theirs, limit = _time(baseline), baseline.get("peak_mib")

    def rank(name):
        wins = _time(mine[name]) < theirs and _no_more_memory(mine[name].get("peak_mib"), limit) is not False
        return not wins, _time(mine[name])

    best = min(mine, key=rank)
    fits = _no_more_memory(mine[best].get("peak_mib"), limit)
    latencies = [p.get("latency_ms", {}).get("median") for p in (mine[best], baseline)]
    return {
        "row": record["name"],
        "label": contest["label"],
        "ours": best,
        "baseline": contest["baseline"],
        "unit": "us" if record["kind"] == "host" else "ms",
        "ours_time": _time(mine[best]),
        "baseline_time": theirs,
        "speedup": theirs / _time(mine[best]),
        "latency_speedup": latencies[1] / latencies[0] if None not in latencies else None,
        "ours_mib": mine[best].get("peak_mib"),
        "baseline_mib": limit,
        "faster": _time(mine[best]) < theirs,
        "no_more_memory": fits,
        "wins": _time(mine[best]) < theirs and fits is not False,
    }


def verdict(records):
    """The lines of all contests that have results on both sides."""
    lines = [judge(record, contest) for record in records for contest in record["contests"]]
    return [line for line in lines if line is not None]


def faults(records):
    """What is wrong with our own providers, in words."""
    return [
        f"{record['name']}: {name} {provider['status']}: {provider['reason']}"
        for record in records
        for name, provider in record["providers"].items()
        if provider["group"] == "ours" and provider["status"] != "ok"
    ]


# --- Markdown -----------------------------------------------------------------------------------------------------


def _number(value, digits=3):
    return "-" if value is None else f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:.0f}"


def _table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _device_cells(record, provider, ceiling):
    time = provider["ms"]
    speed = f"{record['nbytes'] / time['median'] / 1e9:.2f}" if record["nbytes"] else "-"
    ratio = f"{time['median'] / ceiling:.3f}" if ceiling else "-"
    errors = {
        name: "not finite" if value is None else f"{value:.1e}"
        for name, value in provider.get("errors", {}).items()
    }
    spread = f"{_number(time['q25'], 4)} - {_number(time['q75'], 4)}"
    latency = provider.get("latency_ms", {}).get("median")
    peak = provider.get("peak_mib")
    return [
        _number(time["median"], 4), spread, speed, ratio, "-" if peak is None else f"{peak:.0f}",
        _number(latency, 4), ", ".join(f"{name} {value}" for name, value in errors.items()) or "-",
    ]  # fmt: skip


def _row_table(record):
    host = record["kind"] == "host"
    ceiling = record["providers"].get(record["ceiling"], {}).get("ms", {}).get("median")
    of = f"x {record['ceiling']}" if record["ceiling"] else "x ceiling"
    header = ["provider", "host us", "quartiles"] if host else [
        "provider", "ms", "quartiles", "TB/s", of, "peak MiB", "latency ms", "relative error",
    ]  # fmt: skip
    rows = []
    for name, provider in record["providers"].items():
        if provider["status"] == "missing":
            continue
        if provider["status"] == "failed":
            reason = provider["reason"].splitlines()[0][:160].replace("|", "\\|")
            rows.append([name, f"failed: {reason}", *[""] * (len(header) - 2)])
            continue
        label = name if provider["status"] == "ok" else f"{name} (WRONG RESULT)"
        if host:
            time = provider["host_us"]
            rows.append([label, _number(time["median"]), f"{_number(time['q25'])} - {_number(time['q75'])}"])
        else:
            rows.append([label, *_device_cells(record, provider, ceiling)])
    return f"### {record['name']}\n\n{_table(header, rows)}"


def _verdict_table(lines):
    words = {True: "yes", False: "no", None: "-"}
    rows = []
    for line in lines:
        latency = line["latency_speedup"]
        rows.append([
            line["row"], f"{line['baseline']}" + (f" ({line['label']})" if line["label"] else ""), line["ours"],
            f"{_number(line['ours_time'], 4)} {line['unit']}", f"{_number(line['baseline_time'], 4)} {line['unit']}",
            f"{line['speedup']:.2f}x", "-" if latency is None else f"{latency:.2f}x",
            "-" if line["ours_mib"] is None else f"{line['ours_mib']:.0f} / {line['baseline_mib']:.0f}",
            words[line["faster"]], words[line["no_more_memory"]], f"**{words[line['wins']]}**",
        ])  # fmt: skip
    header = [
        "row", "against", "ours best", "ours", "theirs", "speed", "speed with host", "MiB ours / theirs", "faster",
        "no more memory", "faster and no more memory",
    ]  # fmt: skip
    return _table(header, rows)


def markdown(result):
    facts = [f"{key} {value}" for key, value in result["environment"].items() if value not in (None, False)]
    lines = result["verdict"]
    parts = ["# Benchmark results", "; ".join(facts)]
    if lines:
        won = sum(line["wins"] for line in lines)
        parts += [f"## Verdict: {won} of {len(lines)} lines won", _verdict_table(lines)]
    for op in dict.fromkeys(record["op"] for record in result["rows"]):
        parts += [f"## {op}", *(_row_table(record) for record in result["rows"] if record["op"] == op)]
    return "\n\n".join(parts) + "\n"


# --- plots --------------------------------------------------------------------------------------------------------


def _colors(records):
    import matplotlib

    names = dict.fromkeys(name for record in records for name in record["providers"])
    palette = matplotlib.colormaps["tab20"].colors
    return {name: palette[index % len(palette)] for index, name in enumerate(names)}


def _bars(axis, record, values, colors, unit):
    names = [name for name, value in values.items() if value is not None]
    numbers = [values[name] for name in names]
    bars = axis.barh(range(len(names)), numbers, color=[colors[name] for name in names])
    axis.bar_label(bars, [_number(number, 4) for number in numbers], padding=2, fontsize=7)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.set_title(record["name"], fontsize=8)
    axis.set_xlabel(unit, fontsize=7)
    axis.tick_params(axis="x", labelsize=7)


def plot(result, stem):
    """One PNG per op beside ``stem``: for each row, time on the left and peak memory on the right. Returns paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for op in dict.fromkeys(record["op"] for record in result["rows"] if record["contests"]):
        records = [record for record in result["rows"] if record["op"] == op]
        colors = _colors(records)
        heights = [1 + 0.22 * len(record["providers"]) for record in records]
        figure, axes = pyplot.subplots(
            len(records),
            2,
            figsize=(12, sum(heights)),
            height_ratios=heights,
            squeeze=False,
            layout="constrained",
        )
        for record, (left, right) in zip(records, axes, strict=True):
            measured = {name: p for name, p in record["providers"].items() if p["status"] in ("ok", "wrong")}
            unit = "host time, us" if record["kind"] == "host" else "device time, ms"
            _bars(left, record, {name: _time(p) for name, p in measured.items()}, colors, unit)
            peaks = {name: p.get("peak_mib") for name, p in measured.items() if p["group"] != "ceiling"}
            if any(value is not None for value in peaks.values()):
                _bars(right, record, peaks, colors, "peak memory beyond the inputs, MiB")
            else:
                right.set_axis_off()
        path = stem.with_name(f"{stem.name}-{op}.png")
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        paths.append(path)
    return paths
