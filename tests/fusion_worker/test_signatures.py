"""Signatures: what a stranger puts changes answers where nothing is signed, and none where workers sign."""

import logging
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from fusionkv.fusion_worker.transfer import signatures
from fusionkv.fusion_worker.transfer.gpudirect import DirectReader
from fusionkv.fusion_worker.transfer.signatures import Signer
from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import Entry, Hit, HitKind, Lookup
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.checksum import checksum
from fusionkv.protos.runtime.watched import BadFile
from tests.fusion_worker.oracle import CLOSE, Parts, error, oracle, random_ids
from tests.fusion_worker.stranger import Stranger
from tests.fusion_worker.test_near import HostFile
from tests.system.redis_process import RedisServer
from tests.system.shared_services import sharing
from tests.waiting import until

pytestmark = pytest.mark.system
MODEL = "qwen3"
SECRET, OTHER = "11" * 32, "22" * 32
PLAIN = oracle(MODEL)


@pytest.fixture
def parts() -> Parts:
    """Two of the chunks are of one length: they could be taken for one another."""
    return random_ids(6, 0), [random_ids(n, seed) for n, seed in ((22, 1), (22, 2), (30, 3))], random_ids(5, 99)


@pytest.fixture
async def stranger(cache_service: str, start: Any) -> AsyncIterator[Stranger]:
    made = Stranger(cache_service, await start(MODEL))
    yield made
    await made.client.close()


@pytest.fixture
def rejections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reasons that the metric counts."""
    reasons: list[str] = []

    class Counter:
        def add(self, amount: int, attributes: dict[str, str]) -> None:
            assert attributes["fusionkv.reason"] in signatures._FAULTS
            reasons.extend([attributes["fusionkv.reason"]] * amount)

    monkeypatch.setattr(signatures, "_rejected", Counter())
    monkeypatch.setattr(signatures, "_faults", logs.RateLimitedLog(signatures._faults._log))
    return reasons


def test_an_alert_sees_the_first_rejection(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus takes what a time series begins with for no increase."""
    reader = InMemoryMetricReader()
    counter = MeterProvider([reader]).get_meter("test").create_counter("rejected")
    monkeypatch.setattr(signatures, "_rejected", counter)
    Signer(key_file)
    (resource,) = reader.get_metrics_data().resource_metrics
    points = resource.scope_metrics[0].metrics[0].data.data_points
    assert {point.attributes["fusionkv.reason"]: point.value for point in points} == dict.fromkeys(
        signatures._FAULTS, 0
    )


@pytest.fixture
def signed(cached: Any, key_file: Path) -> Callable[..., Any]:
    return lambda **more: cached(MODEL, **{"signing_keys": key_file, **more})


@pytest.fixture
async def maker(signed: Any, parts: Parts) -> Any:
    """A worker that has stored the prompt, signed."""
    made = await signed()
    await made.fill(*parts, ratio=0.0)
    return made


async def answers(rig: Any, parts: Parts, **more: Any) -> Any:
    """Asks twice: reused it is what an untouched model reuses, and all recomputed full attention. Gives the first."""
    first = await rig.ask(*parts, ratio=0.0, expected=PLAIN.full_reuse(parts), **more)
    again = await rig.ask(*parts, ratio=1.0, expected=PLAIN.full_attention(parts), **more)
    assert (first.summary.degraded, again.summary.degraded) == (False, False)
    return first


async def found_out(rig: Any, parts: Parts) -> None:
    answer = await rig.ask(*parts, ratio=0.0, expected=PLAIN.full_attention(parts))
    assert answer.summary.degraded
    assert "are not those that a worker signed" in answer.summary.degraded_reason


def figures(answer: Any) -> tuple[int, int]:
    return answer.summary.entries_rejected, answer.summary.chunks_missed


async def put_all(stranger: Stranger, parts: Parts) -> None:
    for path in ([parts[0]], *([parts[0], chunk] for chunk in parts[1])):
        await stranger.put(path)


async def test_without_keys_a_stranger_changes_the_answer(stranger: Stranger, cached: Any, parts: Parts) -> None:
    await put_all(stranger, parts)
    rig = await cached(MODEL)
    for ratio, right in ((0.0, PLAIN.full_reuse(parts)), (1.0, PLAIN.full_attention(parts))):
        answer = await rig.ask(*parts, ratio=ratio)
        assert error(answer.logits[0], right) > 1000 * CLOSE
        assert (*figures(answer), answer.summary.degraded) == (0, 0, False)


async def test_with_keys_it_is_a_miss_and_replaced(
    stranger: Stranger, signed: Any, parts: Parts, rejections: list[str], caplog: Any
) -> None:
    caplog.set_level(logging.WARNING)
    await put_all(stranger, parts)
    rig = await signed()
    answer = await answers(rig, parts)
    assert figures(answer) == (4, 3)
    assert rejections == ["unsigned"] * 4
    (line,) = (line for line in caplog.messages if "rejected an entry of the cache service" in line)
    assert line.endswith(": unsigned"), "one line a minute"
    await rig.stored()
    hit = await answers(await signed(), parts)
    assert figures(hit) == (0, 0)
    assert {h.tier for h in hit.summary.hits} == {"memory"}


@pytest.mark.parametrize("behind", ["its exact path", "a longer suffix"])
async def test_what_hides_a_signed_entry_is_gone_with_the_first_question(
    behind: str, stranger: Stranger, maker: Any, signed: Any, parts: Parts
) -> None:
    """An exact entry comes before all others, and of alternatives the one with the longest common suffix."""
    system, (a, b, c), _ = parts
    await stranger.put([system, a, b, c] if behind == "its exact path" else [system, random_ids(7, 7), b, c])
    for expected in ((1, 1), (0, 0)):
        assert figures(await answers(await signed(), parts)) == expected


# Which of the signed entries a stranger puts, with what of it changed, under which path; "b" is replaced.
REPLAYED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another chunk": ("a", {}, "b"),
    "another chunk, its exact path": ("a", {}, "ab"),
    "the same chunk, its exact path": ("b", {}, "ab"),
    "another base": ("b", {"base": 1}, "b"),
    "a part of a signature": ("b", {"signature": -1}, "b"),
    "other bytes": ("b", {"data": None}, "b"),
}


@pytest.mark.parametrize("what", REPLAYED)
async def test_a_signature_is_for_one_entry(
    what: str, stranger: Stranger, maker: Any, signed: Any, parts: Parts, rejections: list[str]
) -> None:
    donor, changed, under = REPLAYED[what]
    system, chunks = parts[0], dict(zip("abc", parts[1], strict=True))
    entry, victim = [await stranger.find([system, chunks[name]]) for name in (donor, "b")]
    put = {"data": await stranger.bytes_of(entry), "signature": entry.signature[: changed.get("signature")]}
    if what == "another chunk, its exact path" or "base" in changed:
        put["base"] = entry.base + changed.get("base", 0)
    if "data" in changed:
        del put["data"]
    if under == "b":
        await stranger.client.delete([victim.key])
    await stranger.put([system, *(chunks[name] for name in under)], **put)
    rig = await signed()
    assert figures(await answers(rig, parts)) == (1, 1)
    assert rejections == ["wrong signature"]
    await rig.stored()
    assert figures(await answers(await signed(), parts)) == (0, 0)


async def test_another_tenants_entries_are_not_taken(
    stranger: Stranger, maker: Any, signed: Any, parts: Parts, rejections: list[str]
) -> None:
    path, other = [parts[0], parts[1][0]], maker.tenant + "2"
    theirs = await stranger.find(path)
    stranger.namespace = maker.servicer.loader.namespace(other)
    await stranger.put(path, data=await stranger.bytes_of(theirs), signature=theirs.signature)
    answer = await answers(await signed(), parts, tenant=other)
    assert (answer.summary.entries_rejected, rejections) == (1, ["wrong signature"])


@pytest.mark.parametrize("in_pool", [False, True])
async def test_a_service_can_not_answer_one_chunk_with_another(
    in_pool: bool, maker: Any, signed: Any, parts: Parts
) -> None:
    """Nor by the key of what the worker has in its pool, which it would not fetch."""
    rig = maker if in_pool else await signed()
    lookup = rig.servicer.cache.lookup

    async def lying(*args: Any, **more: Any) -> Lookup:
        found = await lookup(*args, **more)
        system, a, b, c = found.hits
        swapped = (Hit(HitKind.ALTERNATIVE, b.entry), Hit(HitKind.ALTERNATIVE, a.entry))
        return Lookup((system, *swapped, c), found.lease)

    rig.servicer.cache.lookup = lying
    assert (await answers(rig, parts)).summary.entries_rejected == 2


def write(file: Path, *lines: str) -> None:
    file.write_text("".join(f"{line}\n" for line in lines))


def noticed(rig: Any, caplog: Any, text: str) -> bool:
    """Whether a worker that is asked to sign has logged it."""
    assert rig.servicer.loader.lookups._signer._keys.newest
    return text in caplog.text


async def test_keys_are_rotated_without_a_restart(
    stranger: Stranger, signed: Any, parts: Parts, key_file: Path, caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    system, (a, b, _), question = parts
    old = await signed()
    await old.fill(system, [a], question, ratio=0.0)
    write(key_file, OTHER, SECRET)
    await until(lambda: noticed(old, caplog, "changed and was read again"))
    await old.fill(system, [a, b], question, ratio=0.0)
    first, second = [await stranger.find([system, chunk]) for chunk in (a, b)]
    assert first.signature[:4] != second.signature[:4]
    assert figures(await (await signed()).ask(system, [a, b], question)) == (0, 0)
    write(key_file, OTHER)
    answer = await (await signed()).ask(system, [a, b], question)
    assert figures(answer) == (2, 1), "the system prompt and A have the old key's"
    write(key_file, "no key")
    await until(lambda: noticed(old, caplog, "can't be used; keeping the last valid state"))
    answer = await old.ask(*parts, ratio=0.0)
    assert answer.summary.entries_rejected == 0
    with pytest.raises(BadFile, match=r"the signing keys .*: line 1 is not a key of 64 hex digits"):
        await signed()


async def test_another_secret_is_a_strangers(
    signed: Any, parts: Parts, tmp_path: Path, rejections: list[str]
) -> None:
    write(tmp_path / "other.keys", OTHER)
    await (await signed(signing_keys=tmp_path / "other.keys")).fill(*parts, ratio=0.0)
    assert figures(await answers(await signed(), parts)) == (4, 3)
    assert rejections == ["unknown key"] * 4


@pytest.mark.parametrize(
    "changed", ["namespace", "system", "chunk", "first", "key", "variant", "checksum", "seal", "numbers"]
)
def test_everything_is_signed(changed: str, key_file: Path) -> None:
    """Nothing of an entry's names and numbers can be another's."""
    signer, path = Signer(key_file), [b"s" * 32, b"a" * 32, b"c" * 32]
    signature = signer.sign(b"n" * 32, path, b"v" * 32, memoryview(bytes(100)), tokens=3, base=7)
    assert len(signature) == 48
    key = keys.entry_key(b"n" * 32, path, b"v" * 32)
    entry = Entry(key, 100, 3, 7, checksum(bytes(100)), "memory", b"v" * 32, signature=signature)
    names: dict[str, Any] = {"namespace": b"n" * 32, "system": b"s" * 32, "chunk": b"c" * 32, "first": False}
    assert signer.fault(*names.values(), entry) == ""
    others: list[tuple[dict[str, Any], Entry]] = []
    if changed in names:
        others = [(names | {changed: True if changed == "first" else b"o" * 32}, entry)]
    elif changed == "seal":
        flipped = (signature[:at] + bytes([signature[at] ^ 1]) + signature[at + 1 :] for at in range(4, 48))
        others = [(names, replace(entry, signature=other)) for other in (*flipped, signature[:-1], signature + b"o")]
    elif changed == "numbers":
        others = [(names, replace(entry, **{name: 8})) for name in ("size", "tokens", "base")]
    else:
        value = getattr(entry, changed)
        others = [(names, replace(entry, **{changed: v})) for v in (b"", value[:-1], value + b"o", b"o" * len(value))]
    assert [signer.fault(*n.values(), e) for n, e in others] == ["wrong signature"] * len(others)


def overwrite_memory(near: Any) -> int:
    """Overwrites the service's memory tier with zeros, as who controls that machine may; gives its bytes."""
    process = Path(f"/proc/{near.service.process.pid}")
    maps = (process / "maps").read_text()
    found = re.search(r"^([0-9a-f]+)-([0-9a-f]+) rw-s .*fusionkv-kvcache", maps, re.MULTILINE)
    assert found is not None, maps
    first, end = (int(address, 16) for address in found.groups())
    with (process / "mem").open("r+b", buffering=0) as memory:
        memory.seek(first)
        return memory.write(bytes(end - first))


MADE: dict[str, dict[str, Any]] = {
    "full_reuse": {},
    "cacheblend": {"store": "plain"},
    "prophetkv": {"store": "int8"},
    "full_reuse+versions(3)": {},
}


@pytest.mark.parametrize("recipe", MADE)
async def test_what_a_worker_makes_others_take(recipe: str, cached: Any, parts: Parts, key_file: Path) -> None:
    more = {"signing_keys": key_file, **MADE[recipe]}
    made = await (await cached(MODEL, **more)).fill(*parts, recipe=recipe)
    assert made.summary.chunks_missed == 3
    found = await (await cached(MODEL, **more)).ask(*parts, recipe=recipe)
    assert (*figures(found), found.summary.degraded) == (0, 0, False)
    assert {hit.tier for hit in found.summary.hits} == {"memory"}
    # As it is without keys, and as it is for who has other ones.
    plain = await cached(MODEL, **more | {"signing_keys": None})
    assert (await plain.ask(*parts, recipe=recipe)).summary.chunks_missed == 0


@pytest.mark.parametrize("mode", ["EXACT", "NEIGHBOURS"])
async def test_what_is_encoded_ahead_is_signed_and_replaces_what_is_not(
    mode: str, cached: Any, parts: Parts, key_file: Path
) -> None:
    system, (a, b, c), _ = parts
    assert not (await (await cached(MODEL)).encode(system, [a, b], c, mode)).existed
    first, second = [await cached(MODEL, signing_keys=key_file) for _ in range(2)]
    made = await first.encode(system, [a, b], c, mode)
    assert not made.existed, "what is there is nobody's"
    again = await second.encode(system, [a, b], c, mode)
    assert (again.key, again.existed) == (made.key, True)
    variants = {"variants": [[], [], [made.variant]]} if made.variant else {}
    assert figures(await second.ask(*parts, **variants)) == (0, 0)


@pytest.mark.parametrize(("signing", "expected"), [(True, (0, 0)), (False, (4, 3))])
async def test_a_restarted_service_has_the_signatures(signing: bool, expected: Any, near: Any, parts: Parts) -> None:
    """Entries on disk that are not signed, as after an upgrade, are encoded anew once."""
    await near.fill(parts, signing=signing)
    near.restart()
    answer = await (await near.worker(signing=True)).fill(*parts, ratio=0.0, expected=PLAIN.full_reuse(parts))
    assert figures(answer) == expected
    assert {hit.tier for hit in answer.summary.hits} == ({"disk"} if signing else set())
    assert figures(await (await near.worker(signing=True)).ask(*parts, ratio=0.0)) == (0, 0)


async def test_what_a_stranger_left_on_disk_is_not_even_read(near: Any, parts: Parts) -> None:
    rig = await near.worker(signing=True)
    stranger = Stranger(near.address, rig)
    await put_all(stranger, parts)
    await stranger.client.close()
    near.restart()
    answer = await rig.ask(*parts, ratio=0.0, expected=PLAIN.full_reuse(parts))
    assert (answer.summary.entries_rejected, answer.summary.bytes_fetched) == (4, 0)


async def test_without_a_copy_in_host_memory_nothing_is_read(near: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seals are verified on the CPU, so GPUDirect is for workers that don't sign."""
    monkeypatch.setattr(DirectReader, "find", lambda copies: DirectReader(copies, HostFile))
    assert (await near.worker()).servicer.loader.fetcher._direct is not None
    assert (await near.worker(signing=True)).servicer.loader.fetcher._direct is None


async def test_what_a_stranger_put_at_another_service_is_deleted_in_the_remote_tier(
    redis: RedisServer, launch: Any, start: Any, parts: Parts, tmp_path: Path, key_file: Path
) -> None:
    async with sharing(launch, tmp_path, redis) as services:
        first, second = services.services
        rigs = [await start(MODEL, cache=first.address, signing_keys=key_file) for _ in range(2)]
        stranger = Stranger(second.address, rigs[0])
        await put_all(stranger, parts)
        await stranger.client.close()
        await services.settled()
        assert await services.entries() == [0, 4]
        for rig, expected in zip(rigs, ((4, 3), (0, 0)), strict=True):
            answer = await rig.fill(*parts, ratio=0.0, expected=PLAIN.full_reuse(parts))
            assert figures(answer) == expected
            await services.settled()


async def test_memory_is_verified(near: Any, parts: Parts, rejections: list[str]) -> None:
    await near.fill(parts, signing=True)
    believing, signing = await near.worker(), await near.worker(signing=True)
    # Connected, with the memory in sight.
    for rig in (believing, signing):
        await rig.fill([1], [[2]], [3])
    rejections.clear()  # of what the first of them stored
    assert overwrite_memory(near) == 16 << 20
    wrong = await believing.ask(*parts, ratio=0.0)
    assert not wrong.summary.degraded
    assert error(wrong.logits[0], PLAIN.full_reuse(parts)) > 1000 * CLOSE
    await found_out(signing, parts)
    assert set(rejections) == {"other bytes"}
    # Parts are waited for in order: the request ended with the system prompt, if not with others as well.
    path = [(keys.chunk_digest(parts[0]), ())]
    found = await signing.servicer.cache.lookup(signing.namespace, path, timeout=30)
    assert found.hits[0].entry is None, "it was deleted"
