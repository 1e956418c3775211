"""When a lookup is asked of a second service: only if it is late, only so often, and nothing is left of the other."""

import asyncio
from typing import Any

import pytest

from fusionkv.kvcache_service.hedge import BURST, SHARE, Hedge
from fusionkv.protos.errors import Unavailable


class Asked:
    """Answers when it is told to; counts."""

    def __init__(self) -> None:
        self.calls = 0
        self.unused: list[str] = []
        self.gate = asyncio.Event()

    async def late(self, answer: str) -> str:
        self.calls += 1
        await self.gate.wait()
        return answer

    async def now(self, answer: str) -> str:
        self.calls += 1
        return answer

    async def refuse(self) -> str:
        raise Unavailable("nobody there")

    async def drop(self, answer: str) -> None:
        self.unused.append(answer)


async def rested(hedge: Hedge, asked: Asked) -> None:
    """After so many quick lookups that some may be asked twice."""
    for _ in range(round(BURST / SHARE)):
        assert await hedge.first(asked.now("a"), lambda: None, asked.drop) == "a"
    asked.calls = 0


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_the_second_one_answers_and_the_first_is_let_go_of() -> None:
    hedge, asked = Hedge(), Asked()
    await rested(hedge, asked)
    assert await hedge.first(asked.late("first"), lambda: asked.now("second"), asked.drop) == "second"
    assert asked.unused == []
    asked.gate.set()
    await until(lambda: asked.unused == ["first"])


async def test_at_most_a_twentieth_is_asked_twice() -> None:
    hedge, asked = Hedge(), Asked()
    await rested(hedge, asked)
    second = Asked()
    waiting = [
        asyncio.create_task(hedge.first(asked.late("first"), lambda: second.late("second"), asked.drop))
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
    both = asyncio.create_task(hedge.first(asked.late("first"), asked.refuse, asked.drop))
    await until(lambda: asked.calls == 1)
    await asyncio.sleep(0.3)
    asked.gate.set()
    assert await both == "first"
    with pytest.raises(Unavailable):
        await hedge.first(asked.refuse(), lambda: None, asked.drop)
