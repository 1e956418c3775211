"""Signed entries by every way they are made in, kept in and read by, and bytes that are changed on such a way."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker import models as worker_models
from fusionkv.fusion_worker.transfer.gpudirect import DirectReader
from fusionkv.kvcache_service import keys
from tests.fusion_worker.host_file import HostFile
from tests.fusion_worker.oracle import error, oracle, random_ids
from tests.fusion_worker.stranger import Stranger
from tests.system.redis_process import RedisServer
from tests.system.shared_services import Services

pytestmark = pytest.mark.system
CLOSE = 1e-4
MODEL = "qwen3"
ANCHORS = {50: tuple(range(200, 208))}


def anchored(made: worker_models.Model) -> worker_models.Model:
    return dataclasses.replace(made, anchors=ANCHORS)


@pytest.fixture
def parts() -> tuple[list[int], list[list[int]], list[int]]:
    return random_ids(6, 0), [random_ids(n, n) for n in (22, 30, 13)], random_ids(5, 99)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill9()


class Near:
    """A cache service on a unix socket, whose workers sign."""

    def __init__(self, launch: Any, start: Any, folder: Path, key_file: Path) -> None:
        self._launch, self._start, self.folder, self._keys = launch, start, folder, key_file
        self.address = f"unix:{folder}/s"
        self.serve()

    def serve(self) -> None:
        at = ("--listen", self.address, "--data-dir", str(self.folder / "data"), "--memory-bytes", "16MiB")
        self.service = self._launch("fusionkv.kvcache_service", *at)

    async def worker(self, signing: bool = True) -> Any:
        return await self._start(MODEL, cache=self.address, signing_keys=self._keys if signing else None)

    def pages(self) -> int:
        """Overwrites the service's memory tier with zeros, as who controls that machine may; gives its bytes."""
        maps = Path(f"/proc/{self.service.process.pid}/maps").read_text()
        found = re.search(r"^([0-9a-f]+)-([0-9a-f]+) rw-s .*fusionkv-kvcache", maps, re.MULTILINE)
        assert found is not None, maps
        first, end = (int(address, 16) for address in found.groups())
        with Path(f"/proc/{self.service.process.pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(first)
            return memory.write(bytes(end - first))


@pytest.fixture
def near(launch: Any, start: Any, tmp_path: Path, key_file: Path) -> Near:
    return Near(launch, start, tmp_path, key_file)


async def filled(near: Near, parts: Any, **more: Any) -> None:
    maker = await near.worker(**more)
    await maker.fill(*parts, ratio=0.0)


MADE: dict[str, dict[str, Any]] = {
    "full_reuse": {},
    "cacheblend": {"store": "plain"},
    "prophetkv": {"store": "int8"},
    "full_reuse+versions(3)": {},
    "full_reuse+anchored(50)": {"replace": anchored},
}


@pytest.mark.parametrize("recipe", MADE)
async def test_what_a_worker_makes_others_take(
    recipe: str, cache_service: str, start: Any, parts: Any, tenant: str, key_file: Path
) -> None:
    more = {"cache": cache_service, "signing_keys": key_file, **MADE[recipe]}
    maker = await start(MODEL, **more)
    made = await maker.ask(*parts, recipe=recipe, tenant=tenant)
    assert made.summary.chunks_missed == 3
    await maker.stored()
    found = await (await start(MODEL, **more)).ask(*parts, recipe=recipe, tenant=tenant)
    s = found.summary
    assert (s.entries_rejected, s.chunks_missed, s.degraded) == (0, 0, False)
    assert {hit.tier for hit in s.hits} == {"memory"}
    # As it is without keys, and as it is for who has other ones.
    assert (await (await start(MODEL, **more | {"signing_keys": None})).ask(
        *parts, recipe=recipe, tenant=tenant
    )).summary.chunks_missed == 0  # fmt: skip


@pytest.mark.parametrize("mode", ["EXACT", "NEIGHBOURS"])
async def test_what_is_encoded_ahead_is_signed_and_replaces_what_is_not(
    mode: str, cache_service: str, start: Any, parts: Any, tenant: str, key_file: Path
) -> None:
    system, (a, b, c), question = parts
    unsigned = await start(MODEL, cache=cache_service)
    assert not (await unsigned.encode(system, [a, b], c, mode, tenant)).existed
    first, second = [await start(MODEL, cache=cache_service, signing_keys=key_file) for _ in range(2)]
    made = await first.encode(system, [a, b], c, mode, tenant)
    assert not made.existed, "what is there is nobody's"
    again = await second.encode(system, [a, b], c, mode, tenant)
    assert (again.key, again.existed) == (made.key, True)
    variants = {"variants": [[], [], [made.variant]]} if made.variant else {}
    answer = await second.ask(system, [a, b, c], question, tenant=tenant, **variants)
    assert (answer.summary.entries_rejected, answer.summary.chunks_missed) == (0, 0)


async def test_entries_of_before_are_encoded_anew_once(near: Near, parts: Any) -> None:
    """As after an upgrade, also when they come from disk."""
    await filled(near, parts, signing=False)
    near.service.kill9()
    near.serve()
    rig = await near.worker()
    answer = await rig.ask(*parts, ratio=0.0)
    assert (answer.summary.entries_rejected, answer.summary.chunks_missed) == (4, 3)
    await rig.stored()
    answer = await (await near.worker()).ask(*parts, ratio=0.0)
    assert (answer.summary.entries_rejected, answer.summary.chunks_missed) == (0, 0)


async def test_a_restarted_service_has_the_signatures(near: Near, parts: Any) -> None:
    await filled(near, parts)
    near.service.kill9()
    near.serve()
    rig, plain = await near.worker(), oracle(MODEL)
    answer = await rig.ask(*parts, ratio=0.0)
    assert (answer.summary.entries_rejected, answer.summary.chunks_missed) == (0, 0)
    assert {hit.tier for hit in answer.summary.hits} == {"disk"}
    system, chunks, question = parts
    assert error(answer.logits[0], plain.after(plain.reused(system, chunks), question)) < CLOSE


async def test_what_a_stranger_left_on_disk_is_not_even_read(near: Near, parts: Any) -> None:
    system, chunks, question = parts
    rig, plain = await near.worker(), oracle(MODEL)
    stranger = Stranger(near.address, rig, "")
    for path in ([system], *([system, chunk] for chunk in chunks)):
        await stranger.put(path)
    await stranger.client.close()
    near.service.kill9()
    near.serve()
    answer = await rig.ask(*parts, ratio=0.0)
    assert (answer.summary.entries_rejected, answer.summary.bytes_fetched) == (4, 0)
    assert error(answer.logits[0], plain.after(plain.reused(system, chunks), question)) < CLOSE


async def test_without_a_copy_in_host_memory_nothing_is_read(near: Near, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seals are verified on the CPU, so GPUDirect is for workers that don't sign."""

    def find(storage: Any) -> DirectReader:
        return DirectReader(storage, HostFile)

    monkeypatch.setattr(DirectReader, "find", find)
    assert (await near.worker(signing=False)).servicer.loader._direct is not None
    assert (await near.worker()).servicer.loader._direct is None


async def test_what_a_stranger_put_at_another_service_is_deleted_in_the_remote_tier(
    redis: RedisServer, launch: Any, start: Any, parts: Any, tmp_path: Path, key_file: Path
) -> None:
    (system, chunks, question), plain = parts, oracle(MODEL)
    services = Services(launch, tmp_path, redis)
    services.start()
    services.start()
    await services.emptied()
    rig = await start(MODEL, cache=services.services[0].address, signing_keys=key_file)
    space, storage = rig.servicer.loader.namespace(""), rig.servicer.loader.storage
    for path in ([system], *([system, chunk] for chunk in chunks)):
        tokens = len(path[-1])
        data = memoryview(torch.randn(storage.size(tokens) // 4).numpy()).cast("B")
        digests, base = [keys.chunk_digest(part) for part in path], sum(map(len, path[:-1]))
        await services.clients[1].put(namespace=space, path=digests, tokens=tokens, base=base, data=data, timeout=30)
    await services.settled()
    assert await services.entries() == [0, 4]
    for rejected in (4, 0):
        answer = await rig.ask(*parts, ratio=0.0)
        assert (answer.summary.entries_rejected, answer.summary.chunks_missed) == (rejected, 3 * bool(rejected))
        assert error(answer.logits[0], plain.after(plain.reused(system, chunks), question)) < CLOSE
        await rig.stored()
        await services.settled()
        rig = await start(MODEL, cache=services.services[0].address, signing_keys=key_file)
    await services.close()


async def test_memory_is_verified(near: Near, parts: Any) -> None:
    await filled(near, parts)
    believing, signing = await near.worker(signing=False), await near.worker()
    # Connected, with the memory in sight.
    for rig in (believing, signing):
        await rig.fill([1], [[2]], [3])
    assert near.pages() == 16 << 20
    system, chunks, question = parts
    plain = oracle(MODEL)
    wrong = await believing.ask(*parts, ratio=0.0)
    assert not wrong.summary.degraded
    assert error(wrong.logits[0], plain.after(plain.reused(system, chunks), question)) > 1000 * CLOSE
    answer = await signing.ask(*parts, ratio=0.0)
    assert answer.summary.degraded
    assert "are not those that a worker signed" in answer.summary.degraded_reason
    assert error(answer.logits[0], plain.logits([*system, *(i for c in chunks for i in c), *question])) < CLOSE
