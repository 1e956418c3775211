"""Prints the figures of `make bench` on one page: each beside its floor or peer, how near it came, and the goal.

Reads the rows that the benches left in a folder; a bench without rows is left out.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fusionkv.bench import command
from fusionkv.bench.worker import throughput
from fusionkv.fusion_worker.quality.defaults import PRIMED

_MIB = 1 << 20
_SHORT = 2000  # tokens of context below which the goal of the time to the first token is lower


class Figure(NamedTuple):
    """One line. near: the share of the floor's or peer's speed, or the multiple of it. goal: of `near` or `value`."""

    what: str
    value: str
    beside: str
    near: str
    goal: str = ""


def _first_tokens(rows: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    for row in rows:
        if row["name"] == PRIMED.recipe:
            yield Figure(
                f"first token, {row['context']:,} tokens",
                f"{row['value_s']:.2f} s",
                f"full attention {row['baseline_s']:.2f} s, {row['ratio']:.1f}x; by operations {row['ideal']:.1f}x",
                f"{row['ratio'] / row['ideal']:.0%}",
                "75%" if row["context"] < _SHORT else "85%",
            )


def _decoding(rows: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    for row in rows:
        if row["chunks"] > 1:
            recomputed = f", {row['recomputed']:.0%} recomputed" if row["recomputed"] else ""
            yield Figure(
                f"decoding, {row['requests']} at once, {row['chunks']} chunks{recomputed}",
                f"{row['step_ms']:.0f} ms a token",
                f"one piece {row['one_piece_ms']:.0f} ms"
                + (f"; {row['keys_read']:g}x the keys" if recomputed else ""),
                f"{row['one_piece_ms'] / row['step_ms']:.0%}",
                "97%",
            )


def _encoding(rows: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    for row in rows:
        plain = f"plain prefill {row['plain_prefill_tokens_per_s']:,}"
        yield Figure(
            "encoding ahead", f"{row['encoded_tokens_per_s']:,} tokens/s", plain, f"{row['ratio']:.0%}", "85%"
        )


def _start(rows: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    for row in rows:
        floor, unit = row["floor"], row["unit"]
        beside = "" if not floor else f"imports {floor:g} s" if unit == "s" else f"weights {floor:g} MB"
        near = f"{floor / row['value']:.0%}" if floor else ""
        yield Figure(row["figure"], f"{row['value']:g} {unit}", beside, near, f"{row['goal']:g} {unit}")


def _load(rows: list[dict[str, Any]]) -> Iterator[Figure]:
    first, *others = dict.fromkeys(row["name"] for row in rows)
    base, _ = throughput.capacity(rows, first)
    for name in others:
        rate, more = throughput.capacity(rows, name)
        yield Figure(
            f"questions a second, {name.replace('_', ' ')}",
            f"{'>= ' * more}{rate:.2f}",
            f"full attention {base:.2f}, at the same p99",
            f"{rate / base:.1f}x",
            "4x" if name == PRIMED.recipe else "",
        )


def _bytes(rows: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    for row in rows:
        if row["entry_bytes"] == 8 * _MIB and row["at_once"] == 1:
            peer, speed = (
                ("bare gRPC", row["grpc_gb_per_s"])
                if row["transport"] == "tcp"
                else ("a copy", row["memcpy_gb_per_s"])
            )
            yield Figure(
                f"{row['operation']}, 8 MiB, {row['transport']}",
                f"{row['gb_per_s']:.2f} GB/s",
                f"{peer} {speed:.2f}",
                f"{row['gb_per_s'] / speed:.0%}",
            )


def _index(rows: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    row = rows[-1]
    what = f"index of {row['chunks']:,} chunks"
    yield Figure(
        f"{what}: first lookup", f"{row['first_seconds']:.2f} s", f"all {row['restart_seconds']:.0f} s", "", "5 s"
    )
    yield Figure(f"{what}: memory", f"{row['bytes_per_chunk']:.0f} bytes a chunk", "", "", "300 bytes")


_BENCHES = {
    "ttft": _first_tokens,
    "decode": _decoding,
    "encode": _encoding,
    "throughput": _load,
    "start": _start,
    "kvcache": _bytes,
    "scale": _index,
}


def figures(folder: Path) -> list[Figure]:
    """The lines of all benches that have rows in a folder."""
    found: list[Figure] = []
    for name, read in _BENCHES.items():
        file = folder / f"{name}.json"
        if file.exists():
            found += read(json.loads(file.read_text()))
    return found


def main() -> int:
    title = "FusionKV beside floors and peers, same machine"
    command.show(command.table(title, Figure._fields, figures(Path(sys.argv[1])), texts=len(Figure._fields)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
