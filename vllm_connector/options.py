"""The connector's options in vLLM's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusionkv.protos.runtime import settings
from fusionkv.protos.runtime.settings import setting

_PLACE = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """Options in `kv_connector_extra_config`."""

    cache: str = setting("", "address of the cache service for shared prefixes; empty loads fused prompts only")
    chunk_tokens: int = setting(256, "tokens of a prefix entry in the cache service", low=1)
    load_seconds: float = setting(10.0, "maximum seconds for loading a prompt", low=0.001)
    pool_bytes: int = setting(0, "size of the KV pool for fused prefill; 0 disables fused prefill", bytes=True, low=0)
    fuse_seconds: float = setting(60.0, "maximum seconds for the fused prefill of a prompt", low=0.001)
    listen: str = setting(
        "", "host:port or unix:/path where gateways reach the engine of fused prefill; empty for none"
    )
    separator: str = setting(
        "", "text behind the system prompt and each passage, in prompts without spans; empty for none"
    )
    tls_ca: str = setting("", "PEM file, as in the services' settings")
    tls_cert: str = setting("", "PEM file, as in the services' settings")
    tls_key: str = setting("", "PEM file, as in the services' settings")
    tls_worker: str = setting("", "name in the certificates of workers; empty for their addresses")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "ConnectorOptions":
        """Raises ValueError for an unknown option, or a value of the wrong type or out of bounds."""
        options = settings.of(cls, given, _PLACE)
        if options.listen and not options.pool_bytes:
            raise ValueError(f"{_PLACE}.listen needs pool_bytes")
        return options
