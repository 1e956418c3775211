"""Settings of the cache service: section `kvcache` of the configuration."""

import re
from dataclasses import dataclass
from pathlib import Path

from fusionkv.protos.runtime.settings import setting
from fusionkv.protos.runtime.tls import ClientTLS, ServerTLS

GIB = 1 << 30
_NAME = re.compile(r"[A-Za-z0-9._-]{0,128}")


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
        None, "keys (64 hex digits a line) that the disk tier is encrypted with: the first writes, all read"
    )
    remote_url: str = setting(
        "", "redis://host:port of a Redis that keeps entries below memory and disk; empty: the disk tier is the last"
    )
    remote_bytes: int = setting(4 * GIB, "size of the tier in that Redis", bytes=True, low=1 << 20)
    remote_name: str = setting("", "its name there, of this service alone; empty takes the machine's (a pod's) name")
    remote_ttl_seconds: float = setting(86_400.0, "time after the last access in which Redis forgets an entry", low=1)
    remote_timeout: float = setting(2.0, "seconds for one answer of that Redis", low=0.001)
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
    redis_url: str = setting(
        "", "redis://host:port of the index that several services share; empty: this service works alone"
    )
    redis_cluster: bool = setting(False, "whether redis_url is a node of a Redis Cluster")
    redis_password: Path | None = setting(None, "file with the password of Redis, if a URL does not hold it")
    redis_timeout_ms: int = setting(50, "longest wait for Redis in a Lookup; a later answer is not used", low=1)
    redis_expiry_seconds: float = setting(
        5.0, "silence after which a service counts as dead, and its entries are misses", low=0.1
    )
    advertise: str = setting("", "host:port at which others reach this service; empty takes the first of listen")
    tls_cert: Path | None = setting(None, "certificate chain (PEM): ports then speak TLS")
    tls_key: Path | None = setting(None, "private key (PEM) of tls_cert")
    tls_client_ca: Path | None = setting(None, "CAs (PEM): callers must then show a certificate of one of them")
    tls_ca: Path | None = setting(None, "CAs (PEM) of the services that share the index: they are called over TLS")

    def __post_init__(self) -> None:
        ServerTLS.of(self.tls_cert, self.tls_key, self.tls_client_ca)
        anywhere = self.listen[:1] and self.listen[0].rpartition(":")[0] in ("[::]", "0.0.0.0", "*")
        if self.redis_url and anywhere and not self.advertise:
            raise ValueError(f"redis_url with listen {self.listen[0]}: say with advertise where others reach it")
        if self.remote_url and self.disk_keys:
            raise ValueError("remote_url with disk_keys: the entries would lie in Redis as they are, not encrypted")
        if not _NAME.fullmatch(self.remote_name):
            raise ValueError(f"remote_name may hold letters, digits, . _ and -, not {self.remote_name!r}")

    @property
    def server_tls(self) -> ServerTLS | None:
        return ServerTLS.of(self.tls_cert, self.tls_key, self.tls_client_ca)

    def client_tls(self) -> ClientTLS | None:
        """How to call the services that share the index; reads the files. Raises BadFile."""
        return ClientTLS.of(self.tls_ca, self.tls_cert, self.tls_key)
