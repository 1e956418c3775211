"""`fusionkv encode`: encodes whole corpora ahead of time, with the gateway's workers or with separate encoders."""

import argparse
import contextlib
import functools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict

from fusionkv.fusion_worker.encode import encoders
from fusionkv.gateway.cli import connect, shown
from fusionkv.gateway.cli.connect import UsageError
from fusionkv.gateway.cli.console import print_json, progress, retry_until_available
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.gateway.client.results import Progress
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.runtime.errors import NotFound


async def run(args: argparse.Namespace) -> int:
    """Encodes corpora ahead of time, one after another; with --index, only the corpus of that number."""
    if args.index is not None and not 0 <= args.index < len(args.corpora):
        raise UsageError(f"--index is {args.index}, but there are {len(args.corpora)} corpora, numbered from 0")
    if not (args.encoders or args.ray) and (args.config or args.model or args.cache):
        raise UsageError("--config, --model and --cache apply to encoders only: add --encoders or --ray")
    async with connect.client(args) as client, _encoders(args) as own_encoders:
        for name in args.corpora if args.index is None else [args.corpora[args.index]]:
            # Per corpus: encoding the corpora before it may have taken hours.
            deadline = Deadline.after(args.wait)
            stored = 0
            if own_encoders:
                encoding = functools.partial(_encode_with, client, args, name, own_encoders, deadline)
                stored = await retry_until_available(encoding, deadline)
            # After encoders, this call finds the KV that they stored.
            precompute = functools.partial(corpus, client, args.json, name, args.recipe, deadline)
            done = await retry_until_available(precompute, deadline)
            again = done.done - done.skipped
            if own_encoders and again:
                shown.tell(
                    f"the gateway's workers did not find {again} of the {done.total} chunks that the encoders "
                    "stored, and encoded them again: do their cache services share a tier (docs/encoding.md)?"
                )
            if not args.json:
                encoded = stored if own_encoders else again
                print(f"{name}: {encoded} chunks encoded, {done.done - encoded} already stored")
    return 0


async def corpus(client: AsyncClient, quiet: bool, name: str, recipe: str, deadline: Deadline) -> Progress:
    """Encodes a corpus with the gateway's workers, and shows the progress.

    Raises NotFound if the corpus is still empty at the deadline.
    """
    done = Progress(0, 0, 0)
    with progress(quiet) as show:
        async with contextlib.aclosing(client.precompute(name, recipe)) as events:
            async for done in events:
                _check_there(name, done.total, deadline)
                show(f"{name}: encoding", done.done, done.total)
                if quiet:
                    print_json({"event": "precompute", **asdict(done)})
    return done


def _encoders(args: argparse.Namespace) -> contextlib.AbstractAsyncContextManager[Sequence[encoders.Encoder]]:
    """Starts the encoders that the flags describe; none if the gateway's workers encode."""
    overrides = {key: value for key in ("model", "cache") if (value := getattr(args, key))}
    if args.ray:
        return encoders.on_ray(args.ray, args.encoders, args.config, overrides)
    return encoders.local(args.encoders, args.config, overrides) if args.encoders else contextlib.nullcontext([])


async def _encode_with(
    client: AsyncClient,
    args: argparse.Namespace,
    name: str,
    own_encoders: Sequence[encoders.Encoder],
    deadline: Deadline,
) -> int:
    """Encodes a corpus with encoders, and shows the progress; returns the number of chunks that are newly stored.

    Raises as `corpus`.
    """
    now = Progress(0, 0, 0)
    with progress(args.json) as bar:

        async def batches() -> AsyncGenerator[encoders.Batch]:
            nonlocal now
            async with contextlib.aclosing(client.plan_precompute(name, args.recipe)) as planned:
                async for batch in planned:
                    _check_there(name, batch.total, deadline)
                    now = Progress(now.done, batch.total, now.skipped)
                    if batch.requests:
                        yield [request.SerializeToString() for request in batch.requests]

        def show(chunks: int, existed: int) -> None:
            nonlocal now
            now = Progress(now.done + chunks, now.total, now.skipped + existed)
            bar(f"{name}: encoding", now.done, now.total)
            if args.json:
                print_json({"event": "encode", **asdict(now)})

        await encoders.encode_all(batches(), own_encoders, show)
    return now.done - now.skipped


def _check_there(corpus: str, chunks: int, deadline: Deadline) -> None:
    """Raises NotFound if a corpus has no chunks before the deadline.

    A corpus is created before its first document is stored; after the deadline, it counts as an empty corpus.
    """
    if not chunks and not deadline.passed:
        raise NotFound(f"corpus {corpus!r} has no documents yet")
