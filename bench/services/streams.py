"""Opens many streams at a gateway at once: how many are answered, shed or refused, and at what cost in memory.

Run `python -P bench/services/streams.py 10000`.

Starts a cache service, a worker with a reference model, and a gateway; then a second gateway whose limits let all
streams wait. A second argument replaces the first gateway's limit. The figures of docs/journal/reliability.md.
"""

import asyncio
import collections
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

from fusionkv.bench.services.process import MODEL, Footing, running
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.gateway.client.results import Summary
from fusionkv.protos.runtime.errors import ServiceError

CORPUS, PAGES = "streams", 20
# Streams per connection, so that 10,000 streams do not need as many open files.
_STREAMS_EACH = 250
_WATCH_SECONDS = 0.1
# Deadline of each stream in seconds, long enough for all that are admitted.
DEADLINE = 240.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of concurrent streams. Megabytes and files are the gateway's; seconds are the callers'."""

    streams: int
    statuses: dict[str, int]
    refused_without_hint: int
    refused_p50_seconds: float
    refused_last_seconds: float
    answered_last_seconds: float
    megabytes_before: float
    megabytes_most: float
    megabytes_after: float
    files_before: int
    files_most: int
    files_after: int


async def load(address: str, pid: int, streams: int, deadline: float = DEADLINE) -> Outcome:
    """Asks `streams` questions at once. pid: the gateway's process."""
    clients = [AsyncClient(address, timeout=deadline) for _ in range(-(-streams // _STREAMS_EACH))]
    for client in clients:
        await client.stats()
    before = most = Footing.of(pid)
    statuses: collections.Counter[str] = collections.Counter()
    refused: list[float] = []
    answered: list[float] = []
    unhinted = 0
    began = time.perf_counter()

    async def one(number: int) -> None:
        nonlocal unhinted
        options: dict[str, Any] = {"recipe": "full_reuse", "top_k": 2, "max_tokens": 2}
        try:
            events = clients[number % len(clients)].stream(CORPUS, f"page {number % PAGES}?", **options)
            last = [event async for event in events][-1]
        except ServiceError as error:
            statuses[error.status.name] += 1
            refused.append(time.perf_counter() - began)
            unhinted += error.retry_after is None
        else:
            assert isinstance(last, Summary)
            statuses["DEGRADED" if last.degraded else "OK"] += 1
            answered.append(time.perf_counter() - began)

    async def watch() -> None:
        nonlocal most
        while True:
            now = Footing.of(pid)
            most = Footing(max(most.bytes, now.bytes), max(most.files, now.files))
            await asyncio.sleep(_WATCH_SECONDS)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*map(one, range(streams)))
    watching.cancel()
    for client in clients:
        await client.close()
    after = Footing.of(pid)
    refused.sort()
    megabytes = [round(each.bytes / (1 << 20), 1) for each in (before, most, after)]
    return Outcome(
        streams=streams,
        statuses=dict(statuses),
        refused_without_hint=unhinted,
        refused_p50_seconds=round(refused[len(refused) // 2], 2) if refused else 0.0,
        refused_last_seconds=round(max(refused, default=0.0), 2),
        answered_last_seconds=round(max(answered, default=0.0), 2),
        megabytes_before=megabytes[0],
        megabytes_most=megabytes[1],
        megabytes_after=megabytes[2],
        files_before=before.files,
        files_most=most.files,
        files_after=after.files,
    )


async def fill(address: str) -> None:
    """Ingests a small corpus and asks a question, as a warm-up."""
    async with AsyncClient(address, timeout=DEADLINE) as client:
        for number in range(PAGES):
            await client.ingest(CORPUS, f"{number}.txt", f"Report on page {number}: the code is {100 + number}.")
        await client.ask(CORPUS, "page 1?", recipe="full_reuse", top_k=2, max_tokens=2)


async def _run(streams: int, places: int) -> None:
    every = ("--max-requests", str(streams))
    limits = {"as they come": ("--max-requests", str(places)) if places else (), "all may wait": every}
    with tempfile.TemporaryDirectory() as folder:
        model = ("--model", str(MODEL), "--threads", "1", "--max-queue", str(streams))
        with (
            running("kvcache_service", "--data-dir", f"{folder}/kvcache") as ((cache,), _),
            running("fusion_worker", "--cache", cache, *model) as ((worker,), _),
        ):
            for name, flags in limits.items():
                own = ("--workers", worker, "--data-dir", f"{folder}/{name}", *flags)
                with running("gateway", *own) as ((gateway,), pid):
                    await fill(gateway)
                    found = await load(gateway, pid, streams)
                print(json.dumps({"limits": name, **asdict(found)}), flush=True)


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    streams, places = (*map(int, sys.argv[1:]), 0)[:2]
    asyncio.run(_run(streams, places))


if __name__ == "__main__":
    main()
