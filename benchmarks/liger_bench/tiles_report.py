"""The report of ``liger bench --tiles``: lines during the run, a table in Markdown, a picture: shares over the loss."""

import math

# Rows of the table: measured steps whose losses are about evenly spaced.
TABLE_ROWS = 16
# The colour-blind safe palette of Okabe and Ito.
COLORS = ("#0072B2", "#E69F00", "#D55E00")
PANELS = (("shares", "of all tiles"), ("shares_without_target", "of tiles without a target of their rows"))


def threshold_name(threshold):
    """ "2^-12" for a power of two."""
    return f"2^{math.log2(threshold):g}"


def _percent(share):
    return "-" if share is None else f"{100 * share:.2f}"


def line(record):
    """One measured step."""
    shares = ("/".join(map(_percent, record[key])) for key, _ in PANELS)
    return f"step {record['step']:5d}  loss {record['loss']:.4f}  below: {' %, without a target '.join(shares)} %"


def chosen(records):
    """The records of the table: the first, the last, and in between those that first fall below evenly spaced
    losses."""
    losses = [record["loss"] for record in records]
    high, low = losses[0], min(losses)
    found = {0: None, len(records) - 1: None}
    for i in range(1, TABLE_ROWS - 1):
        level = high + (low - high) * i / (TABLE_ROWS - 1)
        found[next((k for k, loss in enumerate(losses) if loss <= level), len(records) - 1)] = None
    return [records[i] for i in sorted(found)]


def markdown(result):
    """The environment, what was trained, and a table."""
    size, records = result["size"], result["steps"]
    facts = (f"{name} {value}" for name, value in result["environment"].items() if value not in (None, False))
    names = [threshold_name(t) for t in result["thresholds"]]
    header = ["step", "loss", *names, "tiles without a target", *(f"{name}, without" for name in names)]
    rows = [header, ["---"] * len(header)]
    for record in chosen(records):
        free = record["tiles_without_target"] / record["tiles"]
        rows.append(
            [
                str(record["step"]),
                f"{record['loss']:.3f}",
                *map(_percent, record["shares"]),
                _percent(free),
                *map(_percent, record["shares_without_target"]),
            ]
        )
    text = (
        f"{size['layers']} layers, hidden size {size['hidden']}, {size['vocab']} classes (the tokenizer has "
        f"{result['tokenizer_entries']}), {size['batch']} x {size['sequence']} tokens per step, learning rate "
        f"{size['learning_rate']:g}; counted by the {result['counted_by']}. Shares are in percent: of all tiles, then "
        "of the tiles without a target of their rows."
    )
    return "\n\n".join(
        [
            "# Tiles of the gradient of the logits by probability mass",
            "; ".join(facts),
            text,
            "\n".join(f"| {' | '.join(row)} |" for row in rows),
        ]
    ) + "\n"  # fmt: skip


def picture(result):
    """The figure: share over loss, which falls from left to right, one panel per share."""
    from matplotlib.figure import Figure

    size, records = result["size"], result["steps"]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    figure.suptitle(
        "Tiles with hardly any probability mass", x=0.01, ha="left", fontsize=12, fontweight="bold"
    )
    losses = [record["loss"] for record in records]
    for axes, (key, title) in zip(figure.subplots(1, 2, sharex=True, sharey=True), PANELS, strict=True):
        for i, (threshold, color) in enumerate(zip(result["thresholds"], COLORS, strict=True)):
            shares = [math.nan if record[key][i] is None else 100 * record[key][i] for record in records]
            label = f"below {threshold_name(threshold)}"
            axes.plot(losses, shares, ".", markersize=4, color=color, label=label)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("loss of the step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    first = figure.axes[0]
    margin = max(0.02 * (max(losses) - min(losses)), 1e-3)
    first.set_xlim(max(losses) + margin, min(losses) - margin)
    first.set_ylim(bottom=0)
    first.set_ylabel("share, %")
    first.legend(frameon=False)
    source = (
        f"{result['environment']['device']}; hidden size {size['hidden']}, {size['vocab']} classes, {len(records)} of "
        f"{size['steps']} steps measured"
    )
    figure.supxlabel(source, fontsize=9, color="#555555")
    return figure
