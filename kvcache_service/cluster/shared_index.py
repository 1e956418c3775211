"""The index that several cache services share, in Redis: who is alive, and who holds which entry."""

import asyncio
import logging
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import asyncio as redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from fusionkv.kvcache_service.index import record as records
from fusionkv.kvcache_service.index.record import Record
from fusionkv.kvcache_service.keys import DIGEST_BYTES, replica_key
from fusionkv.protos.runtime import cancellation, redis_url
from fusionkv.protos.runtime.errors import Unavailable

log = logging.getLogger(__name__)

MARK_BYTES = 8
_MEMBERS = b"fusionkv:members"
_GROUP, _SEEN = b"fusionkv:group:", b"fusionkv:seen:"
# A group that none of its holders published again for a day is gone; they do so every ten minutes (publisher.py).
_GROUP_MS = _DEAD_MS = 86_400_000
# Entries of one chunk behind one system prompt: a Lookup reads all, about 300 bytes each.
_MOST_ENTRIES = 256
_MOST_DEAD = 64
# Lookups at Redis at once, each with a connection of its own; the others wait, within their time.
_CONNECTIONS = 32
# Notes of accesses that wait for one service, each of up to 4,096 keys.
_NOTES, _NOTE_MS = 64, 60_000
_NOTE = struct.Struct("<32s?I")
_FAILURES = (RedisError, RedisClusterException, OSError, TimeoutError)

# Each script has one key, so that all of it is in one slot of a Redis Cluster. Times are the server's.

# KEYS members; ARGV mark, address, "serving" or "leaving" or "left", milliseconds to live, milliseconds that the dead
# are remembered, whether the mark was announced before: one that died since stays dead, as what was published under
# it may be given up. Gives whether the mark was alive, the living as (mark, state, address)..., and the marks of the
# dead. What is no member's is removed.
_BEAT = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local own = redis.call('HGET', KEYS[1], ARGV[1])
local alive = own and (tonumber(own:match('^%d+')) or 0) > now and 1 or 0
local ends = ARGV[3] == 'left' and now or now + ARGV[4]
if alive == 1 or ARGV[6] == '0' then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %s %s', ends, ARGV[3], ARGV[2]))
end
local living, dead, all = {}, {}, redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local till, state, address = all[i + 1]:match('^(%d+) (%S+) (.*)$')
  if not till or #all[i] ~= 8 then
    redis.call('HDEL', KEYS[1], all[i])
  elseif tonumber(till) > now then
    for _, part in ipairs({all[i], state, address}) do living[#living + 1] = part end
  elseif tonumber(till) + ARGV[5] < now or #all > 2000 then
    redis.call('HDEL', KEYS[1], all[i])
  else
    dead[#dead + 1] = all[i]
  end
end
return {alive, living, dead}
"""

# KEYS group; ARGV key, mark, field or nothing, record or nothing, milliseconds to live, marks of the dead, most
# entries. Makes the mark a holder of that entry and of no other with this key; of none, without a field.
_HOLD = """
local function dead(mark)
  for i = 1, #ARGV[6], 8 do
    if ARGV[6]:sub(i, i + 7) == mark then return true end
  end
end
local all = redis.call('HGETALL', KEYS[1])
local count, held = #all / 2, nil
for i = 1, #all, 2 do
  local field, value = all[i], all[i + 1]
  local n, kept, own = value:byte(1) or 0, '', field:sub(1, 32) == ARGV[1]
  for j = 2, 8 * n, 8 do
    local mark = value:sub(j, j + 7)
    if #mark == 8 and not (own and mark == ARGV[2]) and not dead(mark) then kept = kept .. mark end
  end
  if field == ARGV[3] then
    held = kept
  elseif kept == '' then
    redis.call('HDEL', KEYS[1], field)
    count = count - 1
  elseif #kept < 8 * n then
    redis.call('HSET', KEYS[1], field, string.char(#kept / 8) .. kept .. value:sub(2 + 8 * n))
  end
end
if ARGV[3] == '' or (not held and count >= tonumber(ARGV[7])) then return 0 end
held = ARGV[2] .. (held or ''):sub(1, 8 * 15)
redis.call('HSET', KEYS[1], ARGV[3], string.char(#held / 8) .. held .. ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return 1
"""


@dataclass(frozen=True, slots=True)
class Member:
    """A living service. `mark`: 8 random bytes that stand for what it published since it last started over."""

    mark: bytes
    address: str
    leaving: bool


@dataclass(frozen=True, slots=True)
class Change:
    """An entry that this service holds now, or without `record`, no more."""

    key: bytes
    group: bytes
    record: Record | None


def group_of(record: Record) -> bytes:
    """Names what an entry is found and placed by: all entries of its chunk behind its system prompt."""
    return replica_key(record.namespace, record.system, record.chunk)


class SharedIndex:
    """One connection pool to one Redis or Redis Cluster. Every call ends within `timeout` seconds.

    A call that fails opens the circuit: `reachable` is False, and nobody should ask, until a `beat` succeeds.
    """

    def __init__(self, url: str, *, cluster: bool, password: Path | None, timeout: float, expiry: float) -> None:
        self._timeout = timeout
        self._expiry_ms = int(1000 * expiry)
        options: dict[str, Any] = {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), int(cluster)),  # a cluster's client learns where a slot is by its first try
            "max_connections": 2 * _CONNECTIONS,
        }
        if password is not None:
            options["password"] = password.read_text().strip()
        self._redis = redis_url.connect(RedisCluster if cluster else redis.Redis, url, **options)
        self._slots = asyncio.Semaphore(_CONNECTIONS)
        self.reachable = False
        self.failures = 0
        """Calls that failed so far."""
        self.members: dict[bytes, Member] = {}
        self._dead = b""

    async def beat(
        self,
        mark: bytes,
        address: str,
        state: str,
        seen: Mapping[bytes, Mapping[tuple[bytes, bool], int]],
        *,
        announced: bool = False,
    ) -> tuple[bool, list[tuple[bytes, int, bool]]]:
        """Says that this service lives, learns who else does, and closes the circuit.

        `seen` says how often keys were found here that are held elsewhere, and whether by their exact path, by the
        holders' marks. Gives whether Redis knew `mark`, and what others saw of it. If it did not know one that was
        `announced`, it lost what was published, or the mark's time was over: then the mark stays unknown.

        Raises:
            Unavailable: Redis is out of reach, or late.
        """
        pipe = self._redis.pipeline(transaction=False)
        arguments = (mark, address, state, self._expiry_ms, _DEAD_MS, int(announced))
        pipe.execute_command("EVAL", _BEAT, 1, _MEMBERS, *arguments)
        pipe.lpop(_SEEN + mark, _NOTES)
        for holder, keys in seen.items():
            pipe.rpush(_SEEN + holder, b"".join(_NOTE.pack(key, exact, n) for (key, exact), n in keys.items()))
            pipe.ltrim(_SEEN + holder, -_NOTES, -1)
            pipe.pexpire(_SEEN + holder, _NOTE_MS)
        known, notes, *_ = await self._run(pipe)
        if known is None:
            raise self._failed(RedisError(f"{_MEMBERS.decode()} holds something else"))
        alive, living, dead = known
        members = [living[i : i + 3] for i in range(0, len(living), 3)]
        # An address that is no text is a stranger's: nobody is found there.
        self.members = {m: Member(m, at.decode(errors="replace"), how == b"leaving") for m, how, at in members}
        self._dead = b"".join(dead[-_MOST_DEAD:])
        if not self.reachable:
            log.info("Redis answers: %d services share the index", len(self.members))
            self.reachable = True
        whole = (note for note in notes or () if len(note) % _NOTE.size == 0)
        parts = (part for note in whole for part in _NOTE.iter_unpack(note))
        return bool(alive), [(key, times, exact) for key, exact, times in parts if times]

    async def apply(self, mark: bytes, changes: Iterable[Change]) -> None:
        """Writes what this service holds, and what no more; doing so twice does no harm.

        Raises:
            Unavailable: Redis is out of reach, or late; some of it may be written.
        """
        pipe = self._redis.pipeline(transaction=False)
        for change in changes:
            field, value = b"", b""
            if change.record is not None:
                # Copies that were signed otherwise are others: each is found with the signature that it has.
                field = change.key + change.record.checksum + change.record.signature
                value = records.encode(change.record, 0)
            arguments = (change.key, mark, field, value, _GROUP_MS, self._dead, _MOST_ENTRIES)
            pipe.execute_command("EVAL", _HOLD, 1, _GROUP + change.group, *arguments)
        await self._run(pipe)

    async def entries(self, groups: Sequence[bytes]) -> list[list[tuple[Record, list[Member]]]]:
        """The entries of each group that somebody alive holds, and who; in one round trip.

        Raises:
            Unavailable: Redis is out of reach, or late.
        """
        pipe = self._redis.pipeline(transaction=False)
        for group in groups:
            pipe.hgetall(_GROUP + group)
        return [self._living(found or {}) for found in await self._run(pipe)]

    def _living(self, found: dict[bytes, bytes]) -> list[tuple[Record, list[Member]]]:
        entries = []
        for field, value in found.items():
            end = 1 + MARK_BYTES * value[0] if value else 1
            marks = [value[i : i + MARK_BYTES] for i in range(1, end, MARK_BYTES)]
            holders = [self.members[mark] for mark in marks if mark in self.members]
            if holders:
                try:
                    entries.append((records.decode(field[:DIGEST_BYTES], value[end:])[0], holders))
                except ValueError as error:
                    log.debug("an entry of the shared index can't be read: %s", error)  # of another version, say
        return entries

    async def close(self) -> None:
        """Ends the connections."""
        await self._redis.aclose()

    async def _run(self, pipe: Any) -> list[Any]:
        """The answers; None for a command that met a key which is not what it should be."""
        try:
            async with asyncio.timeout(self._timeout), self._slots:
                with cancellation.heeded():
                    done: list[Any] = await pipe.execute(raise_on_error=False)
            for i, answer in enumerate(done):
                if isinstance(answer, Exception):
                    if not _spoilt(answer):
                        raise answer
                    log.warning("a key of the shared index holds something else: %s", answer)
                    done[i] = None
            return done
        except _FAILURES as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> Unavailable:
        """Opens the circuit."""
        # Never the error's own text without a look: a URL with a password may be in it.
        reason = re.sub(r"//[^@/\s]*@", "//", f"{type(error).__name__} {error}".strip())
        if self.reachable:
            log.warning("Redis is out of reach (%s): only this service's own entries are found", reason)
        self.reachable = False
        self.failures += 1
        return Unavailable(f"the shared index in Redis is out of reach: {reason}")


def _spoilt(error: Exception) -> bool:
    """Whether an error concerns one key alone, which somebody else wrote: another type, or nothing a script reads."""
    return isinstance(error, ResponseError) and ("WRONGTYPE" in str(error) or "attempt to" in str(error))
