"""Measures the cost of signatures for a worker: `python -P bench/services/signatures.py [ROUNDS]`.

Signs entries, verifies their signatures and bytes, and fetches them from a cache service: streamed over TCP, and
copied from the service's memory (unix socket). Reports medians of ROUNDS (300), the figures of docs/security.md.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from fusionkv.bench.services.process import running
from fusionkv.fusion_worker.transfer.signatures import Signer
from fusionkv.kvcache_service.client import CacheClient

SIZES = {"1 MiB": 1 << 20, "8 MiB": 8 << 20}
NAMESPACE, SYSTEM = os.urandom(32), os.urandom(32)


async def measure(clients: dict[str, CacheClient], signer: Signer, size: int, rounds: int) -> dict[str, float]:
    """Median seconds by operation. Operations alternate, because a machine's speed varies over time."""
    data, chunk = memoryview(os.urandom(size)), os.urandom(32)
    seconds: dict[str, list[float]] = {}
    clock = time.perf_counter

    def took(what: str, started: float) -> None:
        seconds.setdefault(what, []).append(clock() - started)

    signature = signer.sign(NAMESPACE, [SYSTEM, chunk], b"", data, tokens=1, base=0)
    first = next(iter(clients.values()))
    await first.put(
        namespace=NAMESPACE, path=[SYSTEM, chunk], tokens=1, base=0, data=data, signature=signature, timeout=30
    )
    buffer = memoryview(bytearray(size))
    for _ in range(rounds):
        started = clock()
        signer.sign(NAMESPACE, [SYSTEM, chunk], b"", data, tokens=1, base=0)
        took("sign", started)
        for name, client in clients.items():
            found = await client.lookup(NAMESPACE, [(SYSTEM, ()), (chunk, ())], timeout=30)
            entry = found.hits[1].entry
            assert entry is not None
            started = clock()
            assert not signer.fault(NAMESPACE, SYSTEM, chunk, False, entry)
            took("found", started)
            started = clock()
            await client.fetch(entry, buffer, timeout=30)
            took(name, started)
            started = clock()
            await signer.verify(client, entry, buffer)
            took("bytes", started)
            await client.release(found.lease)
    return {name: median(found) for name, found in seconds.items()}


async def run(rounds: int) -> None:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        keys = Path(folder) / "signing.keys"
        keys.write_text(os.urandom(32).hex())
        signer = Signer(keys)
        flags = ("--data-dir", f"{folder}/data", "--memory-bytes", "64MiB", "--disk-bytes", "0")
        service = running("kvcache_service", *flags, listen=f"127.0.0.1:0,unix:{folder}/s")
        addresses, _ = stack.enter_context(service)
        clients = {how: CacheClient(at) for how, at in zip(("streamed", "from memory"), addresses, strict=True)}
        for title, size in SIZES.items():
            took = await measure(clients, signer, size, rounds)
            us = {what: f"{1e6 * seconds:.0f} us" for what, seconds in took.items()}
            print(f"{title}: signing {us['sign']}; verifying names {us['found']}, bytes {us['bytes']}")
            for how in clients:
                part = took["found"] + took["bytes"]
                whole = took[how] + part
                print(
                    f"  fetch, {how}: {us[how]}, and verified {1e6 * whole:.0f} us ({100 * part / whole:.0f}% of it)"
                )
        for client in clients.values():
            await client.close()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]) if len(sys.argv) > 1 else 300))
