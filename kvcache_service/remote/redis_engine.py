"""A Redis, or a Redis Cluster, that a remote tier stands on."""

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
_AWAY = (RedisConnectionError, RedisTimeoutError, RedisClusterException)


class RedisEngine(Engine):
    """Values expire `ttl` seconds after they were written or touched; Redis's own `maxmemory` bounds them all."""

    def __init__(self, url: str, *, ttl: float, timeout: float, password: str | None = None) -> None:
        """timeout: seconds for one answer.

        Raises:
            ValueError: the URL is malformed.
        """
        self._ttl = int(1000 * ttl)
        self._url = url
        self._options: dict[str, Any] = {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            # A server that went away is met on the first try; a Cluster's client learns by it where a slot is now.
            "retry": Retry(NoBackoff(), 1),
            **({"password": password} if password else {}),
        }
        self._node: Any = redis_url.connect(redis.Redis, url, **self._options)
        self._cluster: Any = None
        self._asked = False
        self._connecting = threading.Lock()

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        with self._client() as client:
            if not names:
                return []
            found: list[bytes | None] = client.mget_nonatomic(names) if self._cluster else client.mget(names)
            return found

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
        """The client of the one server, or of the Cluster that it is a node of."""
        try:
            with self._connecting:
                if not self._asked:
                    if self._node.info("cluster").get("cluster_enabled"):
                        self._cluster = redis_url.connect(redis.RedisCluster, self._url, **self._options)
                    self._asked = True
            yield self._cluster or self._node
        except _AWAY as error:
            raise Unreachable(f"Redis is out of reach: {_said(error)}") from error
        except RedisError as error:
            raise OSError(f"Redis refuses: {_said(error)}") from error


def _said(error: Exception) -> str:
    """What an error says, without the password of a URL that may be in it."""
    return re.sub(r"//[^@/\s]*@", "//", f"{type(error).__name__} {error}".strip())
