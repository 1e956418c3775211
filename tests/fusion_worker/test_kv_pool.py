"""The pool's books: any sequence of loads, pins, failures and reservations leaves every slot with one owner."""

import asyncio
import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.models import KVShape
from fusionkv.fusion_worker.pool.chunks import PooledChunk
from fusionkv.fusion_worker.pool.kv_pool import KVPool, pool_size
from fusionkv.fusion_worker.pool.slots import SlotRange
from fusionkv.protos.runtime.errors import ResourceExhausted
from tests.examples import examples
from tests.fusion_worker.oracle import byte_tokenizer, network

SHAPE = KVShape(layers=1, kv_heads=1, head_dim=2, dtype=torch.float32)
PAGE, PAGES = 4, 12


def make() -> KVPool:
    return KVPool.of(SHAPE, SHAPE.token_bytes * PAGE * PAGES + 5, PAGE, torch.device("cpu"))


def slots(runs: tuple[SlotRange, ...]) -> list[int]:
    return [s for run in runs for s in range(run.start, run.start + run.length)]


class Pool(RuleBasedStateMachine):
    """A model of the pool: which slots are whose, and what was written to them."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.pool = make()
        self.pinned: list[PooledChunk] = []
        self.fresh: list[tuple[SlotRange, ...]] = []
        self.written = 0

    def teardown(self) -> None:
        for pooled in self.pinned:
            if not pooled.ready.done():
                pooled.ready.set_result(None)
        while self.pinned:
            self.pool.unpin(self.pinned.pop())
        while self.fresh:
            self.pool.release(self.fresh.pop())
        self.pool.check_integrity(idle=True)
        self.pool.clear()
        assert self.pool.free.count == self.pool.capacity
        assert self.pool.free.runs == [SlotRange(0, PAGE * PAGES)], "what is given back joins up"
        self.loop.close()

    def room(self, tokens: int) -> bool:
        return self.pool.free.count + self.pool.chunks.idle >= self.pool.free.needed(tokens)

    async def _add(self, key: bytes, tokens: int) -> PooledChunk:
        return self.pool.add(key, tokens, 0)

    @rule(key=st.integers(0, 6), tokens=st.integers(1, 20))
    def load(self, key: int, tokens: int) -> None:
        name = bytes([key])
        found = self.pool.chunks.find(name)
        if found is not None:
            assert found.key == name
            self.pinned.append(found)
        elif self.room(tokens):
            pooled = self.loop.run_until_complete(self._add(name, tokens))
            assert len(slots(pooled.runs)) == self.pool.free.needed(tokens)
            self.write(pooled.runs)
            self.pinned.append(pooled)
        else:
            with pytest.raises(ResourceExhausted):
                self.loop.run_until_complete(self._add(name, tokens))

    def write(self, runs: tuple[SlotRange, ...]) -> None:
        self.written += 1
        self.pool.kv[0, 0, slots(runs), 0, 0] = self.written

    @precondition(lambda self: any(not r.ready.done() for r in self.pinned))
    @rule(fail=st.booleans(), data=st.data())
    def settle(self, fail: bool, data: Any) -> None:
        pooled = data.draw(st.sampled_from([r for r in self.pinned if not r.ready.done()]))
        if fail:
            pooled.ready.set_exception(RuntimeError("load failed"))
        else:
            pooled.ready.set_result(None)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        pooled = data.draw(st.sampled_from(self.pinned))
        if not pooled.ready.done() and pooled.pins == 1:
            pooled.ready.set_result(None)  # a loader holds its pin until it has settled
        self.pinned.remove(pooled)
        self.pool.unpin(pooled)

    @rule(tokens=st.integers(0, 20))
    def reserve(self, tokens: int) -> None:
        if self.room(tokens):
            runs = self.pool.reserve(tokens)
            self.write(runs)
            self.fresh.append(runs)
        else:
            with pytest.raises(ResourceExhausted):
                self.pool.reserve(tokens)

    @precondition(lambda self: self.fresh)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        runs = data.draw(st.sampled_from(self.fresh))
        self.fresh.remove(runs)
        self.pool.release(runs)

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        assert self.pool.chunks.idle == 0

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        # A chunk whose loading failed leaves the books at once, its slots with the last one who pins it.
        lost = {id(r): r for r in self.pinned if self.pool.chunks._by_key.get(r.key) is not r}
        if not lost:
            self.pool.check_integrity()
        owners = [slots(r.runs) for r in {id(r): r for r in self.pinned}.values()]
        owners += [slots(runs) for runs in self.fresh]
        used = [s for owned in owners for s in owned]
        assert len(used) == len(set(used))
        assert not set(used) & set(slots(tuple(self.pool.free.runs)))
        if not lost:
            assert self.pool.free.count + self.pool.chunks.idle + len(used) == self.pool.capacity

    @invariant()
    def what_is_pinned_is_not_evicted(self) -> None:
        for runs in [*(r.runs for r in self.pinned), *self.fresh]:
            marks = self.pool.kv[0, 0, slots(runs), 0, 0]
            assert len(marks.unique()) <= 1, "somebody else wrote to these slots"


Pool.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestPool = Pool.TestCase


async def test_the_least_recently_used_goes_first() -> None:
    pool = make()
    for name in (b"a", b"b", b"c"):
        pooled = pool.add(name, 16, 0)
        pooled.ready.set_result(None)
        pool.unpin(pooled)
    pool.unpin(pool.chunks.find(b"a"))  # type: ignore[arg-type]
    pool.release(pool.reserve(4))
    assert [pool.chunks.find(name) is not None for name in (b"a", b"b", b"c")] == [True, False, True]


async def test_what_is_hidden_goes_with_its_last_pin() -> None:
    """Also if its load came to its end all the same."""
    pool = make()
    hidden = pool.add(b"a", PAGE, 0)
    pool.chunks.hide(hidden)
    hidden.ready.set_result(None)
    assert pool.chunks.find(b"a") is None
    pool.unpin(hidden)
    pool.check_integrity(idle=True)
    assert pool.free.count == pool.capacity


async def test_room_is_waited_for_and_given_in_turn() -> None:
    pool = make()
    held = pool.reserve(PAGE * PAGES)
    order = []

    async def take(name: str, tokens: int) -> None:
        async with pool.turn:
            await pool.room([tokens])
            order.append(name)
            pool.reserve(tokens)

    tasks = [asyncio.create_task(take(n, t)) for n, t in (("big", 40), ("small", 4), ("last", 1))]
    await asyncio.sleep(0)  # each runs until it waits
    assert order == []
    assert pool.turn.locked()
    tasks[1].cancel()
    pool.release(held)
    await asyncio.wait(tasks)
    assert order == ["big", "last"]
    pool.check_integrity()


class Recorded:
    """In place of a GPU's event."""

    def __init__(self) -> None:
        self.streams: list[str] = []

    def record(self, stream: str) -> None:
        self.streams.append(stream)


async def test_a_load_waits_for_the_kernels_that_used_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"stream of {device}")
    pool = make()
    pool.kv = SimpleNamespace(is_cuda=True, device="cuda")  # type: ignore[assignment]
    first = pool.add(bytes(16), PAGE, 0)
    assert first.freed is None, "nothing used them"
    first.ready.set_result(None)
    pool.unpin(first)
    pool.clear()
    second, third = (pool.add(bytes([n]) * 16, PAGE, 0) for n in (1, 2))
    assert isinstance(second.freed, Recorded)
    assert second.freed.streams == ["stream of cuda"], "where the steps are launched"
    assert third.freed is second.freed, "nothing was given back meanwhile"


def test_the_size_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 << 30, 80 << 30))
    model = models.wrap("llama", copy.deepcopy(network("llama")), byte_tokenizer(), bytes(32), 100)
    gpu = replace(model, device=torch.device("cuda"))
    assert [pool_size(5, each) for each in (model, gpu)] == [5, 5]
    assert [pool_size(0, each) for each in (model, gpu)] == [1 << 30, 52 << 30]


async def test_what_fits_no_empty_pool_is_refused_at_once() -> None:
    pool = make()
    with pytest.raises(ResourceExhausted, match="raise pool_bytes to"):
        await pool.room([PAGE * PAGES, 1])
    with pytest.raises(ResourceExhausted, match="the pool holds 48"):
        await pool.room([1], [PAGE * PAGES])
    with pytest.raises(ValueError, match="less than one page"):
        KVPool.of(SHAPE, 10, PAGE, torch.device("cpu"))
