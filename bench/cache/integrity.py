"""Checks a cache service's store, once the service is stopped: `python -m fusionkv.bench.cache.integrity`."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from fusionkv.kvcache_service.__main__ import make_store
from fusionkv.kvcache_service.config import Config


async def check(data_dir: Path, disk_bytes: int) -> int:
    """Opens a disk tier as a start does, checks it, and returns the number of entries.

    Raises:
        OSError: the directory cannot be used, or a service is using it.
        AssertionError: something is wrong.
    """
    store = make_store(Config(data_dir=data_dir, disk_bytes=disk_bytes, memory_bytes=1 << 20))
    await store.open()
    try:
        store.check_integrity(idle=True)
        return len(store.residents)
    finally:
        await store.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fusionkv.bench.cache.integrity", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument(
        "--disk-bytes", type=int, required=True, help="size of the disk tier, as configured in the service"
    )
    options = parser.parse_args(argv)
    print(asyncio.run(check(options.data_dir, options.disk_bytes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
