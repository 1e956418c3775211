"""`fusionkv`: runs the services, talks to a gateway, and starts the evaluation."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from fusionkv.gateway.cli import flags
from fusionkv.gateway.client.defaults import DEFAULT_ADDRESS, ORDER_NAMES
from fusionkv.gateway.ingest.media_types import ENDINGS, MEDIA_TYPES
from fusionkv.protos.runtime.settings import SettingsError, positive, share

MODULES = {
    "kvcache": "fusionkv.kvcache_service",
    "worker": "fusionkv.fusion_worker",
    "gateway": "fusionkv.gateway",
}
# They compute with the worker's engine, which this process does not load.
APART = {
    "eval": "fusionkv.bench.quality",
    "check": "fusionkv.bench.quality.check",
    "model": "fusionkv.fusion_worker.library",
    "size": "fusionkv.fusion_worker.library.sizing",
}
_CHECK_CORPUS = f"{__package__}.check_corpus"
_USAGE = 2
_NOT_THERE = " (is `fusionkv serve all` running? --gateway names the gateway of another machine)"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 after an error, 2 for wrong usage."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["serve"] and given[1:2] and given[1] in MODULES:
        # The service reads its own flags, and is this process from here on.
        # -P: a folder `kernels` in the working directory would be taken for another package of that name.
        os.execv(sys.executable, [sys.executable, "-P", "-m", MODULES[given[1]], *given[2:]])
    if given and given[0] in APART:
        of_corpus = given[0] == "check" and any(flag.partition("=")[0] == "--corpus" for flag in given)
        module = _CHECK_CORPUS if of_corpus else APART[given[0]]
        os.execv(sys.executable, [sys.executable, "-P", "-m", module, *given[1:]])
    args = _parser().parse_args(given)
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    # Not before the flags are read: gRPC and the clients take longer than --help does.
    import asyncio

    from fusionkv.gateway.cli.files import UsageError
    from fusionkv.protos.runtime.errors import ServiceError, Unavailable

    if args.command == "serve":
        from fusionkv.gateway.cli.supervisor import serve as run
    else:
        from fusionkv.gateway.cli import commands

        run = commands.COMMANDS[args.command]
    try:
        return asyncio.run(run(args))
    except UsageError as error:
        print(f"fusionkv: {error}", file=sys.stderr)
        return _USAGE
    except (ServiceError, SettingsError, OSError) as error:
        print(f"fusionkv: {error}{_NOT_THERE if isinstance(error, Unavailable) else ''}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fusionkv", description=__doc__)
    parser.add_argument("--version", action="version", version=f"fusionkv {metadata.version('fusionkv')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run one service, or all of them on this machine")
    serve.add_argument(
        "service",
        nargs="?",
        default="all",
        choices=["all", *MODULES],
        help="all (default), or one: `fusionkv serve worker --help` shows its own flags",
    )
    serve.add_argument("--model", help="model directory, *.gguf file, hub id, or a name of `fusionkv model list`")
    serve.add_argument(
        "--data-dir", type=Path, default=Path(".fusionkv"), help="where everything is kept (default: %(default)s)"
    )
    serve.add_argument("--listen", help=f"addresses of the gateway (default: {DEFAULT_ADDRESS})")
    serve.add_argument("--http-listen", metavar="ADDRESS", help="serve the OpenAI-compatible API there, host:port")
    serve.add_argument("--admin-listen", metavar="ADDRESS", help="serve pages on the last answers there, host:port")
    serve.add_argument("--config", type=Path, metavar="FILE", help="TOML file with [kvcache], [worker], [gateway]")
    serve.add_argument("--json", action="store_true", help="one JSON object a line on standard output")

    client = argparse.ArgumentParser(add_help=False)
    flags.add_flags(client)
    client.add_argument("--json", action="store_true", help="print JSON: one document, or one object a line")

    ingest = commands.add_parser("ingest", parents=[client], help="store documents in a corpus")
    ingest.add_argument("corpus", metavar="CORPUS")
    ingest.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help=f"file, glob, directory (searched for {' '.join(ENDINGS)}), or - for standard input",
    )
    ingest.add_argument(
        "--name", default="", help="of the document, in place of the file's name; for one file, or standard input"
    )
    ingest.add_argument("--prefix", default="", metavar="TEXT", help="stands before the name of every document")
    ingest.add_argument(
        "--replace", action="store_true", help="also documents of the same name that came from another file"
    )
    ingest.add_argument(
        "--media-type",
        default="",
        choices=MEDIA_TYPES,
        metavar="TYPE",
        help=f"of all files, instead of by ending: {', '.join(MEDIA_TYPES)}",
    )
    ingest.add_argument(
        "--concurrency", type=positive, default=8, metavar="N", help="documents in flight (default: %(default)s)"
    )
    ingest.add_argument(
        "--compress",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="of every document's text to leave out, in whole sentences (default: none; needs fusionkv[compress])",
    )
    ingest.add_argument(
        "--precompute",
        nargs="?",
        const="",
        metavar="RECIPE",
        help="then encode the corpus ahead of time, as RECIPE wants it (default: the gateway's recipe)",
    )

    encode = commands.add_parser("encode", parents=[client], help="encode corpora ahead of time")
    encode.add_argument("corpora", nargs="+", metavar="CORPUS")
    encode.add_argument("--recipe", default="", help="that chunks are encoded for (default: the gateway's)")
    encode.add_argument(
        "--index", type=int, metavar="N", help="only the Nth corpus, from 0: for jobs that run once for each"
    )
    encode.add_argument(
        "--wait",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="for gateway, workers and corpora that are not there yet (default: not at all)",
    )
    own = encode.add_argument_group(
        "encoders", "processes that load the model themselves, in place of the gateway's workers (role operator)"
    )
    own.add_argument("--encoders", type=positive, default=0, metavar="N", help="processes, or actors on Ray")
    own.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="on a Ray cluster, auto or ray://HOST:PORT; by default one a GPU, or a node",
    )
    own.add_argument("--config", type=Path, metavar="FILE", help="TOML file with [worker], on every machine")
    own.add_argument("--model", help="as of `fusionkv serve worker`")
    own.add_argument("--cache", metavar="ADDRESS", help="cache service to store in (default: this machine's)")

    ask = commands.add_parser("ask", parents=[client], help="answer a question over a corpus")
    ask.add_argument("corpus", metavar="CORPUS")
    ask.add_argument("question", metavar="QUESTION")
    ask.add_argument(
        "--recipe",
        default="",
        help="how cached chunks are fused: fusionrag, a3+window, default, ... (default: the gateway's)",
    )
    ask.add_argument(
        "--ratio", type=float, metavar="R", help="share of context tokens to recompute, 0..1 (default: the recipe's)"
    )
    ask.add_argument("--top-k", type=int, default=0, metavar="N", help="chunks to retrieve (default: the gateway's)")
    ask.add_argument(
        "--order", choices=ORDER_NAMES, default="document", help="of the chunks in the prompt (default: %(default)s)"
    )
    ask.add_argument(
        "--filter",
        action="append",
        default=[],
        type=_pair,
        metavar="KEY=VALUE",
        help="only chunks of documents with this metadata; may be repeated: all of them",
    )
    ask.add_argument("--system", default="", metavar="TEXT", help="system prompt (default: the worker's)")
    ask.add_argument("--max-tokens", type=int, default=0, metavar="N", help="of the answer (default: the worker's)")
    ask.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    ask.add_argument(
        "--top-p",
        type=float,
        default=0.0,
        metavar="P",
        help="likeliest tokens of this total probability (default: all)",
    )
    ask.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")
    ask.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the answer; may be repeated")

    ask.add_argument(
        "--explain",
        type=Path,
        metavar="FILE",
        help="write a page (HTML) on what was reused and recomputed; asks again with full attention for that",
    )

    move = commands.add_parser(
        "move", parents=[client], help="make corpora anew, for another model or embedder, from their stored text"
    )
    move.add_argument("corpora", nargs="+", metavar="CORPUS")

    delete = commands.add_parser("delete", parents=[client], help="delete a document, or a whole corpus")
    delete.add_argument("corpus", metavar="CORPUS")
    delete.add_argument("document", nargs="?", default="", metavar="DOCUMENT", help="without it the corpus goes")

    listing = commands.add_parser("list", parents=[client], help="list the corpora, or the documents of one")
    listing.add_argument("corpus", nargs="?", default="", metavar="CORPUS")

    stats = commands.add_parser("stats", parents=[client], help="what gateway, worker and cache report of themselves")
    stats.add_argument("--worker", default="", metavar="ADDRESS", help="(default: the one the gateway names)")
    stats.add_argument(
        "--cache", default="", metavar="ADDRESS", help="(default: that of `fusionkv serve`, else 127.0.0.1:7070)"
    )

    # These run by themselves, see `main`; here for the list of commands.
    commands.add_parser("eval", help="what every recipe answers right and costs, on tasks, datasets and models")
    commands.add_parser("check", help="holds a model to the oracles and says which recipes are safe on it")
    commands.add_parser("model", help="fetches models by name, and lists them")
    commands.add_parser("size", help="bytes of KV that a model and a corpus take")
    return parser


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError("must be KEY=VALUE")
    return key, value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 86_400:
        raise argparse.ArgumentTypeError("must be 0.1 to 86400")
    return value


if __name__ == "__main__":
    sys.exit(main())
