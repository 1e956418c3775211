"""`fusionkv encode`: whole corpora ahead of time, by the gateway's workers or by encoders of its own."""

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict

from fusionkv.fusion_worker.encode import encoders
from fusionkv.gateway.cli import connect
from fusionkv.gateway.cli.console import awaited, print_json, progress_bar
from fusionkv.gateway.cli.files import UsageError
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.gateway.client.results import Progress
from fusionkv.protos.runtime.errors import NotFound


async def run(args: argparse.Namespace) -> int:
    """Encodes corpora ahead of time, one after the other; with an index, the one of that number."""
    if args.index is not None and not 0 <= args.index < len(args.corpora):
        raise UsageError(f"--index is {args.index}, and there are {len(args.corpora)} corpora: they count from 0")
    if not (args.encoders or args.ray) and (args.config or args.model or args.cache):
        raise UsageError("--config, --model and --cache are settings of encoders: add --encoders or --ray")
    async with connect.client(args) as client, _encoders(args) as own:
        for name in args.corpora if args.index is None else [args.corpora[args.index]]:
            # For each anew: encoding those before it may have taken hours.
            end = time.monotonic() + args.wait
            made = await awaited(functools.partial(_by_own, client, args, name, own, end), end) if own else 0
            # After encoders this finds what they stored, and has a worker learn the corpus's correction.
            done = await awaited(functools.partial(corpus, client, args.json, name, args.recipe, end), end)
            again = done.done - done.skipped
            if own and again:
                print(
                    f"fusionkv: the gateway's workers did not find {again} of {done.total} chunks that encoders "
                    "stored, and encoded them again: do their cache services share a tier (docs/encoding.md)?",
                    file=sys.stderr,
                )
            if not args.json:
                encoded = made if own else again
                print(f"{name}: {encoded} chunks encoded, {done.done - encoded} were already")
    return 0


async def corpus(client: AsyncClient, quiet: bool, name: str, recipe: str, end: float = 0.0) -> Progress:
    """Has the gateway's workers encode a corpus, and shows how far they are.

    NotFound before time.monotonic() is `end` if nothing is in it yet.
    """
    done = Progress(0, 0, 0)
    with progress_bar(quiet) as progress:
        bar = progress.add_task("precompute", total=None)
        async with contextlib.aclosing(client.precompute(name, recipe)) as events:
            async for done in events:
                _check_there(name, done.total, end)
                progress.update(bar, completed=done.done, total=done.total)
                if quiet:
                    print_json({"event": "precompute", **asdict(done)})
    return done


@contextlib.asynccontextmanager
async def _encoders(args: argparse.Namespace) -> AsyncGenerator[Sequence[encoders.Encoder]]:
    """Encoders as the flags say; none: the gateway's workers do it."""
    if not (args.encoders or args.ray):
        yield []
        return
    settings = {key: value for key in ("model", "cache") if (value := getattr(args, key))}
    made = (
        encoders.on_ray(args.ray, args.encoders, args.config, settings)
        if args.ray
        else encoders.local(args.encoders, args.config, settings)
    )
    async with made as own:
        yield own


async def _by_own(
    client: AsyncClient, args: argparse.Namespace, name: str, own: Sequence[encoders.Encoder], end: float
) -> int:
    """Has encoders encode a corpus, and shows how far they are; returns how many chunks were not stored before.

    Raises as `corpus` does.
    """
    now = Progress(0, 0, 0)
    with progress_bar(args.json) as progress:
        bar = progress.add_task("encode", total=None)

        async def batches() -> AsyncGenerator[encoders.Batch]:
            nonlocal now
            async with contextlib.aclosing(client.plan_precompute(name, args.recipe)) as planned:
                async for batch in planned:
                    _check_there(name, batch.total, end)
                    now = Progress(now.done, batch.total, now.skipped)
                    if batch.requests:
                        yield [request.SerializeToString() for request in batch.requests]

        def show(chunks: int, existed: int) -> None:
            nonlocal now
            now = Progress(now.done + chunks, now.total, now.skipped + existed)
            progress.update(bar, completed=now.done, total=now.total)
            if args.json:
                print_json({"event": "encode", **asdict(now)})

        await encoders.encode_all(batches(), own, show)
    return now.done - now.skipped


def _check_there(corpus: str, chunks: int, end: float) -> None:
    """A corpus is made before its first document is stored: raises NotFound if it has no chunks and time.monotonic()
    is not `end` yet; later it is taken for an empty one.
    """
    if not chunks and time.monotonic() < end:
        raise NotFound(f"corpus {corpus!r} has no document yet")
