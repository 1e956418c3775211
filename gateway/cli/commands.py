"""The commands of `fusionkv` that call a gateway; each takes the parsed flags and returns the exit code."""

import argparse
import asyncio
import contextlib
import functools
import itertools
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, JustifyMethod
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from fusionkv.gateway import explain
from fusionkv.gateway.cli import connect, encode, files, shown
from fusionkv.gateway.cli.console import print_json, progress, retry_while_busy
from fusionkv.gateway.client import results
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.gateway.client.results import Event, Explanation, Ingested, Item, Progress, Summary, Token, as_dict
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.kvcache.v1.kvcache_pb2 import Tier
from fusionkv.protos.runtime import cancellation
from fusionkv.protos.runtime.errors import AlreadyExists, InvalidArgument, NotFound, ServiceError
from fusionkv.protos.runtime.tls import ClientTLS

_FALLBACK_CACHE = "127.0.0.1:7070"
_STATS_SECONDS = 5.0
_SHOWN_ENDINGS = 8
_SHOWN_NAMES = 8


async def ingest(args: argparse.Namespace) -> int:
    """Stores files, several at once. Reports a file that fails and goes on with the others."""
    if args.dry_run and not args.sync:
        raise connect.UsageError("--dry-run needs --sync")
    total = _Total()

    def unreadable(error: OSError) -> None:
        total.failed += 1
        shown.tell(f"{shown.name(error.filename)}: {error.strerror}")

    chosen = await asyncio.to_thread(files.find, args.paths, args.media_type, args.name, unreadable)
    if skipped := await asyncio.to_thread(files.skipped, args.paths, args.media_type):
        endings = " ".join(sorted({path.suffix or path.name for path in skipped})[:_SHOWN_ENDINGS])
        what = "files with unknown endings" if len(skipped) > 1 else "file with an unknown ending"
        shown.tell(f"skipped {len(skipped)} {what}: {endings}")
    current: dict[str, set[str]] = {file.source + files.mark(args.prefix): set() for file in chosen.values()}
    if args.sync:
        files.vanished([], args.paths, current, args.prefix, args.media_type)  # refuses paths that it can't compare
    began = time.perf_counter()
    slots = asyncio.Semaphore(args.concurrency)
    async with connect.client(args) as client:
        with progress(args.json) as show:
            done = itertools.count(1)

            async def one(name: str, file: files.File) -> None:
                async with slots:
                    try:
                        await _store(client, name, file, args, total, current)
                    except (InvalidArgument, AlreadyExists, OSError) as error:
                        # Errors of this file only; any other error would affect the next files as well.
                        total.failed += 1
                        shown.tell(f"{shown.name(file.path)}: {error}")
                    show("ingest", next(done), len(chosen))

            await cancellation.all_of(one(name, file) for name, file in chosen.items())
        if args.sync:
            await _delete_vanished(client, args, total, current)
        total.seconds = round(time.perf_counter() - began, 3)
        if args.precompute is not None and total.documents:
            encoded = await encode.corpus(client, args.json, args.corpus, args.precompute, Deadline.after(0))
            total.encoded, total.encoded_before = encoded.done - encoded.skipped, encoded.skipped
    if args.json:
        print_json({"event": "summary", **asdict(total)})
    else:
        print(total.line(args.corpus))
    return 1 if total.failed else 0


async def _store(
    client: AsyncClient,
    name: str,
    file: files.File,
    args: argparse.Namespace,
    total: "_Total",
    current: dict[str, set[str]],
) -> None:
    """Stores a file, and adds the names of its documents to those of its source."""
    source = file.source and file.source + files.mark(args.prefix)
    options = {"media_type": args.media_type, "source": source, "replace": args.replace, "prefix": args.prefix}
    parts = files.parts(name, file.path, args.media_type)
    while (part := await asyncio.to_thread(next, parts, None)) is not None:
        current.get(source, set()).update(args.prefix + document for document in part.documents)
        total.without_text += len(part.without_text)
        if part.without_text:
            few = ", ".join(part.without_text[:_SHOWN_NAMES]) + ", ..." * (len(part.without_text) > _SHOWN_NAMES)
            shown.tell(f"{shown.name(file.path)}: without text, so not stored: {few}")
        if not part.documents or args.dry_run:
            continue
        call = functools.partial(
            client.ingest, args.corpus, name, part.content, first_line=part.first_line, **options
        )
        done = await retry_while_busy(call, args.timeout)
        total.add(done)
        if args.json:
            print_json({"event": "document", **asdict(done)})


async def _delete_vanished(
    client: AsyncClient, args: argparse.Namespace, total: "_Total", current: Mapping[str, set[str]]
) -> None:
    """Deletes the corpus's documents that came from the given paths and are no longer there, and names each."""
    if total.failed:
        shown.tell(f"nothing is deleted, since {total.failed} files or folders could not be read or stored")
        return
    try:
        items = await client.list(args.corpus)
    except NotFound:  # the corpus does not exist yet
        items = []
    for name in files.vanished(items, args.paths, current, args.prefix, args.media_type):
        if not args.dry_run:
            with contextlib.suppress(NotFound):  # another command has deleted it meanwhile
                await retry_while_busy(functools.partial(client.delete, args.corpus, name), args.timeout)
        total.deleted += 1
        if args.json:
            print_json({"event": "deleted", "name": name})
        else:
            print(f"{args.corpus}: {'would delete' if args.dry_run else 'deleted'} {shown.line(name)}")


@dataclass
class _Total:
    documents: int = 0
    replaced: int = 0
    failed: int = 0
    deleted: int = 0
    without_text: int = 0
    chunks: int = 0
    tokens: int = 0
    seconds: float = 0.0
    encoded: int = 0
    encoded_before: int = 0

    def add(self, done: Ingested) -> None:
        for what in ("documents", "replaced", "chunks", "tokens"):
            setattr(self, what, getattr(self, what) + getattr(done, what))

    def line(self, corpus: str) -> str:
        rate = self.documents / self.seconds if self.seconds else 0.0
        line = (
            f"{corpus}: {self.documents} documents ({self.replaced} replaced, {self.failed} failed"
            f"{f', {self.deleted} deleted' if self.deleted else ''}), "
            f"{self.chunks} chunks, {self.tokens} tokens in {self.seconds:.1f} s "
            f"({rate:.{int(rate < 10)}f} documents/s)"
        )
        encoded = self.encoded + self.encoded_before
        return f"{line}; {self.encoded} chunks encoded, {self.encoded_before} already stored" if encoded else line


async def ask(args: argparse.Namespace) -> int:
    """Streams the answer to standard output, and prints its figures on standard error."""
    names = "system prompt_template recipe ratio top_k order max_tokens temperature top_p seed stop filter"
    options = {name: getattr(args, name) for name in names.split()}
    options["filter"] = dict(args.filter)
    if len(options["filter"]) < len({*args.filter}):
        raise connect.UsageError("--filter gives a key two values: no document has both")
    page = _page(args.explain) if args.explain is not None else None
    async with connect.client(args) as client:
        stream = client.stream(args.corpus, args.question, **options, explain=page is not None)
        events = await _print_tokens(stream, shows=not args.json)
        answer = results.answer(events)
        if page is not None:
            explanation = next((event for event in events if isinstance(event, Explanation)), None)
            if explanation is None:
                why = answer.summary.degraded_reason or "upgrade gateway and workers to the version of this command"
                raise ServiceError(
                    f"the answer came without an explanation, so {args.explain} was not written: {why}"
                )
            full = await client.ask(
                args.corpus, args.question, **{**options, "recipe": explain.REFERENCE, "ratio": None}
            )
            args.explain.write_text(explain.render(page, args.question, answer, explanation, full), "utf-8")
    summary = answer.summary
    if args.json:
        print_json({"text": answer.text, "sources": [asdict(s) for s in answer.sources], "summary": as_dict(summary)})
        return 0
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    for source in answer.sources:
        text = shown.line(f"{source.name}  {source.score:.3f}  {' '.join(source.text.split())}")
        console.print(f"  {text}", style="dim", no_wrap=True, overflow="ellipsis")
    console.print(_answer_figures(summary))
    notes = {
        "passages": "" if summary.chunks_retrieved else "none was found, so the answer has no context",
        "degraded": summary.degraded_reason if summary.degraded else "",
        "ratio raised": summary.ratio_raised,
        "recipe replaced": summary.recipe_replaced,
    }
    for name, note in notes.items():
        if note:
            console.print(f"{name}: {shown.line(note)}", style="yellow")
    return 0


async def _print_tokens(stream: AsyncGenerator[Event], shows: bool) -> list[Event]:
    """All events of an answer. Ends its line also where it breaks off."""
    terminal, events = sys.stdout.isatty(), list[Event]()
    try:
        async with contextlib.aclosing(stream):
            async for event in stream:
                events.append(event)
                if isinstance(event, Token) and shows:
                    # Another program gets the answer as it is.
                    print(shown.lines(event.text) if terminal else event.text, end="", flush=True)
    finally:
        if shows and any(isinstance(event, Token) for event in events):
            print(flush=True)
    return events


def _page(file: Path) -> Any:
    """The page that explains an answer, for a file that can be written."""
    if not file.parent.is_dir():
        raise connect.UsageError(f"--explain {file}: there is no folder {file.parent}")
    if file.is_dir():
        raise connect.UsageError(f"--explain {file}: it is a folder")
    return explain.template()


def _answer_figures(summary: Summary) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    stages = as_dict(summary.seconds)
    first, total = stages.pop("ttft"), stages.pop("total")
    breakdown = "  ".join(f"{name} {1e3 * s:.1f}" for name, s in stages.items() if s >= 5e-5)
    table.add_row("time (ms)", f"first token {1e3 * first:.1f}, total {1e3 * total:.1f}:  {breakdown}")
    hits = [f"{h.chunks} {h.kind} from {h.tier}" for h in summary.hits]
    if summary.chunks_missed:
        hits.append(f"{summary.chunks_missed} missed")
    if summary.entries_rejected:
        hits.append(f"{summary.entries_rejected} rejected: no worker's signature")
    table.add_row("chunks", f"{summary.chunks_retrieved} retrieved: {', '.join(hits) or 'no cache lookup'}")
    table.add_row(
        "tokens",
        f"{summary.context_tokens} context: {summary.tokens_lossless} lossless, {summary.tokens_reused} reused, "
        f"{summary.tokens_recomputed} recomputed, {summary.tokens_encoded} encoded; "
        f"{summary.tokens_generated} generated",
    )
    table.add_row(
        "recipe", shown.line(f"{summary.recipe}, ratio {summary.ratio:g}; finish reason: {summary.finish_reason}")
    )
    return table


async def delete(args: argparse.Namespace) -> int:
    if args.document == "":  # as a script gives it whose variable is not set
        raise connect.UsageError("DOCUMENT is empty: name a document, or leave it out to delete the whole corpus")
    async with connect.client(args) as client:
        deleted = await client.delete(args.corpus, args.document or "")
    if args.json:
        print_json(asdict(deleted))
    else:
        print(f"{args.corpus}: {deleted.documents} documents, {deleted.chunks} chunks deleted")
    return 0


async def move(args: argparse.Namespace) -> int:
    """Rebuilds corpora for the worker's model and the gateway's embedder."""
    async with connect.client(args) as client:
        for name in args.corpora:
            done = Progress(0, 0)
            with progress(args.json) as show:
                async with contextlib.aclosing(client.move(name)) as events:
                    async for done in events:
                        show(f"move {name}", done.done, done.total)
            if args.json:
                print_json({"event": "moved", "corpus": name, "chunks": done.done})
            else:
                print(f"{name}: {done.done} chunks moved")
    return 0


async def show(args: argparse.Namespace) -> int:
    async with connect.client(args) as client:
        items: list[Item] = await client.list(args.corpus)
    if args.json:
        for item in items:
            print_json(asdict(item))
        return 0
    sizes, made_with = ["chunks", "tokens", "bytes"], ["model", "embedder"]
    columns = ["document", *sizes] if args.corpus else ["corpus", "documents", *sizes, *made_with]
    table = Table(box=None, pad_edge=False)
    for column in columns:
        justify: JustifyMethod = "right" if column in ("documents", *sizes) else "left"
        table.add_column(column, justify=justify, overflow="fold")
    for item in items:
        values = item.name, *(str(getattr(item, column)) or "none" for column in columns[1:])
        table.add_row(*map(shown.line, values))
    Console(highlight=False, markup=False, emoji=False).print(table)
    return 0


async def stats(args: argparse.Namespace) -> int:
    """Shows the statistics of gateway, worker and cache service; only the gateway has to be reachable."""
    async with connect.client(args) as client:
        services: dict[str, dict[str, Any]] = {"gateway": asdict(await client.stats())}
    worker, tls = args.worker or services["gateway"]["worker"], connect.tls(args)
    services["worker"] = (
        await _reported(worker, tls, _worker_stats) if worker else {"error": "no worker is reachable"}
    )
    services["cache"] = await _reported(args.cache or _cache_address(worker), tls, _cache_stats)
    if args.json:
        print_json(services)
        return 0
    table = Table(box=None, show_header=False, pad_edge=False)
    for service, show in (("gateway", _gateway_figures), ("worker", _worker_figures), ("cache", _cache_figures)):
        table.add_row(Text(service, "bold"), "")
        values = services[service]
        for name, value in (values if "error" in values else show(values)).items():
            table.add_row(f"  {name}", shown.lines(value))
    Console(highlight=False, markup=False, emoji=False).print(table)
    return 0


async def _reported(
    address: str, tls: ClientTLS | None, ask: Callable[[str, ClientTLS | None], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    try:
        async with asyncio.timeout(_STATS_SECONDS):
            return {"address": address, **await ask(address, tls)}
    except (ServiceError, TimeoutError) as error:
        return {"address": address, "error": str(error) or "no reply"}


async def _worker_stats(address: str, tls: ClientTLS | None) -> dict[str, Any]:
    from fusionkv.fusion_worker.client import WorkerClient

    client = WorkerClient(address, tls)
    try:
        model = await client.model()
    finally:
        await client.close()
    plain = "name family device dtype max_tokens kv_bytes_per_token default_recipe default_meaning"
    usable = [r for r in model.recipes if not r.unusable]
    return {
        **{name: getattr(model, name) for name in plain.split()},
        "fingerprint": model.fingerprint.hex(),
        "recipes": [{"name": r.name, "ratio": r.default_ratio, "neighbours": r.neighbours} for r in usable],
        "modifiers": [m.name for m in model.modifiers],
        "verdicts": [as_dict(verdict) for verdict in model.verdicts],
    }


async def _cache_stats(address: str, tls: ClientTLS | None) -> dict[str, Any]:
    from fusionkv.kvcache_service.client import CacheClient

    client = CacheClient(address, tls)
    try:
        stats = as_dict(await client.stats())
    finally:
        await client.close()
    tiers = [{**tier, "tier": Tier.Name(tier["tier"]).removeprefix("TIER_").lower()} for tier in stats["tiers"]]
    return {**stats, "tiers": tiers}


def _cache_address(worker: str) -> str:
    """Address of the cache service of `fusionkv serve`: its socket is beside the worker's, or in the default folder.

    Without such a socket, the default address.
    """
    beside = Path(worker.removeprefix("unix:")).parent if worker.startswith("unix:") else None
    for folder in filter(None, (beside, Path(".fusionkv/run"))):
        if (socket := (folder / "kvcache.sock").absolute()).exists():
            return f"unix:{socket}"
    return _FALLBACK_CACHE


def _gateway_figures(s: Mapping[str, Any]) -> dict[str, str]:
    return {
        "version": s["version"],
        "model": s["model"] or "no worker is reachable",
        "uptime": _duration(s["uptime_seconds"]),
        "tenants": f"{s['tenants']:,}, together",
        "requests": f"{s['requests']:,} ({s['requests_failed']:,} failed, {s['requests_degraded']:,} degraded)",
        "corpora": f"{s['documents']:,} documents, {s['chunks']:,} chunks",
    }


def _worker_figures(s: Mapping[str, Any]) -> dict[str, str]:
    """Figures of a worker: its recipes with the verdicts of `fusionkv check`, if it was run."""
    verdicts = {(v["recipe"], v["ratio"]): f": {v['verdict']}" for v in s["verdicts"]}
    recipes = [
        f"{r['name']}, {r['ratio']:.0%} recomputed{verdicts.get((r['name'], r['ratio']), '')}" for r in s["recipes"]
    ]
    return {
        "address": s["address"],
        "model": f"{s['name']} ({s['family']}, {s['dtype']} on {s['device']})",
        "KV": f"{decimal(s['kv_bytes_per_token'])} per token, prompts of up to {s['max_tokens']:,} tokens",
        "default": s["default_meaning"],
        "recipes": "\n".join(recipes),
        "modifiers": ", ".join(s["modifiers"]),
    }


def _cache_figures(s: Mapping[str, Any]) -> dict[str, str]:
    hits, missed = s["hits_exact"] + s["hits_alternative"], s["misses"]
    rate = f"{hits / (hits + missed):.0%} of {hits + missed:,} chunks" if hits + missed else "no lookups yet"
    tiers = {
        t["tier"]: f"{t['entries']:,} entries, {decimal(t['used_bytes'])} of {decimal(t['capacity_bytes'])}"
        for t in s["tiers"]
    }
    return {
        "address": s["address"],
        "uptime": _duration(s["uptime_seconds"]),
        "hit rate": f"{rate} ({s['hits_exact']:,} exact, {s['hits_alternative']:,} alternative)",
        "puts": f"{s['puts']:,} ({s['puts_existing']:,} already stored, {s['puts_refused']:,} refused)",
        "transferred": f"{decimal(s['bytes_put'])} put, {decimal(s['bytes_fetched'])} fetched",
        "damaged": f"{s['checksum_failures']:,} checksum failures",
        **tiers,
    }


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


COMMANDS = {
    "ingest": ingest,
    "encode": encode.run,
    "ask": ask,
    "delete": delete,
    "move": move,
    "list": show,
    "stats": stats,
}
