"""Prints the table of rates of docs/performance.md from the rows of a throughput run: the file is the argument."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, a line for each system and rate; p99 over the bound, where the rates end, is bold."""
    lines = [
        "| system | questions/s | TTFT median, s | TTFT p99, s | tokens/s | engine idle |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        system = row["name"].replace("_", " ") + (f", r = {row['r']:g}" if 0 < row["r"] < 1 else "")
        late = f"{row['ttft_p99_s']:.2f}"
        late = f"**{late}**" if row["ttft_p99_s"] > row["bound_s"] else late
        cells = (f"{row['requests_per_s']:.2f}", f"{row['ttft_p50_s']:.2f}", late, f"{row['tokens_per_s']:.1f}")
        lines.append("| " + " | ".join((system, *cells, f"{row['engine_idle']:.0%}")) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())))
