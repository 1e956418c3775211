"""Whose KV is it: what a stranger puts changes answers where nothing is signed, and none where workers sign."""

import itertools
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionkv.fusion_worker.transfer import signatures
from fusionkv.kvcache_service.client import Hit, HitKind, Lookup
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime.checksum import checksum
from fusionkv.protos.runtime.watched import BadFile
from tests.fusion_worker.oracle import error, oracle, random_ids
from tests.fusion_worker.stranger import Stranger, of_equal_checksum
from tests.waiting import until

pytestmark = pytest.mark.system
CLOSE = 1e-4
MODEL = "qwen3"
SECRET, OTHER = "11" * 32, "22" * 32
SAME = 22  # tokens of two of the chunks, which could be taken for one another


class Text:
    """A prompt, and what an untouched model makes of it."""

    def __init__(self, plain: Any) -> None:
        self.system, self.question = random_ids(6, 0), random_ids(5, 99)
        self.chunks = [random_ids(n, seed) for n, seed in ((SAME, 1), (SAME, 2), (30, 3))]
        self.parts = self.system, self.chunks, self.question
        self.ids = [*self.system, *itertools.chain(*self.chunks), *self.question]
        self.full = plain.logits(self.ids)
        self.reused = plain.after(plain.reused(self.system, self.chunks), self.question)


@pytest.fixture
def text() -> Text:
    return Text(oracle(MODEL))


@pytest.fixture
async def stranger(cache_service: str, start: Any, tenant: str) -> AsyncIterator[Stranger]:
    made = Stranger(cache_service, await start(MODEL), tenant)
    yield made
    await made.client.close()


@pytest.fixture
def rejections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reasons that the metric counts."""
    reasons: list[str] = []

    class Counter:
        def add(self, amount: int, attributes: dict[str, str]) -> None:
            reasons.extend([attributes["fusionkv.reason"]] * amount)

    monkeypatch.setattr(signatures, "_rejected", Counter())
    monkeypatch.setattr(signatures, "_faults", logs.RateLimitedLog(signatures._faults._log))
    return reasons


@pytest.fixture
def signed(start: Any, cache_service: str, key_file: Path) -> Callable[..., Any]:
    return lambda **more: start(MODEL, **{"cache": cache_service, "signing_keys": key_file, **more})


async def answers(rig: Any, text: Text, tenant: str, **more: Any) -> Any:
    """Asks twice: reused it is what an untouched model reuses, and all recomputed full attention. Gives the first."""
    first = await rig.ask(*text.parts, tenant=tenant, ratio=0.0, **more)
    assert error(first.logits[0], text.reused) < CLOSE
    again = await rig.ask(*text.parts, tenant=tenant, ratio=1.0, **more)
    assert error(again.logits[0], text.full) < CLOSE
    assert not first.summary.degraded
    assert not again.summary.degraded
    return first


def figures(answer: Any) -> tuple[int, int]:
    return answer.summary.entries_rejected, answer.summary.chunks_missed


async def test_without_keys_a_stranger_changes_the_answer(
    stranger: Stranger, start: Any, cache_service: str, text: Text, tenant: str
) -> None:
    await stranger.put([text.system])
    for chunk in text.chunks:
        await stranger.put([text.system, chunk])
    rig = await start(MODEL, cache=cache_service)
    for ratio, right in ((0.0, text.reused), (1.0, text.full)):
        answer = await rig.ask(*text.parts, tenant=tenant, ratio=ratio)
        assert error(answer.logits[0], right) > 1000 * CLOSE
        assert figures(answer) == (0, 0)
        assert not answer.summary.degraded


async def test_with_keys_it_is_a_miss_and_replaced(
    stranger: Stranger, signed: Any, text: Text, tenant: str, rejections: list[str], caplog: Any
) -> None:
    caplog.set_level(logging.WARNING)
    await stranger.put([text.system])
    for chunk in text.chunks:
        await stranger.put([text.system, chunk])
    rig = await signed()
    answer = await answers(rig, text, tenant)
    assert figures(answer) == (4, 3)
    assert rejections == ["unsigned"] * 4
    (line,) = (line for line in caplog.messages if "rejected an entry of the cache service" in line)
    assert line.endswith(": unsigned"), "one line a minute"
    await rig.stored()
    hit = await answers(await signed(), text, tenant)
    assert figures(hit) == (0, 0)
    assert {h.tier for h in hit.summary.hits} == {"memory"}


@pytest.mark.parametrize("behind", ["its exact path", "a longer suffix"])
async def test_what_hides_a_signed_entry_is_gone_with_the_first_question(
    behind: str, stranger: Stranger, signed: Any, text: Text, tenant: str
) -> None:
    """An exact entry comes before all others, and of alternatives the one with the longest common suffix."""
    system, (a, b, c), _ = text.parts
    maker = await signed()
    await maker.fill(*text.parts, tenant=tenant, ratio=0.0)
    await stranger.put([system, a, b, c] if behind == "its exact path" else [system, random_ids(7, 7), b, c])
    assert figures(await answers(await signed(), text, tenant)) == (1, 1)
    answer = await answers(await signed(), text, tenant)
    assert figures(answer) == (0, 0)


async def replayed(stranger: Stranger, text: Text, what: str) -> None:
    """Signed entries, all there are, put under other names."""
    system, (a, b, _), _ = text.parts
    donor, victim = await stranger.find([system, a]), await stranger.find([system, b])
    assert donor is not None
    assert victim is not None
    data = await stranger.bytes_of(donor)
    of_victim = await stranger.bytes_of(victim)
    put: dict[str, Any] = {"data": data, "signature": donor.signature}
    if what == "another chunk":
        await stranger.client.delete([victim.key])
        await stranger.put([system, b], **put)
    elif what == "another chunk, its exact path":
        await stranger.put([system, a, b], **put, base=donor.base)
    elif what == "the same chunk, its exact path":
        await stranger.put([system, a, b], data=of_victim, signature=victim.signature)
    elif what == "another base":
        await stranger.client.delete([victim.key])
        await stranger.put([system, b], data=of_victim, signature=victim.signature, base=victim.base + 1)
    elif what == "a part of a signature":
        await stranger.client.delete([victim.key])
        await stranger.put([system, b], data=of_victim, signature=victim.signature[:-1])
    elif what == "other bytes":
        await stranger.client.delete([victim.key])
        await stranger.put([system, b], signature=victim.signature)


@pytest.mark.parametrize(
    "what",
    [
        "another chunk",
        "another chunk, its exact path",
        "the same chunk, its exact path",
        "another base",
        "a part of a signature",
        "other bytes",
    ],
)
async def test_a_signature_is_for_one_entry(
    what: str, stranger: Stranger, signed: Any, text: Text, tenant: str, rejections: list[str]
) -> None:
    maker = await signed()
    await maker.fill(*text.parts, tenant=tenant, ratio=0.0)
    await replayed(stranger, text, what)
    rig = await signed()
    assert figures(await answers(rig, text, tenant)) == (1, 1)
    assert rejections == ["wrong signature"]
    await rig.stored()
    assert figures(await answers(await signed(), text, tenant)) == (0, 0)


async def test_bytes_made_to_have_the_checksum_that_was_put(
    stranger: Stranger, signed: Any, text: Text, tenant: str, rejections: list[str]
) -> None:
    """XXH3 is no cryptographic hash: whoever has a signed entry can make other bytes with its checksum in no time."""
    maker = await signed()
    await maker.fill(*text.parts, tenant=tenant, ratio=0.0)
    path = [text.system, text.chunks[1]]
    entry = await stranger.find(path)
    assert entry is not None
    data = bytes(await stranger.bytes_of(entry))
    other = of_equal_checksum(data, np.random.default_rng(0).standard_normal(len(data) // 4, np.float32).tobytes())
    assert checksum(other) == entry.checksum == checksum(data)
    assert sum(a != b for a, b in zip(other, data, strict=True)) > len(data) / 2
    await stranger.client.delete([entry.key])
    await stranger.put(path, data=memoryview(other), signature=entry.signature)
    believing, rig = await signed(signing_keys=None), await signed()
    wrong = await believing.ask(*text.parts, tenant=tenant, ratio=0.0)
    assert not error(wrong.logits[0], text.reused) < CLOSE
    assert not wrong.summary.degraded
    answer = await rig.ask(*text.parts, tenant=tenant, ratio=0.0)
    assert error(answer.logits[0], text.full) < CLOSE
    assert answer.summary.degraded
    assert "are not those that a worker signed" in answer.summary.degraded_reason
    assert rejections == ["other bytes"]
    assert figures(await answers(rig, text, tenant)) == (0, 1), "it was deleted"


async def test_another_tenants_entries_are_not_taken(
    stranger: Stranger, signed: Any, text: Text, tenant: str, rejections: list[str]
) -> None:
    maker = await signed()
    await maker.fill(*text.parts, tenant=tenant, ratio=0.0)
    theirs = await stranger.find([text.system, text.chunks[0]])
    assert theirs is not None
    data = await stranger.bytes_of(theirs)
    stranger.namespace = maker.servicer.loader.namespace(tenant + "2")
    await stranger.put([text.system, text.chunks[0]], data=data, signature=theirs.signature)
    answer = await answers(await signed(), text, tenant + "2")
    assert (answer.summary.entries_rejected, rejections) == (1, ["wrong signature"])


@pytest.mark.parametrize("in_pool", [False, True])
async def test_a_service_can_not_answer_one_chunk_with_another(
    in_pool: bool, signed: Any, text: Text, tenant: str
) -> None:
    """Nor by the key of what the worker has in its pool, which it would not fetch."""
    rig = await signed()
    await rig.fill(*text.parts, tenant=tenant, ratio=0.0)
    if not in_pool:
        rig = await signed()
    lookup = rig.servicer.cache.lookup

    async def lying(*args: Any, **more: Any) -> Lookup:
        found = await lookup(*args, **more)
        system, a, b, c = found.hits
        swapped = (Hit(HitKind.ALTERNATIVE, b.entry), Hit(HitKind.ALTERNATIVE, a.entry))
        return Lookup((system, *swapped, c), found.lease)

    rig.servicer.cache.lookup = lying
    answer = await answers(rig, text, tenant)
    assert answer.summary.entries_rejected == 2


def write(file: Path, *lines: str) -> None:
    file.write_text("".join(f"{line}\n" for line in lines))


def noticed(rig: Any, caplog: Any, text: str) -> bool:
    """Whether a worker that is asked to sign has logged it."""
    assert rig.servicer.loader.locator._signer._keys.newest
    return text in caplog.text


async def test_keys_are_rotated_without_a_restart(
    stranger: Stranger, signed: Any, text: Text, tenant: str, key_file: Path, caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    system, (a, b, _), question = text.parts
    old = await signed()
    await old.fill(system, [a], question, tenant=tenant, ratio=0.0)
    write(key_file, OTHER, SECRET)
    await until(lambda: noticed(old, caplog, "changed and was read again"))
    await old.fill(system, [a, b], question, tenant=tenant, ratio=0.0)
    first, second = await stranger.find([system, a]), await stranger.find([system, b])
    assert first is not None
    assert second is not None
    assert first.signature[:4] != second.signature[:4]
    assert figures(await (await signed()).ask(system, [a, b], question, tenant=tenant)) == (0, 0)
    write(key_file, OTHER)
    answer = await (await signed()).ask(system, [a, b], question, tenant=tenant)
    assert figures(answer) == (2, 1), "the system prompt and A have the old key's"
    write(key_file, "no key")
    await until(lambda: noticed(old, caplog, "can't be used; keeping the last valid state"))
    answer = await old.ask(*text.parts, tenant=tenant, ratio=0.0)
    assert answer.summary.entries_rejected == 0
    with pytest.raises(BadFile, match=r"the signing keys .*: line 1 is not a key of 64 hex digits"):
        await signed()


async def test_another_secret_is_a_strangers(
    signed: Any, text: Text, tenant: str, tmp_path: Path, rejections: list[str]
) -> None:
    other = tmp_path / "other.keys"
    write(other, OTHER)
    maker = await signed(signing_keys=other)
    await maker.fill(*text.parts, tenant=tenant, ratio=0.0)
    assert figures(await answers(await signed(), text, tenant)) == (4, 3)
    assert rejections == ["unknown key"] * 4
