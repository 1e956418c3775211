"""Work that any number of processes share, in a Redis stream: taken by consumer group, kept by a heartbeat, and taken
over from who is silent.

A run is one pass over some work. Its items are documents. What is in Redis can be lost at any time: a run is then
begun anew, and what is done is found to be done.
"""

import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from redis import asyncio as redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from fusionkv.gateway.ingest import queue_scripts as scripts
from fusionkv.protos.runtime import cancellation, redis_url
from fusionkv.protos.runtime.errors import FailedPrecondition, Unavailable

# Items that wait or are in work: enough that hundreds of processes find some, few enough to be nothing for a Redis.
MOST_ITEMS = 2000
END = "end"
_GROUP = "encoders"
_REDIS_SECONDS = 10.0
# So long nothing of a run is forgotten after the last change, and so many that were set aside are kept with reasons.
_KEPT_MS, _MOST_ASIDE = 7 * 86_400_000, 10_000
_MOST_REASON = 500


@dataclass(frozen=True, slots=True)
class Item:
    """One document that this process has in work. `deliveries`: how often somebody was given it, now included.

    `reason`: why it failed the last time, if whoever had it could still say so. `done`: the run's items that were
    done when it was taken.
    """

    id: str
    corpus: str
    document: str
    deliveries: int
    reason: str
    done: int


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a run is. `fed`, `done`, `aside`, `left` are documents; `encoded` and `skipped` chunks."""

    cursor: str = ""
    fed: int = 0
    done: int = 0
    aside: int = 0
    left: int = 0
    encoded: int = 0
    skipped: int = 0

    @property
    def over(self) -> bool:
        return self.cursor == END and not self.left


class WorkQueue:
    """One process's view of a run. Safe for concurrent use within one event loop.

    Every method raises Unavailable when Redis is out of reach, or has lost the run, or holds what can't be the run's:
    `join` begins it anew then.
    """

    def __init__(
        self, url: str, run: str, *, password: Path | None = None, cluster: bool = False, min_idle: float = 60.0
    ) -> None:
        """min_idle: seconds of silence after which an item is taken from whoever has it.

        Raises:
            ValueError: the URL is none.
        """
        options: dict[str, Any] = {
            "socket_timeout": _REDIS_SECONDS,
            "socket_connect_timeout": _REDIS_SECONDS,
            "retry": Retry(NoBackoff(), int(cluster)),
            "decode_responses": True,
            "protocol": 2,
        }
        if password is not None:
            options["password"] = password.read_text().strip()
        self._redis = redis_url.connect(RedisCluster if cluster else redis.Redis, url, **options)
        self.min_idle = min_idle
        self._min_idle_ms = int(1000 * min_idle)
        self._me = uuid.uuid4().hex
        self._here: set[str] = set()
        tag = f"{{fusionkv:run:{run}}}"
        self._items, self._state, self._aside = f"{tag}:items", f"{tag}:state", f"{tag}:aside"

    async def join(self, work: str) -> None:
        """Begins the run, or goes on with it. `work` says what it is about, the same for all who take part.

        Raises:
            FailedPrecondition: the run is about something else.
        """
        async with self._errors():
            await self._redis.hsetnx(self._state, "work", work)
            known = await self._redis.hget(self._state, "work")
            if known != work:
                raise FailedPrecondition(f"this run is another one's already: {known}. Give this one another name")
            try:
                await self._redis.xgroup_create(self._items, _GROUP, "0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise
            for key in (self._items, self._state):
                await self._redis.pexpire(key, _KEPT_MS)

    async def feed(self, expected: str, cursor: str, documents: Sequence[tuple[str, str]]) -> bool:
        """Adds documents (corpus, name) and moves the cursor, at once; not if the cursor is not what is expected, or
        there is no room. Says whether it was done.
        """
        flat = [text for pair in documents for text in pair]
        added = await self._eval(
            scripts.FEED, (self._items, self._state), expected, cursor, MOST_ITEMS, _KEPT_MS, *flat
        )
        return int(added) > 0 or (int(added) == 0 and not documents)

    async def take(self, wait: float) -> Item | None:
        """An item of somebody silent, or else the next new one; None if there was none for `wait` seconds.

        Never what is in work here: this process may itself stand still for longer than `min_idle`.
        """
        claimed = await self._eval(scripts.CLAIM, (self._items,), _GROUP, self._me, self._min_idle_ms, *self._here)
        if claimed:
            return await self._deliver(claimed)
        async with self._errors():
            read = await self._redis.xreadgroup(
                _GROUP, self._me, {self._items: ">"}, count=1, block=max(1, int(1000 * wait))
            )
        if not read:
            return None
        ((id, fields),) = read[0][1]
        with self._taking(id):
            _, done = await self._told(id)
            async with self._own():
                return Item(id, fields["corpus"], fields["document"], 1, "", done)

    async def _deliver(self, id: str) -> Item | None:
        """An item that was claimed, if it is nobody's."""
        # By the time of this answer that of another call which took the item here has come too: it was there first.
        reason, done = await self._told(id)
        if id in self._here:
            return None
        with self._taking(id):
            delivered = await self._eval(scripts.DELIVER, (self._items,), _GROUP, self._me, id)
            if not delivered:
                self._here.discard(id)
                return None
            flat, deliveries = delivered
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            async with self._own():
                return Item(id, fields["corpus"], fields["document"], deliveries, reason, done)

    async def _told(self, id: str) -> tuple[str, int]:
        """Why an item failed the last time, and how many are done."""
        async with self._errors():
            reason, done = await self._redis.hmget(self._state, f"why:{id}", "done")
        async with self._own():
            return reason or "", int(done or 0)

    @contextlib.contextmanager
    def _taking(self, id: str) -> Iterator[None]:
        """The item is in work here from now on, unless what runs inside fails."""
        self._here.add(id)
        try:
            yield
        except BaseException:
            self._here.discard(id)
            raise

    async def keep(self, item: Item) -> bool:
        """Says that the item is in work here still. False if somebody else has taken it, or ended it."""
        kept = bool(await self._eval(scripts.KEEP, (self._items,), _GROUP, self._me, item.id))
        if not kept:
            self._here.discard(item.id)
        return kept

    async def finish(self, item: Item, encoded: int, skipped: int) -> bool:
        """Ends an item that is done. False if somebody else did."""
        return await self._finish(item, encoded, skipped, {})

    async def set_aside(self, item: Item, reason: str) -> bool:
        """Ends an item that can't be done, and keeps why. False if somebody else ended it."""
        kept = {"corpus": item.corpus, "document": item.document, "reason": reason[:_MOST_REASON]}
        return await self._finish(item, 0, 0, kept)

    async def give_back(self, item: Item, reason: str, *, elsewhere: bool = False) -> None:
        """Gives up an item that failed: it comes again after `min_idle`.

        elsewhere: it may have failed for what is no fault of its own. Then it counts if others got something done.
        """
        arguments = (item.id, item.deliveries, reason[:_MOST_REASON], item.done if elsewhere else "")
        await self._eval(scripts.GIVE_BACK, (self._items, self._state), _GROUP, self._me, *arguments)
        self._here.discard(item.id)

    async def release(self) -> None:
        """Leaves all that this process has in work to others, at once and as if it had never had it."""
        await self._eval(scripts.RELEASE, (self._items,), _GROUP, self._me, self._min_idle_ms)
        self._here.clear()

    async def standing(self) -> Standing:
        async with self._errors():
            state = await self._redis.hgetall(self._state)
            left = await self._redis.xlen(self._items)
        async with self._own():
            numbers = {name: int(state.get(name, 0)) for name in ("fed", "done", "aside", "encoded", "skipped")}
        return Standing(state.get("cursor", ""), left=left, **numbers)

    async def aside(self, most: int) -> list[dict[str, str]]:
        """The last ones that were set aside: corpus, document, reason."""
        async with self._errors():
            return [fields for _, fields in await self._redis.xrevrange(self._aside, count=most)]

    async def forget(self, why: str) -> NoReturn:
        """Deletes all of the run, which holds what nobody who takes part wrote, and raises Unavailable."""
        async with self._errors():
            await self._redis.delete(self._items, self._state, self._aside)
        raise Unavailable(f"the queue in Redis was not this run's ({why[:_MOST_REASON]}): it begins anew")

    async def leave(self) -> None:
        """Ends the connections; what is in work is taken over by others."""
        await self._redis.aclose()

    async def _finish(self, item: Item, encoded: int, skipped: int, kept: Mapping[str, str]) -> bool:
        arguments = (_GROUP, item.id, _KEPT_MS, encoded, skipped, _MOST_ASIDE)
        fields = [text for pair in kept.items() for text in pair]
        ended = await self._eval(scripts.FINISH, (self._items, self._state, self._aside), *arguments, *fields)
        self._here.discard(item.id)
        return bool(ended)

    @contextlib.asynccontextmanager
    async def _own(self) -> AsyncIterator[None]:
        """What is read inside must be what was written here, or the run counts as lost."""
        try:
            yield
        except (ValueError, LookupError) as error:
            await self.forget(repr(error))

    async def _eval(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        async with self._errors():
            return await self._redis.eval(script, len(keys), *keys, *arguments)

    @contextlib.asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        try:
            with cancellation.heeded():
                yield
        except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
            # A key of the run has a value of another kind, which only somebody else can have written. A script's
            # error has this word in its middle.
            if isinstance(error, ResponseError) and "WRONGTYPE" in str(error):
                await self.forget("a key of it holds a value of another kind")
            # Never the error's own text without a look: a URL with a password may be in it.
            reason = re.sub(r"//[^@/\s]*@", "//", f"{type(error).__name__} {error}".strip())
            raise Unavailable(f"the queue in Redis: {reason}") from error
