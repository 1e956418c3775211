"""What Milvus adds to the contract of retrieval engines: gateways that share it, their ends, and its own."""

import asyncio
import gc
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fusionkv.gateway.auth.tenants import Quotas, Tenants
from fusionkv.gateway.retrieval import milvus_rows as rows
from fusionkv.gateway.retrieval.base import Query, TextChunk, within
from fusionkv.gateway.retrieval.milvus import Gate, MilvusRetrieval
from fusionkv.gateway.retrieval.milvus_calls import MIN_SECONDS, REST_SECONDS
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.runtime.errors import FailedPrecondition, InvalidArgument, Unavailable
from tests.commands import run_python
from tests.gateway.conftest import Serve, Start, running_milvus
from tests.gateway.test_ingest import Rig, Topics
from tests.gateway.test_retrieval import MODEL, put, texts, vector

Two = tuple[MilvusRetrieval, MilvusRetrieval]


@pytest.fixture
async def two(milvus: str, tmp_path: Path) -> AsyncIterator[Two]:
    made = await MilvusRetrieval.open(milvus, str(tmp_path)), await MilvusRetrieval.open(milvus, str(tmp_path))
    yield made
    for engine in made:
        await engine.close()


async def test_gateways_see_each_others_changes_at_once(two: Two, milvus: str, tmp_path: Path) -> None:
    for number in range(3):
        writer, reader = two[number % 2], two[1 - number % 2]
        await put(writer, "c", "d", f"fruit {number}", *["more fruit"] * number)
        assert sorted(await texts(reader, "c", "fruit")) == [*[f"fruit {number}"], *["more fruit"] * number]
        assert [(item.name, item.chunks) for item in await reader.documents("c")] == [("d", number + 1)]
    other = await MilvusRetrieval.open(milvus, f"{tmp_path} of another tenant")
    assert await other.corpora() == []
    await other.close()
    await two[0].delete("c")
    assert await two[1].corpora() == []


async def test_a_tenant_that_comes_while_milvus_is_away_may_come_again() -> None:
    tenants = Tenants("", b"", Quotas(None), lambda _: MilvusRetrieval.open("http://127.0.0.1:1"))
    with pytest.raises(Unavailable, match="can't be opened at the moment"):
        await tenants.current()


async def test_a_change_that_fails_after_its_caller_has_left_is_no_unhandled_error() -> None:
    unhandled: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    begun, go = asyncio.Event(), asyncio.Event()

    async def away(*_: Any) -> Any:
        begun.set()
        await go.wait()
        raise Unavailable("Milvus is away")

    engine = MilvusRetrieval(Mock(query=away), "")
    leaving = asyncio.create_task(put(engine, "c", "d", "text"))
    await begun.wait()
    (change,) = engine._tasks
    leaving.cancel()
    go.set()
    await asyncio.wait([leaving, change])
    del change, leaving
    gc.collect()
    assert unhandled == []


async def test_gateways_that_replace_one_document_leave_one_version(two: Two) -> None:
    await put(two[0], "c", "d", "v first")
    versions = [[f"v{number} p{part}" for part in range(number + 1)] for number in range(6)]
    await asyncio.gather(*(put(two[number % 2], "c", "d", *parts) for number, parts in enumerate(versions)))
    (left,) = {tuple(chunk.text for chunk, _ in await engine.chunks("c", "d", MODEL)) for engine in two}
    assert list(left) in versions
    assert sorted(await texts(two[0], "c", "v0 v1 v2 v3 v4 v5", count=50)) == sorted(left)


async def test_a_document_whose_corpus_is_made_again_meanwhile_keeps_its_chunks(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gateway deletes the corpus, and makes it again, between the chunks and the document's own row."""
    await put(two[0], "c", "d", "old")
    write = two[0]._milvus.write

    async def late(name: str, changed: Sequence[Any]) -> None:
        await write(name, changed)
        monkeypatch.undo()
        await two[1].delete("c")
        await put(two[1], "c", "other", "text")

    monkeypatch.setattr(two[0]._milvus, "write", late)
    assert not await put(two[0], "c", "d", "one", "two")
    assert [chunk.text for chunk, _ in await two[1].chunks("c", "d", MODEL)] == ["one", "two"]


async def test_a_deletion_that_was_cut_short_can_be_repeated(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the end of a gateway, or of Milvus, between two of its calls."""
    await put(two[0], "c", "d", "one", "two")
    delete, name, calls = two[0]._milvus.delete, two[0]._collection("c").name, iter([True])

    async def cut(collection: str, condition: str) -> None:
        if not next(calls, False):
            raise Unavailable("Milvus: away")
        await delete(collection, condition)

    monkeypatch.setattr(two[0]._milvus, "delete", cut)
    with pytest.raises(Unavailable):
        await two[0].delete("c", "d")
    assert await texts(two[1], "c", "one") == []
    assert await two[1].delete("c", "d") == (1, 2)
    assert await two[1]._milvus.count(name, f'owner == "{rows.owner("d")}"') == 0
    assert await two[1].documents("c") == []


async def test_a_document_that_is_replaced_while_it_is_deleted_stays(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another gateway, between the reading of its row and the deletion of that."""
    await put(two[0], "c", "d", "old")
    delete = two[0]._milvus.delete

    async def late(collection: str, condition: str) -> None:
        monkeypatch.undo()
        await put(two[1], "c", "d", "new")
        await delete(collection, condition)

    monkeypatch.setattr(two[0]._milvus, "delete", late)
    await two[0].delete("c", "d")
    assert await texts(two[1], "c", "old new") == ["new"]
    assert [item.name for item in await two[0].documents("c")] == ["d"]


async def test_variants_of_a_document_that_is_deleted_meanwhile_leave_nothing(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another gateway, between the reading of the chunks and their writing."""
    await put(two[0], "c", "d", "one", "two")
    (chunk, _), *_ = await two[0].chunks("c", "d", MODEL)
    write, name = two[0]._milvus.write, two[0]._collection("c").name

    async def late(collection: str, changed: Sequence[Any]) -> None:
        await two[1].delete("c", "d")
        await write(collection, changed)

    monkeypatch.setattr(two[0]._milvus, "write", late)
    await two[0].set_variants("c", [replace(chunk, variant=b"v" * 32, neighbours=1)])
    assert await two[1]._milvus.count(name, f'owner == "{rows.owner("d")}"') == 0


async def test_a_corpus_that_two_gateways_create_has_one_model(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other gateway, whose worker has another model, stores a document while the corpus is being created."""
    create, theirs = two[0]._milvus.create, replace(MODEL, fingerprint=b"other", name="theirs")

    async def late(name: str, dim: int) -> None:
        await create(name, dim)
        await put(two[1], "c", "theirs", "text", model=theirs)

    monkeypatch.setattr(two[0]._milvus, "create", late)
    with pytest.raises(FailedPrecondition, match=r"built with another model \(theirs\) than the worker's"):
        await put(two[0], "c", "ours", "text")
    assert await two[0].check("c") == theirs
    assert [item.name for item in await two[0].documents("c")] == ["theirs"]


async def test_what_a_gateway_left_that_ended_in_the_middle_is_not_seen(two: Two) -> None:
    """Chunks of a revision that no document names: more than a search asks for, and better than what it finds."""
    engine = two[0]
    await put(engine, "c", "d", "a pear and a plum")
    name = engine._collection("c").name
    torn = [
        rows.of_chunk(TextChunk(document, i, "pear", (1,)), rows.new_revision(), vector("pear"))
        for document in ("d", "never whole")
        for i in range(40)
    ]
    await engine._milvus.write(name, torn)
    assert await texts(engine, "c", "pear") == ["a pear and a plum"]
    found = await engine.nearest("c", "", vector("pear"), 3, MODEL)
    assert [chunk.text for chunk in found] == ["a pear and a plum"]
    assert [(item.name, item.chunks) for item in await engine.documents("c")] == [("d", 1)]
    # An hour later the next change of the document takes it away.
    old = [row | {"revision": f"{time.time_ns() - 3_700_000_000_000:020d}"} for row in torn]
    await engine._milvus.write(name, old)
    await put(engine, "c", "d", "a pear again")
    assert await engine._milvus.count(name, f'owner == "{rows.owner("d")}"') == 1


async def test_a_document_is_kept_whose_gateway_sleeps_while_it_is_stored(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a laptop does: when it wakes, its clock has jumped by hours."""
    write, now = two[0]._milvus.write, time.time_ns

    async def late(name: str, changed: Sequence[Any]) -> None:
        await write(name, changed)
        monkeypatch.setattr(rows.time, "time_ns", lambda: now() + 7_200_000_000_000)

    await put(two[0], "c", "other", "some words")
    monkeypatch.setattr(two[0]._milvus, "write", late)
    await put(two[0], "c", "d", "one", "two")
    assert [chunk.text for chunk, _ in await two[1].chunks("c", "d", MODEL)] == ["one", "two"]


async def test_long_documents_come_back_whole_and_a_chunk_that_milvus_cannot_hold_is_refused(two: Two) -> None:
    parts = [f"part {number}" for number in range(1203)]
    await put(two[0], "c", "d", *parts)
    with pytest.raises(InvalidArgument, match=r"chunk 1 of 'd' is larger than a field of Milvus.*lower chunk_tokens"):
        await put(two[0], "c", "d", "fits", "x" * 70_000)
    assert [chunk.text for chunk, _ in await two[1].chunks("c", "d", MODEL)] == parts


@pytest.mark.long
@pytest.mark.slow
async def test_milvus_ends_and_starts_again(tmp_path: Path) -> None:
    """kill -9: what was acknowledged is there; calls meanwhile end as UNAVAILABLE."""
    with running_milvus(tmp_path / "data") as (url, _):
        engine = await MilvusRetrieval.open(url)
        for number in range(10):
            await put(engine, "c", f"d{number}", f"text {number}")
    with pytest.raises(Unavailable, match="Milvus"):
        await engine.candidates(Query("c", "text"), vector("text"), 5, MODEL)
    await engine.close()
    with running_milvus(tmp_path / "data") as (url, _):
        engine = await MilvusRetrieval.open(url)
        assert [item.name for item in await engine.documents("c")] == [f"d{number}" for number in range(10)]
        assert await texts(engine, "c", "7") == ["text 7"]
        await engine.close()


@pytest.mark.long
@pytest.mark.slow
async def test_nobody_waits_for_a_milvus_that_stands_still(tmp_path: Path) -> None:
    """A few find out; then calls are refused at once, but for a trial now and then, until one is answered."""

    async def seconds(expected: str, given: float = 2 * MIN_SECONDS) -> float:
        began = time.monotonic()
        with within(Deadline.after(given)), pytest.raises(Unavailable, match=expected):
            await engine.corpora()
        return time.monotonic() - began

    with running_milvus(tmp_path / "data") as (url, process):
        engine = await MilvusRetrieval.open(url)
        await put(engine, "c", "d", "text")
        process.send_signal(signal.SIGSTOP)
        for _ in range(5):
            assert await seconds("Milvus: ", MIN_SECONDS / 4) >= MIN_SECONDS / 5  # in a hurry: says nothing
        for _ in range(3):
            assert await seconds("Milvus: ") >= MIN_SECONDS
        for _ in range(20):
            assert await seconds("did not answer the last 3 calls") < MIN_SECONDS
        await asyncio.sleep(REST_SECONDS)
        trial, *others = await asyncio.gather(seconds("Milvus: "), *(seconds("did not answer") for _ in range(5)))
        assert trial >= MIN_SECONDS
        assert max(others) < MIN_SECONDS
        process.send_signal(signal.SIGCONT)
        await asyncio.sleep(REST_SECONDS)
        assert [item.name for item in await engine.corpora()] == ["c"]
        assert await texts(engine, "c", "text") == ["text"]
        await engine.close()


async def test_a_call_takes_no_longer_than_its_caller_waits(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, told = two[0], list[float]()
    client = engine._milvus._client
    await put(engine, "c", "d", "text")
    for name in ("query", "search"):
        call = getattr(client, name)

        def noted(*args: Any, call: Any = call, **named: Any) -> Any:
            told.append(named["timeout"])
            return call(*args, **named)

        monkeypatch.setattr(client, name, noted)
    with within(Deadline.after(60)):
        assert await texts(engine, "c", "text") == ["text"]
    assert len(told) >= 4
    assert max(told) <= 30
    told.clear()
    with within(Deadline.after(20)):
        assert await texts(engine, "c", "text") == ["text"]
    assert told[0] < 20
    assert told[-1] < told[0]
    told.clear()
    with within(Deadline.after(0)), pytest.raises(Unavailable, match="the deadline passed before the call began"):
        await texts(engine, "c", "text")
    assert told == []


async def test_a_list_ends_with_its_time_whatever_is_left(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page has the whole time by itself; here none takes as long, and all take longer."""
    engine, read = two[0], list[float]()
    await put(engine, "c", "d", "text")

    def page() -> list[Any]:
        time.sleep(0.05)
        read.append(0.05)
        return [{}] if len(read) < 400 else []

    pages = SimpleNamespace(next=page, close=lambda: None)
    monkeypatch.setattr(engine._milvus._client, "query_iterator", lambda *_, **__: pages)
    with (
        within(Deadline.after(1)),
        pytest.raises(Unavailable, match="the deadline passed before all documents were read"),
    ):
        await engine.documents("c")
    assert 0 < len(read) < 400


async def test_a_question_reads_no_list_of_documents(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(two[0], Topics())
    await rig.ingest("d.txt", "a horse")
    all_read = Mock(side_effect=AssertionError("all documents are read"))
    monkeypatch.setattr(two[0]._milvus._client, "query_iterator", all_read)
    assert [passage.text for passage in await rig.retrieve("horse?")] == ["a horse"]


async def test_a_gate_lets_the_lone_one_in_before_later_ones() -> None:
    gate, seen = Gate(), []
    leave = asyncio.Event()

    async def together(name: str) -> None:
        async with gate.shared():
            seen.append(name)
            await leave.wait()

    async def alone() -> None:
        async with gate.exclusive():
            seen.append("alone")
            assert gate._inside == 0

    tasks = []
    for call in (together("first"), together("second"), alone(), together("later")):
        tasks.append(asyncio.create_task(call))
        await asyncio.sleep(0.01)
    assert seen == ["first", "second"]
    leave.set()
    await asyncio.gather(*tasks)
    assert seen == ["first", "second", "alone", "later"]


@pytest.mark.long
@pytest.mark.slow
def test_two_gateways_share_one(start: Start, serve: Serve, tmp_path: Path, milvus: str) -> None:
    worker = start()
    client, _ = serve(worker, "--milvus-url", milvus)
    other, _ = serve(worker, "--milvus-url", milvus, "--data-dir", str(tmp_path / "nothing"))
    client.ingest("shared-by-two", "a.md", "The code of Bervek is 535.")
    answer = other.ask("shared-by-two", "code of Bervek?", max_tokens=1)
    assert [source.document for source in answer.sources] == ["a.md"]
    other.delete("shared-by-two")
    assert "shared-by-two" not in [corpus.name for corpus in client.list()]
    assert not (tmp_path / "nothing").exists()


def test_a_gateway_that_cannot_connect_says_so() -> None:
    flags = ("--listen", "127.0.0.1:0", "--milvus-url", "http://127.0.0.1:1")
    done = run_python("-m", "fusionkv.gateway", *flags, status=1)
    assert "can't connect to Milvus: " in done.stderr
    assert "Traceback" not in done.stderr
