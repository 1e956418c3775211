"""What signatures cost a worker: `python -P bench/signatures.py [ROUNDS]`.

It signs and verifies entries, and fetches entries from a cache service process that it starts: streamed over TCP,
where every checksum is verified anyway, and from the service's memory over a unix socket, where it is for signatures
alone. Medians of ROUNDS (300). The figures of docs/security.md.
"""

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from fusionkv.fusion_worker.engine.signatures import Signer
from fusionkv.kvcache_service.client import CacheClient, Hit
from fusionkv.protos.checksum import checksum

SIZES = {"1 MiB": 1 << 20, "8 MiB": 8 << 20}
NAMESPACE, SYSTEM = os.urandom(32), os.urandom(32)
_CALLS = 1000


@contextlib.contextmanager
def service(folder: Path) -> Iterator[tuple[str, str]]:
    """The addresses of a cache service: TCP and a unix socket."""
    listen = f"127.0.0.1:0,unix:{folder}/s"
    flags = ("--listen", listen, "--data-dir", str(folder / "data"), "--memory-bytes", "64MiB", "--disk-bytes", "0")
    argv = [sys.executable, "-P", "-m", "fusionkv.kvcache_service", *flags]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        serving = next(filter(None, (re.search(r"serving on (\S+) (\S+)", line) for line in process.stdout)))
        try:
            yield serving[1], serving[2]
        finally:
            process.terminate()


def own_cost(signer: Signer, hit: Hit, chunk: bytes, rounds: int) -> tuple[float, float]:
    """Microseconds of signing and of verifying an entry."""
    entry = hit.entry
    assert entry is not None
    signed, verified = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(_CALLS):
            signer.sign(NAMESPACE, [SYSTEM, chunk], b"", entry.checksum, size=entry.size, tokens=1, base=0)
        middle = time.perf_counter()
        for _ in range(_CALLS):
            assert not signer.fault(NAMESPACE, SYSTEM, chunk, False, entry)
        signed.append(middle - started)
        verified.append(time.perf_counter() - middle)
    return 1e6 * median(signed) / _CALLS, 1e6 * median(verified) / _CALLS


async def fetch_seconds(clients: dict[str, CacheClient], chunk: bytes, rounds: int) -> dict[str, float]:
    """By client; they take turns, since a machine is not equally fast all the time."""
    seconds: dict[str, list[float]] = {name: [] for name in clients}
    for _ in range(rounds):
        for name, client in clients.items():
            found = await client.lookup(NAMESPACE, [(SYSTEM, ()), (chunk, ())], timeout=30)
            entry = found.hits[1].entry
            assert entry is not None
            buffer = memoryview(bytearray(entry.size))
            started = time.perf_counter()
            await client.fetch(entry, buffer, timeout=30)
            seconds[name].append(time.perf_counter() - started)
            await client.release(found.lease)
    return {name: median(found) for name, found in seconds.items()}


async def run(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name, service(Path(name)) as (tcp, unix):
        keys = Path(name) / "signing.keys"
        keys.write_text(os.urandom(32).hex())
        signer = Signer(keys)
        clients = {
            "streamed": CacheClient(tcp),
            "memory": CacheClient(unix),  # as without signing_keys
            "memory, verified": CacheClient(unix, verify_memory=True),
        }
        for title, size in SIZES.items():
            data, chunk = memoryview(os.urandom(size)), os.urandom(32)
            path, numbers = [SYSTEM, chunk], {"tokens": 1, "base": 0}
            signature = signer.sign(NAMESPACE, path, b"", checksum(data), size=size, **numbers)
            more = {"namespace": NAMESPACE, "path": path, **numbers}
            await clients["streamed"].put(data=data, sign=lambda _, made=signature: made, timeout=30, **more)
            hit = (await clients["streamed"].lookup(NAMESPACE, [(SYSTEM, ()), (chunk, ())], timeout=30)).hits[1]
            signed, verified = own_cost(signer, hit, chunk, max(3, rounds // 10))
            print(f"{title}: signing {signed:.1f} us, verifying {verified:.1f} us an entry")
            found = await fetch_seconds(clients, chunk, rounds)
            for name, seconds in found.items():
                share = f", of which the signature's part is {verified / 1e4 / (seconds + verified / 1e6):.2f}%"
                print(f"  fetch, {name}: {1e3 * seconds:.2f} ms{share if name != 'memory' else ''}")
        for client in clients.values():
            await client.close()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]) if len(sys.argv) > 1 else 300))
