"""Settings of the cache service: section `kvcache` of the configuration."""

from dataclasses import dataclass
from pathlib import Path

from fusionkv.protos.runtime.settings import setting
from fusionkv.protos.runtime.tls import ServerTLS

GIB = 1 << 30
_SCHEMES = ("redis", "rediss", "unix", "mooncake")


@dataclass(frozen=True, slots=True)
class Config:
    listen: tuple[str, ...] = setting(
        ("127.0.0.1:7070",), "addresses to serve on: host:port or unix:/path, several with commas"
    )
    data_dir: Path = setting(Path(".fusionkv/kvcache"), "directory of the disk tier; one process for each")
    memory_bytes: int = setting(GIB, "size of the memory tier", bytes=True, low=1 << 20)
    disk_bytes: int = setting(16 * GIB, "size of the disk tier; 0 keeps entries in memory only", bytes=True, low=0)
    sync: bool = setting(
        False,
        "flush to the device before a Put is acknowledged: entries then survive a power loss too; without it they "
        "survive any end of the process, and the disk tier starts empty after a crash of the machine",
    )
    disk_keys: Path | None = setting(
        None,
        "keys (64 hex digits a line) that the disk tier and the remote tier are encrypted with: the first writes, "
        "all read",
    )
    remote_url: str = setting(
        "",
        "tier that services share: redis://host:port of a Redis or of a node of a Redis Cluster, or "
        "mooncake://host:port of the master of a Mooncake Store; empty: this service works alone",
    )
    remote_password: Path | None = setting(None, "file with the password of Redis, if remote_url does not hold it")
    remote_ttl_seconds: float = setting(
        86_400.0, "time after its last use in which Redis forgets an entry; a Mooncake Store knows no time", low=1
    )
    remote_timeout: float = setting(2.0, "seconds for one answer of Redis", low=0.001)
    remote_lookup_ms: int = setting(
        50, "longest wait for the remote tier in a Lookup; past it, only own entries are found", low=1
    )
    remote_segment_bytes: int = setting(
        GIB, "memory that this service lends to a Mooncake Store, beside its own tiers", bytes=True, low=0
    )
    max_entry_bytes: int = setting(GIB, "largest entry", bytes=True, low=1, high=GIB)
    max_path: int = setting(256, "most elements of a path", low=1, high=65535)
    max_puts: int = setting(64, "most Puts at once", low=1)
    max_fetches: int = setting(256, "most Fetches at once", low=1)
    max_leases: int = setting(65536, "most leases at once", low=1)
    lease_ms: int = setting(30_000, "lease of a Lookup that asks for none", low=1)
    max_lease_ms: int = setting(600_000, "longest lease", low=1)
    half_life_seconds: float = setting(600.0, "time in which the weight of an access halves", low=1e-3)
    high_watermark: float = setting(
        0.98, "used share of the last tier above which the coldest entries go in the background", low=0.0, high=1.0
    )
    low_watermark: float = setting(0.95, "used share of the last tier at which that ends", low=0.0, high=1.0)
    drain_seconds: float = setting(10.0, "time for calls in flight to end after SIGTERM", low=0)
    metrics_listen: str = setting(
        "", "host:port of a Prometheus scrape endpoint (/metrics), without TLS or token; empty serves none"
    )
    tls_cert: Path | None = setting(None, "certificate chain (PEM): ports then speak TLS")
    tls_key: Path | None = setting(None, "private key (PEM) of tls_cert")
    tls_client_ca: Path | None = setting(None, "CAs (PEM): callers must then show a certificate of one of them")

    def __post_init__(self) -> None:
        ServerTLS.of(self.tls_cert, self.tls_key, self.tls_client_ca)
        scheme, _, _ = self.remote_url.partition("://")
        if self.remote_url and scheme not in _SCHEMES:
            raise ValueError(f"remote_url begins with one of {', '.join(f'{scheme}://' for scheme in _SCHEMES)}")

    @property
    def server_tls(self) -> ServerTLS | None:
        return ServerTLS.of(self.tls_cert, self.tls_key, self.tls_client_ca)
