"""Redis and Redis Cluster as backends of the remote tier."""

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from fusionkv.kvcache_service.remote.engine import Engine
from fusionkv.kvcache_service.tiers.base import Unreachable
from fusionkv.protos.runtime import redis_url

_SCAN = 1000
_CONNECTION_ERRORS = (RedisConnectionError, RedisTimeoutError, RedisClusterException)


class RedisEngine(Engine):
    """Values expire `ttl` seconds after the last write or touch; Redis's `maxmemory` limits their size."""

    def __init__(self, url: str, *, ttl: float, timeout: float, password: str | None = None) -> None:
        """Creates the clients, without connecting.

        Args:
            ttl: Time to live in seconds.
            timeout: Seconds for one response.

        Raises:
            ValueError: The URL is malformed.
        """
        self._ttl = int(1000 * ttl)
        self._url = url
        self._options: dict[str, Any] = {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            # The first try detects a lost connection; a Cluster client also learns a slot's new node from it.
            "retry": Retry(NoBackoff(), 1),
            **({"password": password} if password else {}),
        }
        self._node: Any = redis_url.connect(redis.Redis, url, **self._options)
        self._cluster: Any = None
        self._checked = False
        self._connecting = threading.Lock()

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        with self._client() as client:
            if not names:
                return []
            values: list[bytes | None] = client.mget_nonatomic(names) if self._cluster else client.mget(names)
            return values

    def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        with self._client() as client, client.pipeline(transaction=False) as pipe:
            for name, value in values:
                pipe.set(name, value, px=self._ttl)
            pipe.execute()

    def touch(self, names: Sequence[str]) -> list[bool]:
        with self._client() as client, client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.pexpire(name, self._ttl)
            return list(map(bool, pipe.execute()))

    def remove(self, names: Sequence[str]) -> None:
        with self._client() as client, client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.unlink(name)
            pipe.execute()

    def remove_all(self, prefix: str) -> None:
        with self._client() as client:
            for name in client.scan_iter(match=f"{prefix}*", count=_SCAN):
                client.unlink(name)

    def close(self) -> None:
        for client in (self._node, self._cluster):
            if client is not None:
                client.close()

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        """Client of the server, or of its Cluster. Translates Redis errors."""
        try:
            with self._connecting:
                if not self._checked:
                    if self._node.info("cluster").get("cluster_enabled"):
                        self._cluster = redis_url.connect(redis.RedisCluster, self._url, **self._options)
                    self._checked = True
            yield self._cluster or self._node
        except _CONNECTION_ERRORS as error:
            raise Unreachable(f"Redis is unreachable: {_message(error)}") from error
        except RedisError as error:
            raise OSError(f"Redis returned an error: {_message(error)}") from error


def _message(error: Exception) -> str:
    """Message of an error, without the password of a URL in it."""
    return re.sub(r"//[^@/\s]*@", "//", f"{type(error).__name__} {error}".strip())
