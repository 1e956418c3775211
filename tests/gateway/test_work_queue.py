"""The queue of a run in a real Redis, alone and in a Cluster: who has an item, who gets it next, and when it ends."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from redis.asyncio.cluster import RedisCluster as AsyncCluster

from fusionkv.gateway.ingest.work_queue import END, MOST_ITEMS, Item, WorkQueue
from fusionkv.protos.runtime.errors import FailedPrecondition, Unavailable
from tests.system.redis_process import RedisCluster, RedisServer

pytestmark = pytest.mark.system
# Long enough that nothing is taken over which a test holds; what is to be taken over has its own.
LONG, SHORT = 300.0, 0.2
Queue = Callable[..., WorkQueue]


@pytest.fixture(scope="module", params=["one", "cluster"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("redis")
    made: Any = RedisServer(folder) if request.param == "one" else RedisCluster(folder)
    yield made
    made.kill9()


@pytest.fixture
async def queue(server: Any, request: pytest.FixtureRequest) -> Any:
    """Makes the views that several processes have of one run, which is the test's own."""
    made: list[WorkQueue] = []

    def make(min_idle: float = LONG) -> WorkQueue:
        cluster = isinstance(server, RedisCluster)
        made.append(WorkQueue(server.url, request.node.name, cluster=cluster, min_idle=min_idle))
        return made[-1]

    yield make
    for each in made:
        await each.leave()


async def began(queue: WorkQueue, *documents: str) -> WorkQueue:
    """After all of it was fed."""
    await queue.join("a pass")
    assert await queue.feed("", END, [("c", name) for name in documents])
    return queue


async def taken(queue: WorkQueue) -> Item:
    item = await until(lambda: queue.take(0.05))
    assert item is not None
    return item


async def until(call: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(60):
        while not (found := await call()):  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)
    return found


async def test_each_item_goes_to_one_and_ends_once(queue: Queue) -> None:
    first, second = await began(queue(), "a", "b"), queue()
    items = [await taken(first), await taken(second)]
    assert {item.document for item in items} == {"a", "b"}
    assert await first.take(0.05) is None
    assert (await first.standing()).left == 2
    assert await first.finish(items[0], encoded=3, skipped=1)
    assert not await second.finish(items[0], encoded=3, skipped=1)
    assert not (await second.standing()).over
    assert await second.set_aside(items[1], "too odd")
    end = await first.standing()
    assert (end.over, end.fed, end.done, end.aside, end.encoded, end.skipped) == (True, 2, 1, 1, 3, 1)
    assert await first.aside(10) == [{"corpus": "c", "document": "b", "reason": "too odd"}]


async def test_the_items_of_one_who_is_silent_are_taken_over(queue: Queue) -> None:
    silent, other = await began(queue(), "a"), queue(SHORT)
    mine = await taken(silent)
    again = await taken(other)
    assert (again.id, again.deliveries, again.reason) == (mine.id, 2, "")
    # It learns that it lost it, and can take it from nobody.
    assert not await silent.keep(mine)
    await silent.give_back(mine, "mine!")
    assert await other.keep(again)
    # What was finished is finished, whoever it was.
    assert await silent.finish(mine, 1, 0)
    assert not await other.finish(again, 1, 0)


async def test_nobody_takes_over_from_itself(queue: Queue) -> None:
    """However long it stood still; its item counts as delivered once, to others as well."""
    still, other = await began(queue(SHORT), "a"), queue(SHORT)
    item = await taken(still)
    for _ in range(3):
        await asyncio.sleep(2 * SHORT)
        assert await still.take(0.05) is None
    again = await taken(other)
    assert (again.id, again.deliveries) == (item.id, 2)
    # It is somebody else's now, and comes back from there as from anybody.
    assert not await still.keep(item)
    assert (await taken(still)).deliveries == 3


async def test_two_that_take_at_once_take_one_item_once(queue: Queue) -> None:
    """Also what one of them was given while the answer was under way for longer than counts as silence."""
    one = await began(queue(0.001), *map(str, range(40)))
    items = await asyncio.gather(*(taken(one) for _ in range(40)))
    assert sorted(item.document for item in items) == sorted(map(str, range(40)))


async def test_to_keep_an_item_is_to_be_heard_of(queue: Queue, server: Any, request: pytest.FixtureRequest) -> None:
    working = await began(queue(), "a")
    item = await taken(working)

    async def silent(at_least: int) -> bool:
        """Whether the item counts as idle for so many milliseconds."""
        tag = f"{{fusionkv:run:{request.node.name}}}:items"
        if isinstance(server, RedisCluster):
            async with AsyncCluster.from_url(server.url, protocol=2) as redis:
                return bool(await redis.xpending_range(tag, "encoders", "-", "+", 1, idle=at_least))
        return bool(server.client().xpending_range(tag, "encoders", "-", "+", 1, idle=at_least))

    async def heard_of() -> bool:
        assert await working.keep(item)
        return not await silent(at_least=500)

    await until(lambda: silent(at_least=500))
    await until(heard_of)


async def test_what_is_left_behind_in_order_comes_again_at_once_and_counts_as_nothing(queue: Queue) -> None:
    one = await began(queue(), "a")
    for _ in range(3):
        item = await taken(one)
        assert item.deliveries == 1
        await one.release()


async def test_a_failure_counts_unless_nobody_gets_anything_done(queue: Queue) -> None:
    one, heir = await began(queue(), "a", "b"), queue(SHORT)

    async def again() -> Item:
        await asyncio.sleep(2 * SHORT)  # so that it is this item, and no new one
        return await taken(heir)

    item = await taken(one)
    await one.give_back(item, "no worker", elsewhere=True)
    item = await again()
    assert (item.document, item.deliveries, item.reason) == ("a", 1, "no worker")
    assert await one.finish(await taken(one), 1, 0)
    await heir.give_back(item, "no worker again", elsewhere=True)
    item = await again()
    assert (item.deliveries, item.reason) == (2, "no worker again")
    await heir.give_back(item, "its own fault")
    assert (await again()).deliveries == 3


async def test_a_queue_is_fed_by_one_at_a_time_and_to_its_bound(queue: Queue) -> None:
    one, two = queue(), queue()
    await one.join("a pass")
    page = [("c", str(i)) for i in range(MOST_ITEMS // 2)]
    assert await one.feed("", "0 x", page)
    assert not await two.feed("", "0 y", page)
    assert await two.feed("0 x", "0 y", page)
    assert not await one.feed("0 y", END, [("c", "one more")])
    assert (await one.standing()).left == MOST_ITEMS
    assert await one.finish(await taken(one), 1, 0)
    assert await one.feed("0 y", END, [("c", "one more")])
    assert (await one.standing()).fed == MOST_ITEMS + 1


async def test_a_run_is_about_one_thing(queue: Queue) -> None:
    await began(queue())
    with pytest.raises(FailedPrecondition, match="a pass"):
        await queue().join("another")
    assert (await queue().standing()).over


async def test_a_redis_that_forgot_all_is_told_so(queue: Queue, server: Any) -> None:
    one = await began(queue(), "a")
    item = await taken(one)
    for each in getattr(server, "servers", [server]):
        each.client().flushall()
    with pytest.raises(Unavailable, match="NOGROUP"):
        await one.take(0.05)
    await one.join("a pass")
    assert not (await one.standing()).over
    assert await one.feed("", END, [("c", "a")])
    assert not await one.keep(item)
    assert (await taken(one)).document == "a"


async def test_what_nobody_of_the_run_wrote_is_a_lost_run(queue: Queue, request: pytest.FixtureRequest) -> None:
    one, tag = await began(queue(), "a"), f"{{fusionkv:run:{request.node.name}}}"
    redis = one._redis
    await redis.hset(f"{tag}:state", "done", "many")
    with pytest.raises(Unavailable, match=r"many.*begins anew"):
        await one.standing()
    await began(one, "a")
    await redis.hset(f"{tag}:state", "done", "many")
    with pytest.raises(Unavailable, match="begins anew"):
        await until(lambda: one.take(0.05))
    await one.join("a pass")
    await redis.xadd(f"{tag}:items", {"corpus": "c"})
    with pytest.raises(Unavailable, match=r"'document'.*begins anew"):
        await until(lambda: one.take(0.05))
    await began(one, "a")
    assert (await taken(one)).document == "a"


@pytest.mark.parametrize("key", ["items", "state"])
async def test_keys_of_another_kind_are_a_lost_run(queue: Queue, request: pytest.FixtureRequest, key: str) -> None:
    one, name = queue(), f"{{fusionkv:run:{request.node.name}}}:{key}"
    calls = [one.standing, lambda: one.join("a pass"), lambda: one.feed("", END, [("c", "a")])]
    # Of these two keys, to take reads that of the items first.
    for call in [*calls, *([lambda: one.take(0.05)] if key == "items" else [])]:
        await one._redis.set(name, "x")
        with pytest.raises(Unavailable, match=r"another kind.*begins anew"):
            await until(call)
        await began(one, "a")
        assert (await taken(one)).document == "a"
        await one._redis.delete(*(name.replace(f":{key}", f":{each}") for each in ("items", "state")))


async def test_a_redis_that_is_gone_is_unavailable_and_its_password_unsaid() -> None:
    queue = WorkQueue("redis://:hush@127.0.0.1:1/0", "r")
    with pytest.raises(Unavailable) as caught:
        await queue.join("a pass")
    assert "hush" not in str(caught.value)
    await queue.leave()


async def test_who_is_asked_to_end_while_the_queue_is_asked_ends(queue: Queue) -> None:
    """At whatever moment: redis-py's own calls overlook it at some."""
    one = await began(queue(), "a")
    for rounds in range(60):
        task = asyncio.create_task(one.standing())
        for _ in range(rounds):
            await asyncio.sleep(0)
        asked = task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() == asked, rounds
