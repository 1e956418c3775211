"""Draws the plots of docs/performance.md and of its journal, from rows in build/bench or the tables of the page.

Panels stand below one another, so that a phone shows them in readable size; colours follow the reader's light or dark
scheme.
"""

import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

ROOT = Path(__file__).parent.parent
ROWS, IMAGES = ROOT / "build/bench", ROOT / "docs/img"
INK, OURS, OTHER, THIRD = "#334155", "#0f766e", "#b45309", "#6d28d9"
FOURTH, WEAK = "#be185d", "#64748b"
# Each colour in the dark scheme.
DARK = {INK: "#e2e8f0", OURS: "#2dd4bf", OTHER: "#fb923c", THIRD: "#a78bfa", FOURTH: "#f472b6"}
DARK |= {WEAK: "#94a3b8", "#ffffff": "#0f172a"}
WIDTH, PANEL = 6.7, 2.6  # inches
NAMES = {"deeplayer+primed": "the default"}
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "fusionkv", "font.family": "sans-serif"}
STYLE |= {"font.size": "13", "axes.titlesize": "13", "legend.fontsize": "12"}
STYLE |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)


def storage(rows: dict[str, Any]) -> None:
    """Entries stored over the number of queries, for both corpora."""
    growth = rows["growth"]
    sizes = sorted({row["workload"]["knowledge"] for row in growth})
    figure, panels = plt.subplots(len(sizes), 1, figsize=(WIDTH, PANEL * len(sizes)), layout="constrained")
    for panel, size in zip(panels, sizes, strict=True):
        rows = [row for row in growth if row["workload"]["knowledge"] == size]
        queries = [row["workload"]["queries"] for row in rows]
        for name, label, colour in [("prefix", "prefix cache", OTHER), ("service", "FusionKV", OURS)]:
            panel.loglog(queries, [row[name]["stored"] for row in rows], "o-", ms=3, color=colour, label=label)
        panel.set(title=f"knowledge base of {size:,} chunks", xlabel="queries", ylabel="entries stored")
        panel.legend(frameon=False)
    save(figure, IMAGES / "storage.svg")


def index(rows: list[dict[str, Any]]) -> None:
    """Lookup times and memory as the index grows."""
    chunks = [row["chunks"] for row in rows]
    figure, (times, memory) = plt.subplots(2, 1, figsize=(WIDTH, PANEL * 2.4), layout="constrained")
    for kind, colour in [("exact", OURS), ("alternative", OTHER), ("miss", THIRD)]:
        for at, style, name in [(0, "o-", "median"), (1, "o:", "99th percentile")]:
            values = [row["lookup_us"][kind][at] for row in rows]
            times.semilogx(chunks, values, style, ms=3, color=colour, label=f"{kind}, {name}")
    times.set(title="lookup of 20 chunks", xlabel="chunks in the index", ylabel="microseconds")
    times.set_ylim(0, 1.7 * times.get_ylim()[1])  # room for the legend
    times.legend(frameon=False, ncols=2, loc="upper left")
    memory.semilogx(chunks, [row["bytes_per_chunk"] for row in rows], "o-", ms=3, color=OURS)
    memory.set(title="memory", xlabel="chunks in the index", ylabel="bytes a chunk")
    memory.set_ylim(bottom=0)
    save(figure, IMAGES / "index.svg")


def throughput(rows: list[dict[str, Any]]) -> None:
    """Time to first token and generated tokens over the rate of questions, for every system."""
    figure, panels = plt.subplots(3, 1, figsize=(WIDTH, 3.3 * PANEL), layout="constrained")
    shown = [("ttft_p50_s", "seconds to the first token, median")]
    shown += [("ttft_p99_s", "seconds to the first token, 99th percentile (dotted: the limit)")]
    names = dict.fromkeys(row["name"] for row in rows)
    for panel, (what, title) in zip(panels, [*shown, ("tokens_per_s", "answer tokens a second")], strict=True):
        for name, colour in zip(names, (INK, OTHER, OURS, THIRD, FOURTH), strict=False):
            mine = [row for row in rows if row["name"] == name]
            rates = [row["requests_per_s"] for row in mine]
            label = NAMES.get(name, name.replace("_", " "))
            panel.loglog(rates, [row[what] for row in mine], "o-", ms=3, color=colour, label=label)
        panel.set_title(title)
        for axis in (panel.xaxis, panel.yaxis):
            # Few labels: a decade is narrow, and those of minor ticks would overlap.
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
    panels[2].set_xlabel("questions a second")
    panels[1].axhline(rows[0]["bound_s"], color=INK, lw=0.8, ls=":")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    save(figure, IMAGES / "throughput.svg")


def first_token(page: str) -> None:
    """Time to the first token over the length of the context, with AMX and without."""
    rows = table(page, "Time to the first token")
    names = [name for name in rows[0] if name.endswith(", s")]
    figure, panels = plt.subplots(2, 1, figsize=(WIDTH, 2.4 * PANEL), layout="constrained", sharex=True)
    labels = {}
    for panel, amx in zip(panels, ("no", "yes"), strict=True):
        mine = [row for row in rows if row["AMX"] == amx]
        contexts = [number(row["context"]) for row in mine]
        for name, colour in zip(names, (INK, OTHER, OURS), strict=True):
            seconds = [number(row[name]) for row in mine]
            (line,) = panel.plot(contexts, seconds, "o-", ms=4, color=colour)
            labels[name.removesuffix(", s")] = line
        panel.set(title=f"with{'out' * (amx == 'no')} AMX", ylabel="seconds")
        panel.set_ylim(bottom=0)
    panels[1].set_xlabel("tokens of context")
    figure.legend(labels.values(), labels, loc="outside lower center", ncols=4, frameon=False)
    save(figure, IMAGES / "first-token.svg")


def decoding(page: str) -> None:
    """Time of a step over reused chunks, relative to one over contiguous KV."""
    rows = table(page, "Decoding")
    labels = [f"{row['requests']} at once, {row['chunks']} chunks, {row['recomputed']} recomputed" for row in rows]
    figure, panel = plt.subplots(figsize=(WIDTH, PANEL), layout="constrained")
    bars = panel.barh(labels, [number(row["relative"]) for row in rows], color=OURS, height=0.6)
    panel.bar_label(bars, fmt="%.2f", padding=4, color=INK)
    panel.axvline(1, color=INK, lw=0.8, ls=":")
    panel.set(xlabel="time relative to contiguous KV")
    panel.set_xlim(right=1.2 * panel.get_xlim()[1])  # room for the numbers
    panel.invert_yaxis()
    save(figure, IMAGES / "decoding.svg")


def moving(page: str) -> None:
    """GB/s of single entries over their size, for every store."""
    rows = table(page, "Moving bytes")
    figure, panels = plt.subplots(2, 1, figsize=(WIDTH, 2.8 * PANEL), layout="constrained", sharex=True)
    ours = ((OURS, "o--"), (OURS, "o-"), (OURS, "o:"))
    styles = (*ours, (OTHER, "s-"), (OTHER, "s:"), (THIRD, "^-"), (THIRD, "^:"), (WEAK, "d-"))
    for panel, operation in zip(panels, ("put", "get"), strict=True):
        sizes = [name for name in rows[0] if name.startswith(operation)]
        for row, (colour, style) in zip(rows, styles, strict=True):
            speeds = [number(row[size]) for size in sizes]
            panel.loglog([number(size) for size in sizes], speeds, style, ms=4, color=colour, label=row[""])
        panel.set(title=f"GB/s, {operation}")
        panel.set_xticks([number(size) for size in sizes])
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
    panels[1].set_xlabel("MiB an entry")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    save(figure, IMAGES / "moving.svg")


def table(page: str, heading: str) -> list[dict[str, str]]:
    """The rows of the first table below a heading, by the titles of its columns."""
    below = page.partition(f"\n## {heading}\n")[2]
    lines = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)
    titles, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines())
    return [dict(zip(titles, row, strict=True)) for row in rows]


def number(cell: str) -> float:
    """The first number of a cell."""
    return float(re.search(r"[\d.]+", cell.replace(",", ""))[0])


def save(figure: Any, file: Path) -> None:
    """Writes a figure whose colours follow the reader's scheme."""
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
    rules = [
        f'[style*="{part}: {a}"]{{{part}:{b}!important}}' for a, b in DARK.items() for part in ("fill", "stroke")
    ]
    dark = f"@media(prefers-color-scheme:dark){{{''.join(rules)}}}"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("</style>", f"{dark}</style>", 1), encoding="utf-8")


def main() -> None:
    plt.rcParams.update(STYLE)
    # Each plot has its own benchmark; without results, the plot is not redrawn.
    for draw, name in ((storage, "storage.json"), (index, "scale.json"), (throughput, "throughput.json")):
        if (ROWS / name).exists():
            draw(json.loads((ROWS / name).read_text()))
        else:
            print(f"{ROWS / name} does not exist: {draw.__name__}.svg is not redrawn")
    for name, plots in (("performance.md", (first_token, moving)), ("journal/performance.md", (decoding,))):
        if (page := ROOT / "docs" / name).exists():
            for plot in plots:
                plot(page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
