"""Settings of the cache service: section `kvcache` of the configuration."""

from dataclasses import dataclass
from pathlib import Path

from fusionkv.protos.runtime.settings import setting
from fusionkv.protos.serving import ServingConfig

GIB = 1 << 30
OBJECT_SCHEMES = ("s3", "gs", "az", "file")
# What the field of a response holds.
_MAX_LEASE_MS = (1 << 32) - 1
_SCHEMES = ("redis", "rediss", "unix", "mooncake", *OBJECT_SCHEMES)


@dataclass(frozen=True, slots=True)
class Config(ServingConfig):
    listen: tuple[str, ...] = setting(("127.0.0.1:7070",), "addresses to listen on: host:port or unix:/path")
    data_port: int = setting(
        0,
        "port of the data plane, which carries KV bytes beside gRPC at the hosts of listen, with the same TLS; 0 "
        "chooses one",
        low=0,
        high=65535,
    )
    data_host: str = setting(
        "",
        "host at which clients reach data_port; empty: the host at which they call the service. For services that "
        "share an address, such as that of a Kubernetes Service",
    )
    data_dir: Path = setting(Path(".fusionkv/kvcache"), "directory of the disk tier; a directory serves one process")
    memory_bytes: int = setting(GIB, "size of the memory tier", bytes=True, low=1 << 20)
    disk_bytes: int = setting(16 * GIB, "size of the disk tier; 0 keeps entries in memory only", bytes=True, low=0)
    sync: bool = setting(
        False,
        "flush to the device before a Put is acknowledged, so that entries also survive a power loss. Otherwise they "
        "survive the end of the process, and the disk tier starts empty after a crash of the machine",
    )
    disk_keys: Path | None = setting(
        None,
        "file of keys (64 hex digits a line) that encrypt the disk tier and the remote tier: the first key writes, "
        "all keys read",
    )
    remote_url: str = setting(
        "",
        "remote tier that services share: redis://host:port of a Redis server or of a Redis Cluster node, "
        "mooncake://host:port of a Mooncake Store master, s3://bucket, gs://bucket or az://container of an "
        "object store, or file:///directory of a shared file system; empty uses none",
    )
    remote_password: Path | None = setting(None, "file with the Redis password, unless remote_url contains it")
    remote_ttl_seconds: float = setting(
        86_400.0,
        "seconds after its last use until an entry expires in Redis; Mooncake Store has no expiry, and in an object "
        "store a rule of the bucket decides",
        low=1,
    )
    remote_timeout: float = setting(
        2.0, "maximum seconds for a reply of Redis or of an object store; a call is tried twice", low=0.001
    )
    remote_lookup_ms: int = setting(
        50,
        "maximum milliseconds that a Lookup waits for the remote tier; past it, only local entries are found",
        low=1,
    )
    remote_memory_bytes: int = setting(
        GIB, "memory that this service contributes to a Mooncake Store, beside its own tiers", bytes=True, low=0
    )
    events_endpoint: str = setting(
        "",
        "tcp://address:port or ipc:///path where the service publishes which entries are stored and removed, as KV "
        "events in vLLM's format over ZeroMQ; replays are at the next port. Empty publishes nothing",
    )
    max_entry_bytes: int = setting(GIB, "maximum size of an entry", bytes=True, low=1, high=GIB)
    tenant_share: float = setting(
        1.0,
        "share of the memory tier, and of the disk tier, that one tenant's entries may take: beyond it, its own "
        "coldest entries are evicted for its new ones; 1 sets no limit",
        low=0.001,
        high=1.0,
    )
    max_path: int = setting(256, "maximum number of elements in a path", low=1, high=65535)
    max_puts: int = setting(64, "maximum number of Puts at the same time", low=1)
    max_fetches: int = setting(256, "maximum number of Fetches at the same time", low=1)
    max_leases: int = setting(65536, "maximum number of active leases", low=1)
    lease_ms: int = setting(
        30_000, "milliseconds of a lease when the Lookup names no duration", low=1, high=_MAX_LEASE_MS
    )
    max_lease_ms: int = setting(600_000, "maximum milliseconds of a lease", low=1, high=_MAX_LEASE_MS)
    half_life_seconds: float = setting(
        600.0, "seconds in which the weight of an access halves, for eviction", low=1e-3
    )
    high_watermark: float = setting(
        0.98,
        "used share of the last tier above which the coldest entries are evicted in the background",
        low=0.0,
        high=1.0,
    )
    low_watermark: float = setting(
        0.95, "used share of the last tier at which that eviction stops", low=0.0, high=1.0
    )
    drain_seconds: float = setting(10.0, "seconds that running calls may take to finish after SIGTERM", low=0)

    def __post_init__(self) -> None:
        if self.low_watermark > self.high_watermark:
            raise ValueError(
                f"low_watermark ({self.low_watermark:g}) exceeds high_watermark ({self.high_watermark:g})"
            )
        ServingConfig.__post_init__(self)
        if "/" in self.data_host or "[" in self.data_host or self.data_host.count(":") == 1:
            raise ValueError(
                f"data_host must be a host name or an address, without a port or brackets, not {self.data_host!r}"
            )
        scheme, _, _ = self.remote_url.partition("://")
        if self.remote_url and scheme not in _SCHEMES:
            raise ValueError(f"remote_url must begin with one of {', '.join(f'{scheme}://' for scheme in _SCHEMES)}")
