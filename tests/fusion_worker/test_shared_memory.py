"""Chunks in the memory of a cache service on the worker's machine: copied straight into the pool, under a lease."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionkv.kvcache_service.client import CacheClient, Entry
from fusionkv.protos.runtime.errors import Unavailable
from tests.fusion_worker.oracle import error, oracle, random_ids

pytestmark = pytest.mark.system
CLOSE = 1e-4


class Fetches:
    """Counts a client's fetches."""

    def __init__(self, cache: CacheClient) -> None:
        self.entries: list[Entry] = []
        self._fetch = cache.fetch
        cache.fetch = self.fetch  # type: ignore[method-assign]

    async def fetch(self, entry: Entry, into: memoryview, *, timeout: float) -> None:
        self.entries.append(entry)
        await self._fetch(entry, into, timeout=timeout)


def outlast(cache: CacheClient) -> None:
    """Every copy ends after its lease, and reads what another entry has left there by then: NaNs."""
    cache.seen = lambda entry: memoryview(b"\xff" * entry.size)  # type: ignore[method-assign]
    cache.held = lambda entry: False  # type: ignore[method-assign]


@pytest.fixture
async def filled(launch: Any, start: Any, tmp_path: Path) -> tuple[str, tuple[Any, Any, Any]]:
    """Address of a service on a unix socket that holds a prompt's chunks in memory, and the prompt."""
    parts = random_ids(5, 0), [random_ids(n, n) for n in (70, 13, 300)], random_ids(6, 99)
    at = f"unix:{tmp_path}/s"
    launch("fusionkv.kvcache_service", "--listen", at, "--data-dir", str(tmp_path / "data"))
    await (await start("qwen3", cache=at)).fill(*parts, ratio=0.0)
    return at, parts


@pytest.mark.parametrize("page_tokens", [4, 16])
async def test_chunks_are_copied_without_a_fetch(filled: Any, start: Any, page_tokens: int) -> None:
    address, (system, chunks, question) = filled
    rig, plain = await start("qwen3", cache=address, page_tokens=page_tokens), oracle("qwen3")
    fetches = Fetches(rig.servicer.cache)
    answer = await rig.ask(system, chunks, question, ratio=0.0)
    assert error(answer.logits[0], plain.after(plain.reused(system, chunks), question)) < CLOSE
    assert not answer.summary.degraded
    assert fetches.entries == []
    tokens = len(system) + sum(map(len, chunks))
    assert answer.summary.bytes_fetched == tokens * rig.model.kv.token_bytes
    full = await rig.ask(system, chunks, question, ratio=1.0)
    assert error(full.logits[0], plain.logits([*system, *itertools.chain(*chunks), *question])) < CLOSE


async def test_what_was_copied_after_the_lease_is_fetched_again(filled: Any, start: Any) -> None:
    address, (system, chunks, question) = filled
    rig, plain = await start("qwen3", cache=address), oracle("qwen3")
    outlast(rig.servicer.cache)
    fetches = Fetches(rig.servicer.cache)
    answer = await rig.ask(system, chunks, question, ratio=0.0)
    assert len(fetches.entries) == 4
    assert not answer.summary.degraded
    assert error(answer.logits[0], plain.after(plain.reused(system, chunks), question)) < CLOSE


async def test_nothing_of_it_stays_when_that_fails_too(filled: Any, start: Any) -> None:
    address, (system, chunks, question) = filled
    rig, plain = await start("qwen3", cache=address), oracle("qwen3")
    outlast(rig.servicer.cache)

    async def fail(entry: Entry, into: memoryview, *, timeout: float) -> None:
        raise Unavailable("gone")

    rig.servicer.cache.fetch = fail
    answer = await rig.ask(system, chunks, question, ratio=0.0)
    assert answer.summary.degraded
    whole = [*system, *itertools.chain(*chunks), *question]
    assert error(answer.logits[0], plain.logits(whole)) < CLOSE
    await rig.settled()
    assert torch.isfinite(rig.pool.kv).all(), "a slot holds what another entry may have left there"
