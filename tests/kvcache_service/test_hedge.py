"""When a lookup is asked of a second service: if the first is dead; if it is late, but seldom; no answer is lost."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from fusionkv.kvcache_service.cluster.hedge import BURST, SHARE, Hedge
from fusionkv.protos.runtime.errors import InvalidArgument, Unavailable
from tests.waiting import until


class Asked:
    """Answers when it is told to; counts."""

    def __init__(self) -> None:
        self.calls = 0
        self.unused: list[str] = []
        self.refused: list[str] = []
        self.gate = asyncio.Event()

    async def late(self, answer: str) -> str:
        self.calls += 1
        await self.gate.wait()
        return answer

    async def now(self, answer: str) -> str:
        self.calls += 1
        return answer

    async def refuse(self, said: str) -> str:
        self.refused.append(said)
        raise Unavailable(said)

    async def wrong(self) -> str:
        raise InvalidArgument("the caller's own mistake")

    async def drop(self, answer: str) -> None:
        self.unused.append(answer)


async def rested(hedge: Hedge, asked: Asked) -> None:
    """After so many quick lookups that some may be asked twice."""
    for _ in range(round(BURST / SHARE)):
        assert await hedge.first(iter([asked.now("a")]), asked.drop) == "a"
    asked.calls = 0


def each(*asks: Callable[[], Coroutine[Any, Any, str]]) -> Iterator[Coroutine[Any, Any, str]]:
    """Each is called when it is its turn."""
    return (ask() for ask in asks)


async def test_the_second_one_answers_and_the_first_is_let_go_of() -> None:
    hedge, asked = Hedge(), Asked()
    await rested(hedge, asked)
    asks = each(lambda: asked.late("first"), lambda: asked.now("second"))
    assert await hedge.first(asks, asked.drop) == "second"
    assert asked.unused == []
    asked.gate.set()
    await until(lambda: asked.unused == ["first"])


async def test_at_most_a_twentieth_is_asked_twice() -> None:
    hedge, asked = Hedge(), Asked()
    await rested(hedge, asked)
    second = Asked()
    waiting = [
        asyncio.create_task(hedge.first(each(lambda: asked.late("first"), lambda: second.late("second")), asked.drop))
        for _ in range(100)
    ]
    await until(lambda: asked.calls == 100)
    await until(lambda: second.calls >= BURST)
    await asyncio.sleep(0.5)
    assert second.calls <= BURST + 100 * SHARE
    asked.gate.set()
    assert await asyncio.gather(*waiting) == ["first"] * 100
    second.gate.set()
    await until(lambda: asked.unused == ["second"] * second.calls)


async def test_one_that_fails_leaves_it_to_the_other() -> None:
    hedge, asked = Hedge(), Asked()
    await rested(hedge, asked)
    asks = each(lambda: asked.late("first"), lambda: asked.refuse("nobody there"))
    both = asyncio.create_task(hedge.first(asks, asked.drop))
    await until(lambda: asked.refused == ["nobody there"])
    asked.gate.set()
    assert await both == "first"
    with pytest.raises(Unavailable):
        await hedge.first(each(lambda: asked.refuse("nobody there")), asked.drop)


async def test_where_one_is_dead_the_next_is_asked_whatever_was_asked_twice_before() -> None:
    hedge, asked = Hedge(), Asked()
    for _ in range(20):
        asks = each(lambda: asked.refuse("own"), lambda: asked.refuse("other"), lambda: asked.now("third"))
        assert await hedge.first(asks, asked.drop) == "third"
    with pytest.raises(Unavailable, match="own"):
        await hedge.first(each(lambda: asked.refuse("own"), lambda: asked.refuse("other")), asked.drop)
    with pytest.raises(InvalidArgument):
        await hedge.first(each(asked.wrong, lambda: asked.now("second")), asked.drop)


async def test_one_that_is_asked_for_the_dead_may_be_slow_as_well() -> None:
    hedge, asked = Hedge(), Asked()
    await rested(hedge, asked)
    asks = each(lambda: asked.refuse("own"), lambda: asked.late("second"), lambda: asked.now("third"))
    assert await hedge.first(asks, asked.drop) == "third"
    asked.gate.set()
    await until(lambda: asked.unused == ["second"])


async def test_an_answer_that_comes_as_its_caller_goes_away_is_let_go_of() -> None:
    hedge, asked = Hedge(), Asked()
    caller = asyncio.create_task(hedge.first(each(lambda: asked.late("first")), asked.drop))
    await until(lambda: asked.calls == 1)
    asked.gate.set()
    caller.cancel()
    await asyncio.wait([caller])
    assert caller.cancelled()
    await until(lambda: asked.unused == ["first"])
