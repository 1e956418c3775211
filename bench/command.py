"""What benchmarks share as commands: their flags, and rows as a table and as JSON."""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fusionkv.protos.runtime.process import cores


def parser_of(module: str, about: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m fusionkv.bench.MODULE`, with --json."""
    parser = argparse.ArgumentParser(prog=f"python -m fusionkv.bench.{module}", description=about)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the rows to a file")
    return parser


def add_model(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Adds --model. more: further values that it takes."""
    about = f"as for `fusionkv serve worker`{more} (default: %(default)s)"
    parser.add_argument("--model", default="smollm2", help=about)


def add_data(parser: argparse.ArgumentParser) -> None:
    """Adds --data, the files that `Passages.of` reads."""
    about = "questions with passages (default: the demo's)"
    parser.add_argument("--data", type=Path, nargs="+", action="extend", default=[], metavar="FILE", help=about)


def table(title: str | None, columns: Sequence[str], lines: Iterable[Sequence[Any]], texts: int = 0) -> Table:
    """A table. The first `texts` columns are aligned left, the others right."""
    made = Table(title=title)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < texts else "right")
    for line in lines:
        made.add_row(*map(str, line))
    return made


def show(shown: Table) -> None:
    """Prints a table, wide enough for all columns where the output is no terminal."""
    Console(width=None if sys.stdout.isatty() else 140).print(shown)


def machine() -> str:
    """The number of cores that this process may use, with AMX or without."""
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    amx = flags is not None and "amx_tile" in flags[1].split()
    number = cores()
    return f"{number} core{'s' * (number > 1)} {'with' if amx else 'without'} AMX"


def write(rows: object, path: Path | None) -> None:
    """Writes rows as JSON to `path`, if it is given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
