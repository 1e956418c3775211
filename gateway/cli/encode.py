"""`fusionkv encode`: whole corpora in one call each, or their documents one by one, shared with other processes."""

import argparse
import asyncio
import contextlib
import functools
import signal
import sys
import time
from dataclasses import asdict

from fusionkv.gateway.cli import connect
from fusionkv.gateway.cli.console import awaited, print_json, progress_bar
from fusionkv.gateway.cli.files import UsageError
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.gateway.client.results import Progress
from fusionkv.gateway.ingest.encoder import Encoder, check_there
from fusionkv.gateway.ingest.work_queue import Standing, WorkQueue
from fusionkv.protos.observe import telemetry

# Of the documents that were set aside, so many are named at the end.
_NAMED = 20
_SHOWN_SECONDS = 1.0


async def run(args: argparse.Namespace) -> int:
    """Encodes corpora ahead of time, one after the other; with an index, the one of that number."""
    if args.queue is not None:
        return await _shared(args)
    if args.index is not None and not 0 <= args.index < len(args.corpora):
        raise UsageError(f"--index is {args.index}, and there are {len(args.corpora)} corpora: they count from 0")
    async with connect.client(args) as client:
        for name in args.corpora if args.index is None else [args.corpora[args.index]]:
            # For each anew: encoding those before it may have taken hours.
            end = time.monotonic() + args.wait
            done = await awaited(functools.partial(corpus, client, args.json, name, args.recipe, end), end)
            if not args.json:
                print(f"{name}: {done.done - done.skipped} chunks encoded, {done.skipped} were already")
    return 0


async def corpus(client: AsyncClient, quiet: bool, name: str, recipe: str, end: float = 0.0) -> Progress:
    """Encodes a corpus and shows how far it is. NotFound before time.monotonic() is `end` if nothing is in it yet."""
    done = Progress(0, 0, 0)
    with progress_bar(quiet) as progress:
        bar = progress.add_task("precompute", total=None)
        async with contextlib.aclosing(client.precompute(name, recipe)) as events:
            async for done in events:
                check_there(name, done.total, end)
                progress.update(bar, completed=done.done, total=done.total)
                if quiet:
                    print_json({"event": "precompute", **asdict(done)})
    return done


async def _shared(args: argparse.Namespace) -> int:
    """Takes part in a run; returns when all of it is done, by whomever."""
    if not args.run:
        raise UsageError("--queue needs --run, a name for this pass over the corpora, the same for all that share it")
    if args.index is not None:
        raise UsageError("--index and --queue exclude each other: with a queue the documents are shared, not corpora")
    try:
        queue = WorkQueue(
            args.queue, args.run, password=args.queue_password, cluster=args.queue_cluster, min_idle=args.min_idle
        )
    except ValueError as error:
        raise UsageError(f"--queue: {error}") from error
    try:
        telemetry.attach("fusionkv-encoder")
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        async with connect.client(args) as client:
            encoder = Encoder(
                client,
                queue,
                args.corpora,
                args.recipe,
                attempts=args.attempts,
                concurrency=args.concurrency,
                patience=args.timeout,
                wait=args.wait,
            )
            work = asyncio.ensure_future(encoder.run())
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
            shown = asyncio.ensure_future(_show(encoder, args))
            try:
                await work
            except asyncio.CancelledError:
                print("fusionkv: ended; what was in work is left to others", file=sys.stderr)
                return 143
            finally:
                shown.cancel()
            return await _conclude(encoder, queue, args)
    finally:
        await queue.leave()
        telemetry.detach()


async def _show(encoder: Encoder, args: argparse.Namespace) -> None:
    """The run's progress, of all who take part, once a second."""
    shown = None
    with progress_bar(args.json) as progress:
        bar = progress.add_task(f"encode {args.run}", total=None)
        while True:
            now = encoder.standing
            progress.update(bar, completed=now.encoded + now.skipped, total=encoder.chunks or None)
            if args.json and now != shown:
                print_json(_event("progress", now, encoder.chunks))
            shown = now
            await asyncio.sleep(_SHOWN_SECONDS)


def _event(kind: str, now: Standing, chunks: int) -> dict[str, object]:
    return {
        "event": kind,
        "documents": now.done,
        "documents_set_aside": now.aside,
        "chunks": chunks,
        "chunks_encoded": now.encoded,
        "chunks_skipped": now.skipped,
    }


async def _conclude(encoder: Encoder, queue: WorkQueue, args: argparse.Namespace) -> int:
    """Says what came of the run, and what was set aside."""
    end = await queue.standing()
    if args.json:
        print_json(_event("summary", end, encoder.chunks))
    else:
        print(
            f"{args.run}: {end.done} documents, {end.encoded} chunks encoded, {end.skipped} were already; "
            f"{end.aside} documents set aside"
        )
    for item in await queue.aside(_NAMED) if end.aside else []:
        # Whoever else can write to this Redis may have left something there.
        corpus, document, reason = (item.get(name, "?") for name in ("corpus", "document", "reason"))
        print(f"fusionkv: {corpus}/{document}: {reason}", file=sys.stderr)
    return 1 if end.aside else 0
