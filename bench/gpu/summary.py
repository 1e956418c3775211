"""Prints what `lease.sh` measured of a worker beside what is expected of it, and appends it to a CSV file."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fusionkv.bench.gpu.report import Machine, Report, Row
from fusionkv.fusion_worker.quality.verdict import PRIMED

_SHAPE = "shape-7b"
# (floor, expected) in milliseconds of an H100, by kind and size: counted work at the rates that were measured.
_FULL = {4096: (None, 138), 16384: (None, 575), 27648: (None, 1105)}
_DEFAULT = {4096: (16, 75), 16384: (56, 132), 27648: (None, 315)}
_RESIDENT = {4096: (None, 70), 16384: (None, 112)}
_CHOOSE, _PREFILL = {4096: (2.7, None), 16384: (2.7, None)}, {4096: (8.4, None), 16384: (34, None)}
_LINK, _LOAD = 50e6, 45e6  # bytes a millisecond: of the link, and expected of a load
_ENCODED = 30  # tokens a millisecond
_BUSY = 0.85  # share of the time in which the GPU computes
_GRAPH = {1: (4.7, 9), 8: (None, 10.5)}


def figures(out: Path) -> Iterator[tuple[Row, tuple[float | None, float | None]]]:
    """Rows of the files that the parts of `lease.sh` wrote to a folder, each with its floor and expected value."""
    default, unknown = (PRIMED.recipe, PRIMED.ratio), (None, None)
    for given in _read(out / "ttft.json"):
        context, recipe = given["context"], (given["name"], given["r"])
        full, ms = 1e3 * given["baseline_s"], 1e3 * given["value_s"]
        row = Row("ttft", f"{_SHAPE} {given['name']}", ms, context, given["r"], 1, "full attention", full)
        yield row, _DEFAULT.get(context, unknown) if recipe == default else unknown
        if recipe == default:
            yield Row("ttft", f"{_SHAPE} full attention", full, context, 1.0, 1), _FULL.get(context, unknown)
            stages, loaded = given["stages_s"], given["bytes_fetched"]
            load = _row("load", given, stages["load"])
            yield replace(load, rate=loaded / load.ms / 1e6 if load.ms else None), (loaded / _LINK, loaded / _LOAD)
            choose, compute = _row("choose", given, stages["select"]), _row("compute", given, stages["prefill"])
            busy = given["busy_ms"]
            yield replace(choose, share=busy["select"] / choose.ms), _CHOOSE.get(context, unknown)
            yield replace(compute, share=busy["prefill"] / compute.ms), _PREFILL.get(context, unknown)
            yield _row("resident", given, given["resident_s"]), _RESIDENT.get(context, unknown)
    for given in _read(out / "decode.json"):
        name, requests = f"{_SHAPE} {given['chunks']} chunks", given["requests"]
        if "graph_ms" in given:
            rest = given["tokens"], given["recomputed"], requests, "launched one by one", given["step_ms"]
            row = Row("step", name, given["graph_ms"], *rest, share=given["busy_ms"] / given["graph_ms"])
            yield row, _GRAPH.get(requests, unknown)
    for given in _read(out / "encode.json"):
        ms = 1e3 * given["tokens"] / given["encoded_tokens_per_s"]
        row = Row("encode", f"{_SHAPE} {given['chunks']} chunks", ms, given["tokens"])
        yield row, (None, given["tokens"] / _ENCODED)


def _row(kind: str, given: dict[str, Any], seconds: float) -> Row:
    """A part of a request's time to the first token."""
    return Row(kind, f"{_SHAPE} {given['name']}", 1e3 * seconds, given["context"], given["r"], 1)


def _read(file: Path) -> list[dict[str, Any]]:
    """The rows of a part, none if it failed."""
    return list(json.loads(file.read_text())) if file.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fusionkv.bench.gpu.summary", description=__doc__)
    parser.add_argument("out", type=Path, help="folder of ttft.json, decode.json and encode.json")
    parser.add_argument("--commit", required=True, help="commit to record in every row")
    parser.add_argument("--csv", type=Path, metavar="FILE.csv", help="file to append the rows to (default: none)")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report, lines = Report(Machine.of(device, args.commit), args.csv), []
    for row, bounds in figures(args.out):
        report.add(row)
        expected = _BUSY if row.kind in ("choose", "step") else None
        lines.append((row.kind, row.shape, row.context, row.r, row.batch, row.ms, *bounds, row.share, expected))
    columns = ("what", "of", "tokens", "r", "requests", "ms", "floor", "expected of an H100", "busy", "expected")
    report.table("A worker", columns, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
