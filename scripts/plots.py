"""Draws the plots of docs/performance.md from the rows in build/bench: `make plots`."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parent.parent
ROWS, IMAGES = ROOT / "build/bench", ROOT / "docs/img"
INK, OURS, OTHER, THIRD = "#334155", "#0f766e", "#b45309", "#6d28d9"


def storage(growth: list[dict[str, Any]]) -> None:
    """Entries stored as queries go on, for both corpora."""
    sizes = sorted({row["workload"]["knowledge"] for row in growth})
    figure, panels = plt.subplots(1, len(sizes), figsize=(9, 3.4), layout="constrained")
    for panel, size in zip(panels, sizes, strict=True):
        rows = [row for row in growth if row["workload"]["knowledge"] == size]
        queries = [row["workload"]["queries"] for row in rows]
        for name, label, colour in [("prefix", "prefix cache", OTHER), ("service", "FusionKV", OURS)]:
            panel.loglog(queries, [row[name]["stored"] for row in rows], "o-", ms=3, color=colour, label=label)
        panel.set(title=f"knowledge base of {size:,} chunks", xlabel="queries", ylabel="entries stored")
        panel.legend(frameon=False)
    save(figure, "storage.svg")


def index(rows: list[dict[str, Any]]) -> None:
    """Lookup times and memory as the index grows."""
    chunks = [row["chunks"] for row in rows]
    figure, (times, memory) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for kind, colour in [("exact", OURS), ("alternative", OTHER), ("miss", THIRD)]:
        for at, style, name in [(0, "o-", "median"), (1, "o:", "99th percentile")]:
            values = [row["lookup_us"][kind][at] for row in rows]
            times.semilogx(chunks, values, style, ms=3, color=colour, label=f"{kind}, {name}")
    times.set(title="lookup of 20 chunks", xlabel="chunks in the index", ylabel="microseconds")
    times.set_ylim(0, 1.6 * times.get_ylim()[1])  # room for the legend
    times.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    memory.semilogx(chunks, [row["bytes_per_chunk"] for row in rows], "o-", ms=3, color=OURS)
    memory.set(title="memory", xlabel="chunks in the index", ylabel="bytes a chunk")
    memory.set_ylim(bottom=0)
    save(figure, "index.svg")


def save(figure: Any, name: str) -> None:
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(IMAGES / name, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    plt.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "fusionkv", "text.color": INK, "axes.edgecolor": INK}
        | {"axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "font.family": "sans-serif"}
    )
    storage(json.loads((ROWS / "storage.json").read_text())["growth"])
    index(json.loads((ROWS / "scale.json").read_text()))


if __name__ == "__main__":
    main()
