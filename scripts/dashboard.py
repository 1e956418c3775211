"""Draws panels of the Grafana dashboard with matplotlib, from the results of their queries in Prometheus."""

import json
import re
from pathlib import Path
from typing import Any

import aiohttp
from matplotlib.ticker import FuncFormatter
from plots import STYLE, plt

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
_COLUMNS = 2


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
    plt.rcParams.update({**STYLE, "font.size": 9})
    rows = -(-len(SHOWN) // _COLUMNS)
    figure, axes = plt.subplots(rows, _COLUMNS, figsize=(10, 2.7 * rows), layout="constrained", sharex=True)
    async with aiohttp.ClientSession() as session:
        for axis, title in zip(axes.flat, SHOWN, strict=True):
            panel, drawn = panels[title], 0
            for target in panel["targets"]:
                # Grafana would choose the interval of rates.
                query = target["expr"].replace("$__rate_interval", "20s").replace("[1h]", "[10m]")
                asked = {"query": query, "start": f"{start}", "end": f"{end}", "step": "2"}
                async with session.get(f"{prometheus}/api/v1/query_range", params=asked) as response:
                    series = (await response.json())["data"]["result"]
                for one in series:
                    points = [(at - start, float(value)) for at, value in one["values"] if value != "NaN"]
                    if points:
                        axis.plot(*zip(*points, strict=True), lw=1.5, label=_legend(target["legendFormat"], one))
                        drawn += 1
            if not drawn:
                raise ValueError(f"no data for the panel {title!r}")
            unit = panel["fieldConfig"]["defaults"].get("unit", "short")
            axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
            axis.set_ylim(bottom=0)
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _, unit=unit: _shown(value, unit)))
            axis.spines[["top", "right"]].set_visible(False)
            axis.legend(frameon=False, fontsize=7.5, ncols=2)
    for axis in axes[-1]:
        axis.set_xlabel("seconds of traffic")
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


def _legend(form: str, series: dict[str, Any]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda m: series["metric"].get(m[1], ""), form).strip()


def _shown(value: float, unit: str) -> str:
    if unit == "s":
        return f"{1000 * value:g} ms"
    if unit == "percentunit":
        return f"{100 * value:g}%"
    return f"{value / 2**20:g} MiB" if unit == "bytes" else f"{value:g}"
