"""Redis and Redis Cluster as backends of the remote tier."""

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import ClusterDownError, ReadOnlyError, RedisClusterException, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from fusionkv.kvcache_service.remote.tier import RemoteEngine
from fusionkv.kvcache_service.tiers.base import Unreachable
from fusionkv.protos.runtime.tls import read_ca
from fusionkv.protos.runtime.watched import BadFile, Watched, read_bytes

_BATCH = 1000
_CONNECTION_ERRORS = (RedisConnectionError, RedisTimeoutError, RedisClusterException, ClusterDownError)


class RedisEngine(RemoteEngine):
    """Values expire `ttl` seconds after the last write or touch; Redis's `maxmemory` limits their size."""

    def __init__(self, url: str, *, ttl: float, timeout: float, password: Path | None = None) -> None:
        """Creates the clients, without connecting. Raises ValueError if the URL is malformed, BadFile.

        ttl: time to live in seconds. timeout: seconds for one response. password: a file, for a URL that has none.
        """
        self._ttl = int(1000 * ttl)
        credentials, url = _credentials(url, password) if password else ({}, url)
        self._url = url
        self._options: dict[str, Any] = {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            # The first try detects a lost connection; a Cluster client also learns a slot's new node from it.
            "retry": Retry(NoBackoff(), 1),
            **credentials,
        }
        self._node: Any = connect(redis.Redis, url, **self._options)
        if ca := self._node.connection_pool.connection_kwargs.get("ssl_ca_certs"):
            read_ca(Path(ca))  # errors of connections would not name the file
        self._cluster: Any = None
        self._checked = False
        self._connecting = threading.Lock()

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        with self._client() as client:
            if not names:
                return []
            return client.mget_nonatomic(names) if self._cluster else client.mget(names)

    def get_into(self, names: Sequence[str], into: Sequence[memoryview]) -> bool:
        """Receives values in their buffers: redis-py's parser copies them three times, at half of the speed.

        Any response but these values is left to redis-py, which may have to reconnect or to follow a redirection.
        """
        with self._client() as client:
            pools: dict[Any, list[int]] = {}
            for i, name in enumerate(names):
                at = client.get_redis_connection(client.get_node_from_key(name)) if self._cluster else client
                pools.setdefault(at.connection_pool, []).append(i)
            received = all(
                _receive(pool, [names[i] for i in some], [into[i] for i in some]) for pool, some in pools.items()
            )
        return received or super().get_into(names, into)

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
            found = client.scan_iter(match=f"{prefix}*", count=_BATCH)
            while names := list(islice(found, _BATCH)):
                self.remove(names)

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
                        self._cluster = connect(redis.RedisCluster, self._url, **self._options)
                    self._checked = True
            yield self._cluster or self._node
        except _CONNECTION_ERRORS as error:
            if isinstance(error, RedisClusterException):
                # None of the nodes that the client knows answers. Its URL may lead to where they are now.
                with contextlib.suppress(RedisError, RedisClusterException):
                    self._cluster = connect(redis.RedisCluster, self._url, **self._options)
            raise Unreachable(f"Redis is unreachable: {_message(error)}") from error
        except RedisError as error:
            if isinstance(error, ReadOnlyError):
                # Connected to what was the primary before a failover; new connections find the one of now.
                self._node.connection_pool.disconnect(inuse_connections=False)
            raise OSError(f"Redis returned an error: {_message(error)}") from error


class _Password(CredentialProvider):
    """The password of a file at the time of each connection, for the user whom the URL names."""

    def __init__(self, file: Path, user: str | None) -> None:
        self._user = (unquote(user),) if user else ()
        self._password = Watched([file], lambda: _text(file))

    def get_credentials(self) -> Any:
        return (*self._user, self._password.value)


def _credentials(url: str, password: Path) -> tuple[dict[str, Any], str]:
    """Options of a client, and the URL without the user that they name."""
    parts = urlsplit(url)
    if parts.password is not None or "password=" in parts.query:
        return {}, url
    return {"credential_provider": _Password(password, parts.username)}, re.sub(r"//[^@/]*@", "//", url, count=1)


def _text(file: Path) -> str:
    try:
        return read_bytes(file, "remote_password").decode().strip()
    except UnicodeDecodeError:
        raise BadFile(f"remote_password can't be used: {file} is not text") from None


def _receive(pool: redis.ConnectionPool, names: Sequence[str], into: Sequence[memoryview]) -> bool:
    """Fills buffers with values of one server; False if it responds with anything else."""
    connection, received = pool.get_connection(), False
    try:
        connection.send_packed_command(connection.pack_commands([("GET", name) for name in names]))
        source: Any = connection._sock
        end = b""
        for view in into:
            if not _expect(source, end + b"$%d\r\n" % len(view)):
                return False
            while len(view):
                count = source.recv_into(view)
                if not count:
                    return False
                view = view[count:]
            end = b"\r\n"
        received = _expect(source, end)
    except TimeoutError as error:
        raise RedisTimeoutError("no response") from error
    except OSError:
        return False
    finally:
        if not received:
            connection.disconnect()
        pool.release(connection)
    return received


def _expect(source: Any, expected: bytes) -> bool:
    """Whether a socket's next bytes are these."""
    while expected:
        data = source.recv(len(expected))
        if not data or not expected.startswith(data):
            return False
        expected = expected[len(data) :]
    return True


def _message(error: Exception) -> str:
    """Message of an error, without the password of a URL in it."""
    return re.sub(r"//[^@/\s]*@", "//", f"{type(error).__name__} {error}".strip())


def connect(kind: Any, url: str, **options: Any) -> Any:
    """Returns `kind.from_url(url)`, where `kind` is a client class of redis-py. Raises ValueError if it is malformed.

    The message does not quote the URL, because any part may belong to the password: for `redis://:ab/cd@host`, the
    parser reports the port "ab".
    """
    try:
        parts = urlsplit(url)
        # An "@" after the first "/", "?" or "#" means that the password contains one of these characters.
        cut = parts.path + parts.fragment + ("" if "=" in parts.query else parts.query)
        malformed = parts.scheme != "unix" and "@" in cut
        # A client checks the options of the query once it connects: each call would fail.
        pool = redis.ConnectionPool.from_url(url, **options)
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, RedisError):
        malformed = True
    if malformed:
        raise ValueError(
            "not a Redis URL (redis://host:port, rediss://host:port, unix:///path), or one with an unknown option: "
            "put the password in a file, or write its characters / ? # @ % as %2F %3F %23 %40 %25"
        )
    return kind.from_url(url, **options)
