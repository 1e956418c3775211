"""`fusionkv`: runs the services, calls a gateway, and evaluates models."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from fusionkv.gateway.cli import connect, shown
from fusionkv.gateway.cli.launch import launched, missing_package
from fusionkv.gateway.client import DEFAULT_ADDRESS, ORDER_NAMES, UNREACHED_HINT
from fusionkv.gateway.ingest.media_types import ENDINGS, MEDIA_TYPES
from fusionkv.protos.runtime import process
from fusionkv.protos.runtime.settings import SettingsError, positive

MODULES = {"kvcache": "fusionkv.kvcache_service", "worker": "fusionkv.fusion_worker", "gateway": "fusionkv.gateway"}
# Commands that need no gateway, and parse their own flags.
LOCAL = ("eval", "check", "model", "size")
_USAGE = 2
# As a shell reports programs that end by SIGINT and by SIGPIPE.
_INTERRUPTED, _READER_LEFT = 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit code: 0 for success, 1 for an error, 2 for wrong usage, or a signal's."""
    process.open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # what the locale's encoding lacks is escaped, as on standard error
        sys.stdout.reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["serve"] and given[1:2] and given[1] in MODULES:
        # Replace this process by the service, which parses its own flags.
        os.execv(sys.executable, launched(f"serve {given[1]}", MODULES[given[1]], given[2:]))
    try:
        if given and given[0] in LOCAL:
            return _run_local(given[0], given[1:])
        parser = _parser()
        args = parser.parse_args(given)
        if args.command == "serve" and args.service != "all":  # its name did not come first
            parser.error(f"put the service before its flags: fusionkv serve {args.service} ...")
        return _run(args)
    except ModuleNotFoundError as error:
        print(missing_package(given[0], error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        _drop_output()


def _drop_output() -> None:
    """Drops what can't be written: Python would try again at exit, and report that with the exit code 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_local(command: str, flags: Sequence[str]) -> int:
    """Runs a command of `LOCAL`. The worker's engine takes seconds to load, so other commands do not."""
    if command == "check" and any(flag.partition("=")[0] == "--corpus" for flag in flags):
        from fusionkv.gateway.cli.check_corpus import main as run
    elif command == "check":
        from fusionkv.fusion_worker.evaluate.check import main as run
    elif command == "eval":
        from fusionkv.fusion_worker.evaluate.evaluation import main as run
    elif command == "size":
        from fusionkv.fusion_worker.evaluate.sizing import main as run
    else:
        from fusionkv.fusion_worker.library.__main__ import main as run
    return run(flags)


def _run(args: argparse.Namespace) -> int:
    # Imported after parsing: gRPC and the clients take longer to load than --help should.
    import asyncio

    from fusionkv.protos.runtime.errors import ServiceError, Unauthenticated

    process.end_when_told()
    if args.command == "serve":
        from fusionkv.gateway.cli.supervisor import serve as run
    else:
        from fusionkv.gateway.cli import commands

        run = commands.COMMANDS[args.command]

    async def command() -> int:
        try:
            return await run(args)
        except asyncio.CancelledError:  # Ctrl-C
            # At once: asyncio.run would wait for a thread that reads standard input, which nothing ends.
            _drop_output()
            os._exit(_INTERRUPTED)

    try:
        status = asyncio.run(command())
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has left, as `head` does
        return _READER_LEFT
    except connect.UsageError as error:
        shown.tell(error)
        return _USAGE
    except (ServiceError, SettingsError, OSError) as error:
        hint = "; --gateway sets the address" if str(error).endswith(f"({UNREACHED_HINT})") else ""
        if isinstance(error, Unauthenticated):
            hint = "; --token-file, FUSIONKV_TOKEN_FILE or FUSIONKV_TOKEN sets it"
        shown.tell(f"{error}{hint}")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fusionkv", description=__doc__)
    parser.add_argument("--version", action="version", version=f"fusionkv {metadata.version('fusionkv')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_serve_flags(commands.add_parser("serve", help="run one service, or all of them on this machine"))

    client = argparse.ArgumentParser(add_help=False)
    connect.add_flags(client)
    client.add_argument("--json", action="store_true", help="print JSON: one document, or one object per line")

    _add_ingest_flags(commands.add_parser("ingest", parents=[client], help="store documents in a corpus"))
    _add_encode_flags(commands.add_parser("encode", parents=[client], help="encode corpora ahead of time"))
    _add_ask_flags(commands.add_parser("ask", parents=[client], help="answer a question over a corpus"))

    move = commands.add_parser(
        "move", parents=[client], help="rebuild corpora from their stored text for another model or embedder"
    )
    move.add_argument("corpora", nargs="+", metavar="CORPUS")

    delete = commands.add_parser("delete", parents=[client], help="delete a document, or a whole corpus")
    delete.add_argument("corpus", metavar="CORPUS")
    delete.add_argument("document", nargs="?", metavar="DOCUMENT", help="without it, the whole corpus is deleted")

    listing = commands.add_parser("list", parents=[client], help="list the corpora, or the documents of one")
    listing.add_argument("corpus", nargs="?", default="", metavar="CORPUS")

    stats = commands.add_parser(
        "stats", parents=[client], help="show statistics of gateway, worker and cache service"
    )
    about = "address of a worker (default: the worker that the gateway reports)"
    stats.add_argument("--worker", default="", metavar="ADDRESS", help=about)
    about = "address of the cache service (default: the one of `fusionkv serve all`, else 127.0.0.1:7070)"
    stats.add_argument("--cache", default="", metavar="ADDRESS", help=about)

    # `main` runs these itself (`LOCAL`); they are added here for the list of commands.
    commands.add_parser("eval", help="evaluate quality and cost of every recipe on tasks, datasets and models")
    commands.add_parser("check", help="compare a model with transformers, and report which recipes are safe on it")
    commands.add_parser("model", help="fetch models by name, or list them")
    commands.add_parser("size", help="compute the bytes of KV of a model and a corpus")
    return parser


def _add_serve_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = "service to run (default: all); `fusionkv serve worker --help` shows the worker's flags"
    add("service", nargs="?", default="all", choices=["all", *MODULES], help=about)
    add("--model", help="model directory, *.gguf file, hub id, or a name from `fusionkv model list`")
    about = "directory of all data (default: .fusionkv, or the data_dir of each service)"
    add("--data-dir", type=Path, help=about)
    add("--listen", help=f"addresses of the gateway (default: {DEFAULT_ADDRESS})")
    add("--http-listen", metavar="ADDRESS", help="also serve the OpenAI-compatible API at this host:port")
    add("--config", type=Path, metavar="FILE", help="TOML file with [kvcache], [worker], [gateway]")
    add("--json", action="store_true", help="print one JSON object per line")


def _add_ingest_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("corpus", metavar="CORPUS")
    about = f"file, glob, directory (searched for {' '.join(ENDINGS)}), or - for standard input"
    add("paths", nargs="+", metavar="PATH", help=about)
    add("--name", default="", help="document name instead of the file's name; for a single file or standard input")
    add("--prefix", default="", metavar="TEXT", help="prefix of every document's name")
    about = "then delete documents of the corpus that came from these files and folders and are no longer there"
    add("--sync", action="store_true", help=about)
    add("--dry-run", action="store_true", help="with --sync: only tell what it would delete, and store nothing")
    add("--replace", action="store_true", help="also replace documents of the same name that came from another file")
    about = f"media type of all files, instead of by their ending: {', '.join(MEDIA_TYPES)}"
    add("--media-type", default="", choices=MEDIA_TYPES, metavar="TYPE", help=about)
    about = "number of documents in flight (default: %(default)s)"
    add("--concurrency", type=positive, default=8, metavar="N", help=about)
    about = "then encode the corpus ahead of time for RECIPE (default: the gateway's recipe)"
    add("--precompute", nargs="?", const="", metavar="RECIPE", help=about)


def _add_encode_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("corpora", nargs="+", metavar="CORPUS")
    add("--recipe", default="", help="recipe to encode chunks for (default: the gateway's)")
    add("--index", type=int, metavar="N", help="only the corpus of this number, from 0: for job arrays")
    about = "wait for gateway, workers and corpora that do not exist yet (default: do not wait)"
    add("--wait", type=connect.seconds, default=0.0, metavar="SECONDS", help=about)
    own = parser.add_argument_group(
        "encoders", "processes that load the model instead of the gateway's workers (needs the role operator)"
    ).add_argument
    own("--encoders", type=positive, default=0, metavar="N", help="number of processes, or of actors on Ray")
    about = "run encoders on a Ray cluster: auto or ray://HOST:PORT; by default one per GPU, or per node"
    own("--ray", metavar="ADDRESS", help=about)
    own("--config", type=Path, metavar="FILE", help="TOML file with a table [worker], on every machine")
    own("--model", help="model, as for `fusionkv serve worker`")
    own("--cache", metavar="ADDRESS", help="cache service that stores the KV (default: this machine's)")


def _add_ask_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("corpus", metavar="CORPUS")
    add("question", metavar="QUESTION")
    about = "recipe for reusing chunks: fusionrag, a3+window, default, ... (default: the gateway's)"
    add("--recipe", default="", help=about)
    about = "share of context tokens to recompute, 0 to 1 (default: the recipe's)"
    add("--ratio", type=float, metavar="R", help=about)
    add("--top-k", type=int, default=0, metavar="N", help="number of chunks to retrieve (default: the gateway's)")
    about = "order of the chunks in the prompt (default: %(default)s, best first, then from worst to second best)"
    add("--order", choices=ORDER_NAMES, default="ends", help=about)
    about = "only chunks of documents with this metadata; if repeated, all pairs must match"
    add("--filter", action="append", default=[], type=_pair, metavar="KEY=VALUE", help=about)
    add("--system", default="", metavar="TEXT", help="system prompt (default: the worker's)")
    about = "user message with {passages} and {question} (default: the worker's)"
    add("--prompt-template", default="", metavar="TEXT", help=about)
    add("--max-tokens", type=int, default=0, metavar="N", help="maximum length of the answer (default: the worker's)")
    add("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature; 0 is greedy (default: 0)")
    about = "sample from the most likely tokens of this total probability (default: all)"
    add("--top-p", type=float, default=0.0, metavar="P", help=about)
    add("--seed", type=int, metavar="N", help="seed for reproducible sampling")
    add("--stop", action="append", default=[], metavar="TEXT", help="string that ends the answer; may be repeated")
    about = "write an HTML page on reused and recomputed tokens; repeats the question with full attention"
    add("--explain", type=Path, metavar="FILE", help=about)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError("must be KEY=VALUE")
    return key, value


if __name__ == "__main__":
    sys.exit(main())
