"""The process of the cache service: `python -m fusionkv.kvcache_service`."""

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import socket
import stat
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fusionkv.kvcache_service.config import OBJECT_SCHEMES, Config
from fusionkv.kvcache_service.data_plane.listener import DataPlane
from fusionkv.kvcache_service.data_plane.messages import socket_path
from fusionkv.kvcache_service.local import FileServer, arena_path, segments_path, share_memory, share_segments
from fusionkv.kvcache_service.metrics import observe_remote, observe_tiers
from fusionkv.kvcache_service.remote.sharing import Sharing
from fusionkv.kvcache_service.remote.tier import RemoteEngine, RemoteTier
from fusionkv.kvcache_service.servicer import SERVICE, KVCacheServicer, handler
from fusionkv.kvcache_service.store.store import Store
from fusionkv.kvcache_service.store.upkeep import sweep
from fusionkv.kvcache_service.tiers.base import Tier
from fusionkv.kvcache_service.tiers.disk import DiskTier, readable_files
from fusionkv.kvcache_service.tiers.memory import MemoryTier
from fusionkv.kvcache_service.tiers.sealed_disk import DiskKeys, SealedDiskTier, check_key
from fusionkv.kvcache_service.tiers.segments import SEGMENT_BYTES
from fusionkv.protos.observe import handshakes, telemetry
from fusionkv.protos.runtime import process, rpc, settings

if TYPE_CHECKING:
    from fusionkv.kvcache_service.events import EventPublisher

log = logging.getLogger(__name__)
NAME = "fusionkv-kvcache"
# Open files beside those of the disk tier: about 25 of an idle service, and connections.
_OTHER_FILES = 48
# Until a service serves that has not loaded its index yet: what a hundred thousand entries take.
_LOAD_SECONDS = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    process.open_streams()
    process.end_when_told()
    process.end_when_interrupted()
    parser = argparse.ArgumentParser(prog="fusionkv-kvcache", description=__doc__)
    parser.add_argument("--config", type=Path, metavar="PATH", help="TOML file; its table [kvcache] is read")
    settings.add_flags(parser, Config)
    arguments = vars(parser.parse_args(argv))
    try:
        config = settings.load(Config, "kvcache", file=arguments.pop("config"), flags=arguments)
    except settings.SettingsError as error:
        parser.error(str(error))
    try:
        process.share_heaps()
        check_files(config)
        config.check_ports()
        hosts = (address.rpartition(":")[0] for address in config.listen if not socket_path(address))
        process.check_ports([f"{host}:{config.data_port}" for host in hosts], "--data-port")
        process.check_sockets([f"unix:{beside}" for beside in filter(None, map(socket_path, config.listen))])
        telemetry.attach(NAME, config.metrics_listen)
        if config.tls_cert:
            handshakes.attach()
        process.keep_freed_memory()
        asyncio.run(run(config))
    except (OSError, ValueError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 1
    finally:
        telemetry.detach()
    return 0


def check_files(config: Config) -> None:
    """Raises the soft limit on open files to the hard one: a disk tier keeps every segment file open.

    Raises OSError if that is too low for a full disk tier.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    needed = -(-config.disk_bytes // SEGMENT_BYTES) * (2 if config.disk_keys else 1) + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise OSError(
            f"only {hard} open files are allowed, and a full disk tier needs {needed}: raise the limit (ulimit -n, "
            "or LimitNOFILE of systemd), or lower disk_bytes"
        )


def make_store(config: Config) -> Store:
    """Creates the store with the configured tiers. Raises OSError if its directory or its keys cannot be used."""
    tiers: list[Tier] = [MemoryTier(config.memory_bytes)]
    if config.disk_bytes:
        keys = DiskKeys(config.disk_keys) if config.disk_keys else None
        check_key(config.data_dir, keys)
        place, sync = (config.data_dir, config.disk_bytes), config.sync
        tiers.append(SealedDiskTier(*place, keys, sync=sync) if keys else DiskTier(*place, sync=sync))
    return Store(config, tiers)


def make_sharing(config: Config, store: Store) -> Sharing:
    """Creates the access to the configured remote tier. Only an object store is connected to.

    Raises OSError if the URL, a file or a bucket cannot be used, or a package is not installed.
    """
    scheme = config.remote_url.partition("://")[0]
    extra = "mooncake" if scheme == "mooncake" else "object-store" if scheme in OBJECT_SCHEMES else "cache"
    try:
        engine = _make_engine(config, extra)
    except ImportError as error:
        raise OSError(f"remote_url needs a package: pip install 'fusionkv[{extra}]' ({error})") from error
    except ValueError as error:
        raise OSError(f"remote_url can't be used: {error}") from error
    sharing = Sharing(store, RemoteTier(engine, DiskKeys(config.disk_keys) if config.disk_keys else None))
    observe_remote(lambda: (sharing.reachable, len(sharing.write_backs)))
    return sharing


def _make_engine(config: Config, extra: str) -> RemoteEngine:
    """Imports the package of an extra only if it is used."""
    if extra == "mooncake":
        from fusionkv.kvcache_service.remote.mooncake_engine import MooncakeEngine

        return MooncakeEngine(config.remote_url, config.remote_memory_bytes)
    if extra == "object-store":
        from fusionkv.kvcache_service.remote.object_engine import ObjectEngine

        return ObjectEngine(config.remote_url, timeout=config.remote_timeout)
    from fusionkv.kvcache_service.remote.redis_engine import RedisEngine

    ttl, timeout = config.remote_ttl_seconds, config.remote_timeout
    return RedisEngine(config.remote_url, ttl=ttl, timeout=timeout, password=config.remote_password)


def make_events(config: Config, store: Store) -> "EventPublisher | None":
    """Publishes changes of the store, if configured. Raises OSError if that is impossible."""
    if not config.events_endpoint:
        return None
    try:
        from fusionkv.kvcache_service.events import EventPublisher
    except ImportError as error:
        raise OSError(f"events_endpoint needs a package: pip install 'fusionkv[kv-events]' ({error})") from error
    # A topic as llm-d reads it: the pod, and what would be the model.
    publisher = store.entries.listener = EventPublisher(config.events_endpoint, f"kv@{socket.gethostname()}@fusionkv")
    return publisher


async def run(config: Config) -> None:
    """Serves until SIGTERM, drains, and closes the store.

    Raises OSError if an address or the data directory is in use, or cannot be used.
    """
    for address in config.listen:
        remove_stale_socket(address)
    store = make_store(config)
    events = make_events(config, store)
    loading = asyncio.create_task(store.open())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LOAD_SECONDS):
            await asyncio.shield(loading)
    observe_tiers(lambda: [(tier.name, tier.used_bytes, tier.capacity_bytes) for tier in store.residents.tiers])
    background = [asyncio.create_task(_after(loading, partial(sweep, store)))]
    file_servers = start_file_servers(config, store)
    sharing: Sharing | None = None
    try:
        if config.remote_url:
            sharing = make_sharing(config, store)
            background.append(asyncio.create_task(_after(loading, sharing.run)))
        servicer = KVCacheServicer(store, sharing)
        plane = DataPlane(
            f"{NAME}-data", servicer, config.listen, config.data_port, config.data_host, config.server_tls
        )
        servicer.admit = plane.admit
        on_stop = sharing.write_backs.flush if sharing else None
        failure = asyncio.create_task(_after(loading, asyncio.Event().wait))
        served = rpc.Served({SERVICE.full_name: handler(servicer)}, beside=[plane], failure=failure, on_stop=on_stop)
        await rpc.serve(NAME, config, served)
    finally:
        for file_server in file_servers:
            file_server.close()
        for task in background:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):  # `serve` raises what loading raised
                await task
        if sharing is not None:
            await sharing.close()
        if events is not None:
            await asyncio.to_thread(events.close)
        # Until the index is loaded, nothing on the disk was changed, and nothing must be closed.
        if store.ready.is_set():
            await store.close()


async def _after(loading: "asyncio.Task[None]", work: Callable[[], Awaitable[object]]) -> None:
    """Runs `work` once the index is loaded. Raises OSError if it cannot be loaded."""
    await asyncio.shield(loading)
    await work()


def start_file_servers(config: Config, store: Store) -> list[FileServer]:
    """Shares memory tier and segment files beside every unix socket. If that fails, bytes are streamed."""
    file_servers: list[FileServer] = []
    memory = next(tier for tier in store.residents.tiers if isinstance(tier, MemoryTier))
    files = readable_files(store.residents.tiers)
    for path in filter(None, map(arena_path, config.listen)):
        try:
            file_servers.append(share_memory(path, memory.arena, memory.capacity_bytes, memory.file))
            if files is not None:
                file_servers.append(share_segments(segments_path(path), memory.arena, files.segments.open))
        except OSError as error:
            log.warning("can't share memory and files beside %s, bytes are streamed: %s", path, error)
    return file_servers


def remove_stale_socket(address: str) -> None:
    """Removes the socket file of a process that has ended; gRPC itself would also replace that of a live one.

    Raises OSError if a process accepts connections there, or the file is not a socket.
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
        probe.setblocking(False)  # a process that is stopped accepts nothing, and then lets others wait
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass
    raise OSError(f"can't listen on {address}: another process serves there")


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips the interpreter's shutdown, which waits for threads: calls of a remote tier that hangs would block it for
    # minutes. Everything persistent is on disk.
    os._exit(status)
