"""The process: `python -m fusionkv.kvcache_service`."""

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fusionkv.kvcache_service.config import Config
from fusionkv.kvcache_service.local.arena import ShmServer, path_of
from fusionkv.kvcache_service.local.segments import FdServer, readable_files, segments_of
from fusionkv.kvcache_service.metrics import observe_shared_index, observe_tiers
from fusionkv.kvcache_service.servicer import SERVICE, KVCacheServicer, handler
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.tiers.base import Tier
from fusionkv.kvcache_service.tiers.disk import DiskTier
from fusionkv.kvcache_service.tiers.disk_copies import DiskCopies
from fusionkv.kvcache_service.tiers.disk_keys import DiskKeys
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from fusionkv.kvcache_service.tiers.sealed_disk import SealedDiskTier
from fusionkv.protos.observe import telemetry
from fusionkv.protos.runtime import frames, process, rpc, settings

if TYPE_CHECKING:
    from fusionkv.kvcache_service.cluster.replica import Replica

log = logging.getLogger(__name__)
NAME = "fusionkv-kvcache"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fusionkv.kvcache_service", description=__doc__)
    parser.add_argument("--config", type=Path, metavar="PATH", help="TOML file; its table [kvcache] is read")
    settings.add_flags(parser, Config)
    arguments = vars(parser.parse_args(argv))
    try:
        config = settings.load(Config, "kvcache", file=arguments.pop("config"), flags=arguments)
    except settings.SettingsError as error:
        parser.error(str(error))
    try:
        process.check_files()
        telemetry.attach(NAME, config.metrics_listen)
        frames.keep_freed_memory()
        asyncio.run(run(config))
    except (OSError, ValueError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 1
    finally:
        telemetry.detach()
    return 0


def make_store(config: Config) -> Store:
    """The store with the tiers that the configuration asks for.

    Raises:
        OSError: the data directory or its keys can't be used, or another process uses it; Redis can't be reached.
    """
    tiers: list[Tier] = [MemoryTier(config.memory_bytes)]
    if config.disk_bytes and config.remote_url:
        tiers.append(DiskCopies(config.data_dir, config.disk_bytes))
    elif config.disk_bytes:
        place, keys = (config.data_dir, config.disk_bytes), config.disk_keys
        tiers.append(
            SealedDiskTier(*place, DiskKeys(keys), sync=config.sync) if keys else DiskTier(*place, sync=config.sync)
        )
    if config.remote_url:
        tiers.append(make_remote(config))
    return Store(config, tiers)


def make_remote(config: Config) -> Tier:
    """The tier in Redis. Raises OSError as `make_store` does."""
    try:
        from fusionkv.kvcache_service.tiers.remote import RemoteTier
    except ImportError as error:
        raise OSError(f"remote_url needs redis: pip install 'fusionkv[cache]' ({error})") from error
    password = config.redis_password.read_text().strip() if config.redis_password else None
    ttl, timeout = config.remote_ttl_seconds, config.remote_timeout
    return RemoteTier(
        config.remote_url,
        config.remote_bytes,
        space=config.remote_name or socket.gethostname(),
        ttl=ttl,
        timeout=timeout,
        password=password,
    )


def make_replica(config: Config, store: Store) -> "Replica":
    """This service among those that share the index in Redis.

    Raises:
        OSError: the URL can't be used, redis is not installed, or a file of the configuration can't be read.
    """
    try:
        from fusionkv.kvcache_service.cluster.replica import Replica
        from fusionkv.kvcache_service.cluster.shared_index import SharedIndex
    except ImportError as error:
        raise OSError(f"redis_url needs redis: pip install 'fusionkv[cache]' ({error})") from error
    try:
        shared = SharedIndex(
            config.redis_url,
            cluster=config.redis_cluster,
            password=config.redis_password,
            timeout=config.redis_timeout_ms / 1000,
            expiry=config.redis_expiry_seconds,
        )
    except ValueError as error:
        raise OSError(f"redis_url can't be used: {error}") from error
    replica = Replica(store, shared, config.client_tls())
    observe_shared_index(lambda: ((stats := replica.stats()).members * stats.reachable, stats.waiting))
    return replica


async def run(config: Config) -> None:
    """Serves until SIGTERM, drains, closes the store.

    Raises:
        OSError: an address or the data directory is in use, or can't be used.
    """
    for address in config.listen:
        remove_stale_socket(address)
    store = make_store(config)
    await store.open()
    observe_tiers(lambda: [(tier.name, tier.used_bytes, tier.capacity_bytes) for tier in store.residents.tiers])
    sweeper = asyncio.create_task(store.sweep())
    doorways = open_doorways(config, store)
    try:
        replica = make_replica(config, store) if config.redis_url else None
        await rpc.serve(
            NAME,
            config.listen,
            {SERVICE.full_name: handler(KVCacheServicer(store, config, replica))},
            drain_seconds=config.drain_seconds,
            on_start=replica.start if replica else None,
            on_stop=replica.leave if replica else None,
            on_drain=replica.close if replica else None,
            tls=config.server_tls,
        )
    finally:
        for doorway in doorways:
            doorway.close()
        sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sweeper
        await store.close()


def open_doorways(config: Config, store: Store) -> list[ShmServer | FdServer]:
    """Hands memory tier and segment files over beside every unix socket; where that can't be, bytes are streamed."""
    doorways: list[ShmServer | FdServer] = []
    paths = [path for address in config.listen if (path := path_of(address)) is not None]
    for tier in store.residents.tiers:
        if not isinstance(tier, MemoryTier):
            continue
        for path in paths:
            try:
                doorways.append(ShmServer(path, tier.arena, tier.capacity_bytes, tier.file))
            except OSError as error:
                log.warning("can't hand memory over at %s, its bytes are streamed: %s", path, error)
                continue
            if (files := readable_files(store.residents.tiers)) is not None:
                try:
                    doorways.append(FdServer(segments_of(path), tier.arena, files))
                except OSError as error:
                    log.warning("can't hand files over beside %s, their bytes are streamed: %s", path, error)
    return doorways


def remove_stale_socket(address: str) -> None:
    """Removes the socket file of a process that is gone; gRPC would take over that of a live one unasked.

    Raises:
        OSError: a process answers there, or the file is something else.
    """
    if not address.startswith("unix:"):
        return
    path = address.removeprefix("unix:")
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(f"can't listen on {address}: the file is no socket")
    except FileNotFoundError:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise OSError(f"can't listen on {address}: another process serves there")


if __name__ == "__main__":
    sys.exit(main())
