"""The remote tier: entries in a Redis, below the tiers of this machine, for small clusters without disks that last.

One linear space of bytes, as on disk, in strings of 1 MiB by their number in it: so Redis never holds more than the
tier's capacity, whatever was freed when. An entry's record is a string of its own. All expire `ttl` seconds after the
last access that was noted; what is gone then is a miss. A block that expired under one entry and was written again
for its neighbour fails that entry's checksum, as any damage does.

The tier's name in Redis belongs to the service that opened it last: each write says who writes, and is refused to all
others. So a service that lost its machine, and comes back later, does no harm.
"""

import contextlib
import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from fusionkv.kvcache_service.index import heat
from fusionkv.kvcache_service.index import record as records
from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.tiers.base import Place, Recovered, Tier, Unreachable
from fusionkv.kvcache_service.tiers.extents import Extents
from fusionkv.protos.runtime import redis_url

# As much as a frame of the service, so that each is one answer; a larger one holds up Redis's other callers.
BLOCK_BYTES = 1 << 20
_HEAT = struct.Struct("<d")
_SCAN = 1000
_PREFIX = b"fusionkv:tier:"

# KEYS owner, string; ARGV token, milliseconds to live, offset in the string, bytes.
_WRITE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('NOTOWNER') end
redis.call('SETRANGE', KEYS[2], ARGV[3], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
"""
# KEYS owner, record; ARGV token, milliseconds to live, value.
_RECORD = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('NOTOWNER') end
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[2])
"""


class RemoteTier(Tier):
    """Calls block for a round trip to Redis, up to `timeout` seconds, and raise Unreachable after that."""

    name = "remote"
    blocking = True

    def __init__(
        self, url: str, capacity_bytes: int, *, space: str, ttl: float, timeout: float, password: str | None = None
    ) -> None:
        """space: the tier's name in Redis, of one service alone. ttl: seconds.

        Raises:
            OSError: Redis can't be reached, or the URL is none.
        """
        super().__init__(Extents(capacity_bytes))
        self._ttl = int(1000 * ttl)
        # The braces keep all of it in one slot of a Redis Cluster.
        self._prefix = _PREFIX + b"{" + space.encode() + b"}:"
        self._owner, self._token = self._prefix + b"owner", secrets.token_hex(16).encode()
        options: dict[str, Any] = {"password": password} if password else {}
        try:
            limits = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
            self._redis = redis_url.connect(redis.Redis, url, retry=Retry(NoBackoff(), 1), **limits, **options)
        except ValueError as error:
            raise OSError(f"remote_url can't be used: {error}") from error
        with self._errors():
            self._redis.set(self._owner, self._token)
            self._write, self._record = (self._redis.register_script(script) for script in (_WRITE, _RECORD))

    def write(self, place: Place, at: int, data: Sequence[memoryview]) -> None:
        with self._errors():
            for piece in data:
                done = 0
                for block, offset, size in _blocks(place.offset + at, len(piece)):
                    part = bytes(piece[done : done + size])
                    self._write([self._owner, self._block(block)], [self._token, self._ttl, offset, part])
                    done += size
                at += len(piece)

    def read(self, place: Place, at: int, size: int) -> memoryview:
        parts = []
        with self._errors():
            for block, offset, length in _blocks(place.offset + at, size):
                parts.append(self._redis.getrange(self._block(block), offset, offset + length - 1))
                if len(parts[-1]) != length:
                    raise OSError(f"block {block} of the remote tier has expired")
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))

    def commit(self, record: Record, place: Place, heat: float) -> None:
        value = records.encode(record, place.offset) + _HEAT.pack(heat)
        with self._errors():
            self._record([self._owner, self._key(record.key)], [self._token, self._ttl, value])

    def forget(self, entries: Sequence[tuple[bytes, Place]]) -> None:
        with self._errors():
            known = self._known([key for key, _ in entries])
            gone = [key for key, place in entries if key in known and known[key][0] == place.offset]
            if gone and self._redis.get(self._owner) == self._token:
                self._redis.delete(*map(self._key, gone))

    def save_heat(self, heats: Sequence[tuple[bytes, float]]) -> None:
        """Puts off the end of these entries as well."""
        with self._errors():
            known = self._known([key for key, _ in heats])
            with self._redis.pipeline(transaction=False) as asked:
                for key, warmth in heats:
                    if key in known:
                        offset, size, value = known[key]
                        asked.set(self._key(key), value + _HEAT.pack(warmth), px=self._ttl, xx=True)
                        for block, _, _ in _blocks(offset, size):
                            asked.pexpire(self._block(block), self._ttl)
                asked.execute()

    def recover(self) -> Iterator[Recovered]:
        """What the records name. Their bytes are verified when they are read, as all are."""
        found = []
        with self._errors():
            for key, value in self._load():
                with contextlib.suppress(ValueError):
                    record, offset = records.decode(key, value[: -_HEAT.size])
                    found.append((record, offset, heat.stored(value[-_HEAT.size :])))
        starts = np.array([offset for _, offset, _ in found], np.int64)
        sizes = np.array([record.size for record, _, _ in found], np.int64)
        good = self._extents.fit(starts, sizes)
        _drop_overlapping(starts, sizes, good)
        self._extents.restore(starts[good], sizes[good])
        placed = [Recovered(record, Place(offset, record.size), warmth) for record, offset, warmth in found]
        self.forget([(e.record.key, e.place) for e, keep in zip(placed, good, strict=True) if not keep])
        yield from (e for e, keep in zip(placed, good, strict=True) if keep)

    def close(self) -> None:
        self._redis.close()

    def check_integrity(self, held: Mapping[Place, bytes | None]) -> None:
        super().check_integrity(held)
        recorded = {}
        with self._errors():
            for key, value in self._load():
                known = records.place(key, value[: -_HEAT.size])
                assert known is not None, f"record {key.hex()} is unreadable"
                recorded[Place(*known)] = key
        # What expired is found out when it is read.
        assert recorded.items() <= {place: key for place, key in held.items() if key is not None}.items()

    def _load(self) -> Iterator[tuple[bytes, bytes]]:
        """Key and value of every record."""
        start = self._key(b"")
        batch: list[bytes] = []
        for name in self._redis.scan_iter(start + b"*", count=_SCAN):
            batch.append(name)
            if len(batch) == _SCAN:
                yield from self._values(batch)
                batch = []
        yield from self._values(batch)

    def _values(self, names: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
        values = self._redis.mget(names) if names else []
        start = len(self._key(b""))
        yield from ((n[start:], v) for n, v in zip(names, values, strict=True) if v is not None)

    def _known(self, keys: Sequence[bytes]) -> dict[bytes, tuple[int, int, bytes]]:
        """Offset, size and record of those keys that are recorded."""
        known = {}
        for key, value in self._values([self._key(key) for key in keys]):
            body = value[: -_HEAT.size]
            if (place := records.place(key, body)) is not None:
                known[key] = (*place, body)
        return known

    def _key(self, key: bytes) -> bytes:
        return self._prefix + b"r:" + key

    def _block(self, number: int) -> bytes:
        return self._prefix + b"b:%d" % number

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (RedisConnectionError, RedisTimeoutError) as error:
            raise Unreachable(f"the Redis of the remote tier: {error}") from error
        except RedisError as error:
            taken = "another service has opened it: give each a remote_name of its own"
            raise OSError(f"the remote tier: {taken if 'NOTOWNER' in str(error) else error}") from error


def _blocks(offset: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Number of each block that a stretch of the tier is in, where in it that begins, and how long it is there."""
    while size > 0:
        block, at = divmod(offset, BLOCK_BYTES)
        length = min(size, BLOCK_BYTES - at)
        yield block, at, length
        offset, size = offset + length, size - length


def _drop_overlapping(starts: Any, sizes: Any, good: Any) -> None:
    """Of places that overlap none stays good."""
    order = np.flatnonzero(good)
    order = order[np.argsort(starts[order], kind="stable")]
    if len(order) > 1:
        ends = np.maximum.accumulate((starts + sizes)[order])
        meet = np.flatnonzero(starts[order][1:] < ends[:-1])
        good[order[np.concatenate([meet, meet + 1])]] = False
