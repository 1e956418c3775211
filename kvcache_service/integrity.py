"""What a stopped cache service left on its disk, checked: `python -m fusionkv.kvcache_service.integrity`."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.kvcache_service.tiers.memory import MemoryTier


async def check(data_dir: Path, disk_bytes: int) -> int:
    """Opens a disk tier as a start does; gives the number of its entries.

    Raises:
        OSError: the directory can't be used, or a service uses it.
        AssertionError: index, entries and places do not agree, or something is held.
    """
    store = Store(
        Config(data_dir=data_dir, disk_bytes=disk_bytes), [MemoryTier(1 << 20), DiskTier(data_dir, disk_bytes)]
    )
    await store.open()
    try:
        store.check_integrity()
        store.residents.check_idle()
        return len(store.residents)
    finally:
        await store.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fusionkv.kvcache_service.integrity", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--disk-bytes", type=int, required=True, help="of the disk tier, as the service had it")
    options = parser.parse_args(argv)
    print(asyncio.run(check(options.data_dir, options.disk_bytes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
