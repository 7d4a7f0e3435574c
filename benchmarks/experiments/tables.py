# SPDX-License-Identifier: BSD-3-Clause
"""Tables of results in Markdown."""

from liger_bench.models.trainee import SAME_LOSS

from .results import GIB, ordered

# A smaller relative difference is not counted as being behind.
NOTICED = 0.01
WORDS = {"missing": "not installed", "timeout": "too slow"}


def markdown(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def gib(number):
    return "-" if number is None else f"{number / GIB:.2f} GiB"


def shape(cell):
    """What the table shows of a cell that has no numbers, or None."""
    if cell is None:
        return ""
    if cell["status"] == "oom":
        return "OOM" + (" (not tried)" if cell.get("inferred") else "")
    if cell["status"] == "failed":
        return f"failed: {cell['reason'].splitlines()[0][:100]}".replace("|", "/")
    return WORDS.get(cell["status"])


def by_method(result, text, methods=None, label="size"):
    """One row per size and one column per method; ``text(cell, reference)`` formats a measured cell.

    ``reference`` is the measured cell of the first method at this size, or None.
    """
    methods = methods or ordered(result, "method")
    found = {(cell["method"], cell["size"]): cell for cell in result["cells"].values()}
    rows = []
    for size in ordered(result, "size"):
        first = found.get((methods[0], size))
        first = first if first is not None and first["status"] == "ok" else None
        cells = [found.get((method, size)) for method in methods]
        if any(cells):
            rows.append([size, *(text(c, first) if shape(c) is None else shape(c) for c in cells)])
    return markdown([label, *methods], rows)


def differs(cell, reference):
    """True if the first loss differs from the unpatched model's by more than rounding explains."""
    if reference is None or reference is cell or "first_loss" not in cell:
        return False
    return not abs(cell["first_loss"] / reference["first_loss"] - 1) <= SAME_LOSS


def compared(result):
    """(size, cells of liger, other cells) of each size that liger has: measured cells whose loss is right."""
    first = next(iter(ordered(result, "method")), None)
    for size in ordered(result, "size"):
        cells = [c for c in result["cells"].values() if c["size"] == size and c["status"] == "ok"]
        reference = next((c for c in cells if c["method"] == first), None)
        right = [c for c in cells if not differs(c, reference)]
        ours = [c for c in right if is_ours(c["method"])]
        if ours:
            yield size, ours, [c for c in right if not is_ours(c["method"])]


def speed_and_memory(cell, reference):
    wrong = f" (WRONG LOSS {cell['first_loss']:.5g})" if differs(cell, reference) else ""
    return f"{cell['tokens_per_second'] / 1e3:.1f} k, {gib(cell['peak_bytes'])}{wrong}"


def behind(result):
    """One line: every size where another method has more tokens per second, or less memory, than the best of
    liger.

    Differences below 1 % are not counted.
    """
    texts = []
    for size, ours, others in compared(result):
        most = max(c["tokens_per_second"] for c in ours)
        least = min(c["peak_bytes"] or 0 for c in ours)
        for other in others:
            speed = other["tokens_per_second"] / most - 1
            if speed > NOTICED:
                texts.append(f"{size}: {other['method']} has {speed:.0%} more tokens/s")
            if least and other["peak_bytes"] and other["peak_bytes"] < least * (1 - NOTICED):
                texts.append(
                    f"{size}: {other['method']} needs {1 - other['peak_bytes'] / least:.0%} less memory"
                )
    return f"Where liger is behind: {'; '.join(texts) if texts else 'nowhere in this table'}."


def _range(values):
    low, high = min(values), max(values)
    return f"{low:.2f}" if high - low < 0.005 else f"{low:.2f} to {high:.2f}"


def gains(result):
    """One line: tokens per second and peak memory of the fastest of liger, relative to each other method,
    over the sizes that both have."""
    found = {}
    for _, ours, others in compared(result):
        best = max(ours, key=lambda c: c["tokens_per_second"])
        for other in others:
            peaks = (best["peak_bytes"], other["peak_bytes"])
            memory = peaks[0] / peaks[1] if all(peaks) else None
            speed = best["tokens_per_second"] / other["tokens_per_second"]
            found.setdefault(other["method"], []).append((speed, memory))
    texts = []
    for method, pairs in found.items():
        memory = [ratio for _, ratio in pairs if ratio is not None]
        text = f"{method}: {_range([speed for speed, _ in pairs])} times the tokens/s"
        texts.append(text + (f" in {_range(memory)} of the memory" if memory else ""))
    return f"liger, the fastest form at each size, vs. {'; vs. '.join(texts)}." if texts else ""


def is_ours(method):
    return method.startswith("liger") and not method.startswith("liger-kernel")


def training(result):
    """Tokens per second and peak memory of every method at every size, and the largest sizes that fit."""
    lines = [by_method(result, speed_and_memory, label="batch x tokens")]
    lines += [gains(result)] if gains(result) else []
    largest = {}
    for method in ordered(result, "method"):
        cells = [c for c in result["cells"].values() if c["method"] == method]
        fits = max((c for c in cells if c["status"] == "ok"), key=lambda c: c["order"], default=None)
        failed = min((c for c in cells if c["status"] == "oom"), key=lambda c: c["order"], default=None)
        if fits is not None:
            bound = f", out of memory at {failed['size']}" if failed else ", the largest that was tried"
            largest[method] = f"{method}: {fits['size']}{bound}"
    lines.append("Largest that fits: " + "; ".join(largest.values()) + ".")
    lines.append(behind(result))
    return "\n\n".join(lines)


def environments(result):
    """One line: the machines, versions and commits of the results."""
    shown = ("device", "torch", "transformers", "liger_kernel", "trl")
    commits = {}
    for facts in result["environments"]:
        line = ", ".join(f"{name} {facts[name]}" for name in shown if facts.get(name))
        commits.setdefault(line, []).append((facts.get("commit") or "")[:9])
    found = []
    for line, of_line in commits.items():
        names = list(dict.fromkeys(filter(None, of_line)))
        word = "commit" if len(names) == 1 else "commits"
        found.append(f"{line}, {word} {', '.join(names)}" if names else line)
    return "; ".join(found)
