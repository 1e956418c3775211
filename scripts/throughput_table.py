"""Prints the throughput table of docs/performance.md from the result file of a run, given as the argument."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table with a line for each system and rate. A p99 above the bound is bold."""
    lines = [
        "| system | questions/s | TTFT median, s | TTFT p99, s | tokens/s | engine idle |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        system = row["name"].replace("_", " ") + (f", r = {row['r']:g}" if 0 < row["r"] < 1 else "")
        late = f"{row['ttft_p99_s']:.2f}"
        late = f"**{late}**" if row["ttft_p99_s"] > row["bound_s"] else late
        cells = (f"{row['requests_per_s']:.2f}", f"{row['ttft_p50_s']:.2f}", late, f"{row['tokens_per_s']:.1f}")
        idle = "" if row["engine_idle"] is None else f"{row['engine_idle']:.0%}"
        lines.append("| " + " | ".join((system, *cells, idle)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
