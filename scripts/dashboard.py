"""Draws panels of the Grafana dashboard with matplotlib, from the results of their queries in Prometheus."""

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from matplotlib.ticker import FuncFormatter
from plots import FOURTH, INK, OTHER, OURS, PANEL, STYLE, THIRD, WEAK, WIDTH, plt, save

ROOT = Path(__file__).parent.parent
DASHBOARD = ROOT / "k8s/fusionkv/files/dashboard.json"
SHOWN = (
    "Time to first token by recipe",
    "Stages before the first token",
    "Chunks by kind and tier",
    "Context tokens",
    "Time per token",
    "Quality: same answer as full attention",
)
COLOURS = (OURS, OTHER, THIRD, FOURTH, INK, WEAK)
# A panel's title, its unit, and its series: points by name.
Panel = tuple[str, str, dict[str, list[tuple[float, float]]]]


async def draw(prometheus: str, start: float, end: float, out: Path) -> None:
    """Draws the panels.

    Args:
        prometheus: URL.
        start, end: seconds since the epoch.
        out: the SVG file to write.

    Raises:
        ValueError: a panel's queries return no data.
    """
    panels = {panel["title"]: panel for panel in json.loads(DASHBOARD.read_text())["panels"]}
    found: list[Panel] = []
    async with aiohttp.ClientSession() as session:
        for title in SHOWN:
            panel = panels[title]
            found.append((title, panel["fieldConfig"]["defaults"].get("unit", "short"), {}))
            for target in panel["targets"]:
                # Grafana would choose the interval of rates.
                query = target["expr"].replace("$__rate_interval", "20s").replace("[1h]", "[10m]")
                asked = {"query": query, "start": f"{start}", "end": f"{end}", "step": "2"}
                async with session.get(f"{prometheus}/api/v1/query_range", params=asked) as response:
                    series = (await response.json())["data"]["result"]
                for one in series:
                    points = [(at - start, float(value)) for at, value in one["values"] if value != "NaN"]
                    if points:
                        found[-1][2][_legend(target["legendFormat"], one)] = points
            if not found[-1][2]:
                raise ValueError(f"no data for the panel {title!r}")
    plot(found, out)


def plot(panels: Sequence[Panel], out: Path) -> None:
    """Draws panels below one another, so that a phone shows them in readable size."""
    plt.rcParams.update(STYLE)
    size = (WIDTH, PANEL * len(panels))
    figure, axes = plt.subplots(len(panels), 1, figsize=size, layout="constrained", sharex=True)
    for axis, (title, unit, series) in zip(axes, panels, strict=True):
        lines = itertools.product(("-", "--"), COLOURS)
        for (line, colour), (name, points) in zip(lines, series.items(), strict=False):
            axis.plot(*zip(*points, strict=True), line, lw=1.5, color=colour, label=name)
        axis.set_title(title)
        # Room for the legend.
        axis.set_ylim(0, (1.2 + 0.15 * -(-len(series) // 3)) * axis.get_ylim()[1])
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _, unit=unit: _shown(value, unit)))
        spaces = {"handlelength": 1.2, "columnspacing": 1, "handletextpad": 0.4, "borderpad": 0}
        axis.legend(frameon=False, ncols=3, loc="upper left", **spaces).set_in_layout(False)
    axes[-1].set_xlabel("seconds of traffic")
    save(figure, out)


def _legend(form: str, series: dict[str, Any]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda m: series["metric"].get(m[1], ""), form).strip()


def _shown(value: float, unit: str) -> str:
    if unit == "s":
        return f"{1000 * value:g} ms"
    if unit == "percentunit":
        return f"{100 * value:g}%"
    return f"{value / 2**20:g} MiB" if unit == "bytes" else f"{value:g}"
