"""The contract of retrieval engines, run over each of them."""

import asyncio
import contextlib
import errno
import gc
import hashlib
import itertools
import os
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fusionkv.gateway.auth.tenants import Quotas, Tenants
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.embed.base import Embedder, Reranker
from fusionkv.gateway.retrieval import embedded, indexed_table, milvus, milvus_rows
from fusionkv.gateway.retrieval.base import HybridSearch, Query, Retrieval, TextChunk, rank
from fusionkv.gateway.retrieval.duplicates import distinct
from fusionkv.gateway.retrieval.embedded import EmbeddedRetrieval
from fusionkv.gateway.retrieval.milvus import MilvusRetrieval
from fusionkv.gateway.tokens import ModelIdentity
from fusionkv.protos.runtime.errors import FailedPrecondition, NotFound, Unavailable
from tests.gateway.conftest import Reopen
from tests.waiting import until

MODEL = ModelIdentity(b"f" * 32, b"t" * 32, "an embedder", "a model")
WORDS_ALONE = replace(MODEL, embedder="")
DIM = 16


@pytest.fixture(params=["embedded", pytest.param("milvus", marks=pytest.mark.slow)])
async def engine(request: pytest.FixtureRequest, tmp_path: Path, reopen: Reopen) -> AsyncIterator[Retrieval]:
    if request.param == "embedded":
        yield await reopen(tmp_path)
    else:
        made = await MilvusRetrieval.open(request.getfixturevalue("milvus"), str(tmp_path))
        yield made
        await made.close()


def vector(text: str) -> np.ndarray:
    """A unit vector that depends on the text alone."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    made = np.random.default_rng(seed).standard_normal(DIM).astype(np.float32)
    return made / np.linalg.norm(made)


def chunks(document: str, *texts: str) -> list[TextChunk]:
    return [TextChunk(document, i, t, tuple(t.encode())) for i, t in enumerate(texts)]


async def put(engine: Retrieval, corpus: str, document: str, *texts: str, model: ModelIdentity = MODEL) -> bool:
    vectors = np.stack([vector(t) for t in texts])
    return await engine.replace(corpus, document, chunks(document, *texts), vectors, model)


def leftovers(folder: Path) -> list[Path]:
    return [*folder.glob("deleted/*"), *folder.glob("mov*/*")]


async def texts(engine: Retrieval, corpus: str, question: str, count: int = 5, dense: float = 0.0) -> list[str]:
    found = await engine.candidates(Query(corpus, question), vector(question), 50, MODEL)
    return [chunk.text for chunk, _ in rank([c for c in found if dense or c.words], dense, count)]


async def test_stored_chunks_come_back_whole(engine: Retrieval) -> None:
    assert not await put(engine, "c", "d/1.txt", "alpha beta", "gamma")
    found = await engine.chunks("c", "d/1.txt", MODEL)
    assert [c for c, _ in found] == chunks("d/1.txt", "alpha beta", "gamma")
    np.testing.assert_array_equal([v for _, v in found], [vector("alpha beta"), vector("gamma")])
    assert await engine.chunks("c", "other", MODEL) == []


async def test_a_document_ingested_again_replaces_itself(engine: Retrieval) -> None:
    await put(engine, "c", "d", "one apple", "two pears", "three plums")
    await put(engine, "c", "e", "four kiwis")
    assert await put(engine, "c", "d", "five figs")
    for question, found in (("apple pears plums", []), ("figs", ["five figs"]), ("kiwis", ["four kiwis"])):
        assert await texts(engine, "c", question) == found
    assert [(i.name, i.chunks, i.tokens) for i in await engine.documents("c")] == [("d", 1, 9), ("e", 1, 10)]


async def test_readers_see_old_or_new_and_never_both(engine: Retrieval) -> None:
    await put(engine, "c", "d", "fruit old", "fruit old again")
    seen = set()

    async def read() -> None:
        while not writing.done():
            seen.add(tuple(sorted(await texts(engine, "c", "fruit"))))

    async def write() -> None:
        for version in range(20):
            await put(engine, "c", "d", *[f"fruit v{version} p{i}" for i in range(1 + version % 3)])

    writing = asyncio.create_task(write())
    await asyncio.gather(writing, read(), read())
    for found in seen:
        (version,) = {t.split()[1] for t in found}
        assert len(found) == (2 if version == "old" else 1 + int(version[1:]) % 3)
    assert len(seen) > 1


async def test_a_document_replaced_between_the_two_searches_is_found_whole(
    tmp_path: Path, reopen: Reopen, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await reopen(tmp_path)
    await put(engine, "c", "d", "old text")
    corpus = engine._tables["c"]
    search = corpus.by_meaning

    async def late(*given: Any) -> pa.Table:
        monkeypatch.undo()
        await put(engine, "c", "d", "new text", "more new text")
        return await search(*given)

    monkeypatch.setattr(corpus, "by_meaning", late)
    found = await engine.candidates(Query("c", "text"), vector("text"), 50, MODEL)
    assert sorted(candidate.chunk.text for candidate in found) == ["more new text", "new text"]


WORDS = ["Velnora", "4711", "x_12", "naïve", "O'Neil", "日本語", "w" * 120, "running"]


async def test_words_are_found_as_they_are(engine: Retrieval) -> None:
    pages = [text for i in range(30) for text in (f"page {i} runs the same filler", f"here is text{i}")]
    await put(engine, "c", "filler", *pages)
    for number, word in enumerate(WORDS):
        await put(engine, "c", f"needle {number}", f"there {word} stands")
    for word in WORDS:
        assert await texts(engine, "c", f"{word}?", count=1) == [f"there {word} stands"]


async def test_no_question_is_a_syntax_error(engine: Retrieval) -> None:
    await put(engine, "c", "d", "some text")
    for question in ("?!...", '"red fox"', '"fox"', '"', "''\";--", "a AND (b OR", "+x -y ~z^2 *", "\u200b"):
        assert len(await engine.candidates(Query("c", question), vector("q"), 10, MODEL)) == 1


async def test_dense_search_finds_what_shares_no_word(engine: Retrieval) -> None:
    for i in range(50):
        await put(engine, "c", f"d{i:02}", f"text number {i}")
    found = await engine.candidates(Query("c", "zzz"), vector("text number 7"), 3, MODEL)
    best = max(found, key=lambda c: c.cosine)
    assert best.chunk.document == "d07"
    assert best.cosine == pytest.approx(1, abs=1e-5)
    assert [c.document for c in await engine.nearest("c", "", vector("text number 9"), 1, MODEL)] == ["d09"]


async def test_without_an_embedder_words_alone_are_searched(engine: Retrieval) -> None:
    for i in range(20):
        chunk = TextChunk("d", i, f"text number{i} of some length", (i,))
        await engine.replace("c", f"d{i:02}", [replace(chunk, document=f"d{i:02}")], np.zeros((1, 0)), WORDS_ALONE)
    found = await engine.candidates(Query("c", "what is number7?"), None, 50, WORDS_ALONE)
    assert [(c.chunk.document, c.cosine) for c in found] == [("d07", 0.0)]
    ((_, stored),) = await engine.chunks("c", "d07", WORDS_ALONE)
    assert stored.shape == (0,)
    near = await engine.nearest("c", "number9 and what is like it", None, 1, WORDS_ALONE)
    assert [c.document for c in near] == ["d09"]
    assert [(i.model, i.embedder) for i in await engine.corpora()] == [("a model", "")]
    with pytest.raises(FailedPrecondition, match="with no embeddings, but the gateway's embedder is"):
        await put(engine, "c", "more", "text")


async def test_only_documents_with_all_of_the_metadata_are_found(engine: Retrieval) -> None:
    known = {
        "a": {"year": "2020", "by": 'O\'Neil "x"'},
        "b": {"year": "2020"},
        "c": {"year": "2021"},
        "d": {"город": "Köln"},
        "e": {"\x01": '\b\x02\n\\"'},
    }
    for name, metadata in known.items():
        chunk = TextChunk(
            name, 0, f"text {name}", (1,), title="T", source="/x", metadata=tuple(sorted(metadata.items()))
        )
        await engine.replace("c", name, [chunk], vector(name)[None], MODEL)
        assert [c for c, _ in await engine.chunks("c", name, MODEL)] == [chunk]
    assert [i.source for i in await engine.documents("c")] == ["/x"] * 5

    async def found(**where: str) -> list[str]:
        candidates = await engine.candidates(Query("c", "text", where), vector("q"), 50, MODEL)
        return sorted(c.chunk.document for c in candidates)

    assert await found() == ["a", "b", "c", "d", "e"]
    assert await found(year="2020") == ["a", "b"]
    assert await found(year="2020", by='O\'Neil "x"') == ["a"]
    assert await found(year="202") == await found(by="2020") == []
    assert await found(город="Köln") == ["d"]
    assert await found(город="Koln") == []
    assert await found(**known["e"]) == ["e"]


class Meanings(Embedder, Reranker):
    """Embeds as `vector`, and takes the longest text for the best."""

    name, dim = "an embedder", DIM

    async def embed(self, texts: Sequence[str], *, question: bool = False, tenant: str = "") -> np.ndarray:
        return np.stack([vector(text) for text in texts])

    async def score(self, question: str, passages: Sequence[str]) -> list[float]:
        assert len(set(passages)) == len(passages)
        return [float(len(passage)) for passage in passages]

    async def close(self) -> None:
        pass


PAGES = [f"the pump {text}" for text in ("is blue", "is old and loud", "delivers 42 litres", "stands in the cellar")]


@pytest.mark.parametrize(("embedder", "model"), [(None, WORDS_ALONE), (Meanings(), MODEL)])
async def test_each_text_is_found_once(engine: Retrieval, embedder: Embedder | None, model: ModelIdentity) -> None:
    """However many copies of it there are: more than an engine returns."""
    search = HybridSearch(GatewayConfig(), embedder)
    copies = [*PAGES[:1] * 150, *(f"{PAGES[1]}{' ' * n}" for n in range(150)), *PAGES[2:]]
    await engine.replace("c", "d", chunks("d", *copies), await search.vectors(copies, {}), model)
    await engine.replace("c", "e", chunks("e", " The PUMP\nis blue "), await search.vectors(PAGES[:1], {}), model)
    for weight, reranker in itertools.product((0.0, 0.6, 1.0), (None, Meanings())):
        search = HybridSearch(GatewayConfig(dense_weight=weight), embedder, reranker)
        found = await search.search(engine, Query("c", "the pump is blue"), 4, model)
        assert sorted(" ".join(chunk.text.lower().split()) for chunk, _ in found) == sorted(PAGES)
        assert len(await search.search(engine, Query("c", "the pump is blue"), 2, model)) == 2


VALLEY = "The Corran Valley Line runs from Corran to Pell along the river and " + " ".join(
    f"by stop {n}" for n in range(60)
)


@pytest.mark.parametrize(
    ("text", "question", "same"),
    [
        (VALLEY, "Where?", True),
        (f" {VALLEY.upper()}\n", "Where?", True),
        (VALLEY.replace(" and ", ", and then "), "Where?", True),
        (f"{VALLEY} Printed on 3 May.", "Where?", True),
        (VALLEY.replace("stop 7", "stop Alder"), "Where?", True),
        (VALLEY.replace("stop 7", "stop Alder"), "Where is Alder?", False),
        (VALLEY[: len(VALLEY) // 2], "Where?", False),
        (VALLEY.replace("by", "near"), "Where?", False),
        ("The Corran Valley Line runs from Corran to Pell along the river", "Where?", False),
    ],
)
def test_texts_that_differ_in_few_words_are_the_same(text: str, question: str, same: bool) -> None:
    assert distinct([VALLEY, text], question, 2) == ([0] if same else [0, 1])
    assert distinct([text, VALLEY], question, 2) == ([0] if same else [0, 1])


@pytest.mark.parametrize(
    ("one", "other", "question"),
    [
        ("上海的密码是五三六。", "北京的密码是五三五。", "北京和上海的密码?"),
        ("นครพนม ", "นครปฐม ", "นครปฐมอยู่ที่ไหน"),
        ("राम ", "रोम ", "रोम कहाँ है?"),
        ("Hauptgasse ", "Hauptstraße ", "Was ist an der Hauptstraße?"),
        ("η λεωφόρος ", "η οδός ", "Πού είναι η οδός;"),
    ],
)
def test_texts_that_differ_in_a_word_of_the_question_are_others_in_any_language(
    one: str, other: str, question: str
) -> None:
    texts = [start + " ".join(f"stop {n}" for n in range(99)) for start in (one, other)]
    assert distinct(texts, question, 2) == [0, 1]
    assert distinct(texts, "Where?", 2) == [0]


async def test_the_nearest_of_texts_without_spaces_share_characters(tmp_path: Path, reopen: Reopen) -> None:
    engine = await reopen(tmp_path)
    for name, text in {"a": "北京的天气很好。", "b": "上海的密码是五三五。", "c": "上海的天气不好。"}.items():
        await engine.replace("c", name, chunks(name, text), np.zeros((1, 0)), WORDS_ALONE)
    near = await engine.nearest("c", "上海的天气怎么样?", None, 2, WORDS_ALONE)
    assert [chunk.document for chunk in near] == ["c", "a"]


def test_short_texts_are_the_same_only_if_they_are_equal() -> None:
    texts = [
        "The code of Ada is 17.",
        "The code of Ada is 18.",
        "the code of Ada  is 17.",
        "",
        " ",
        "love me",
        "love me love me",
    ]
    assert distinct(texts, "code?", 9) == [0, 1, 3, 5, 6]
    assert distinct(["日本語の文章", "日本語の文書"], "文", 9) == [0, 1]


@pytest.mark.parametrize(
    ("language", "question", "found"), [("english", "running horses", [0]), ("german", "Pferde des Reiters", [1, 2])]
)
async def test_stems_are_those_of_the_language(
    tmp_path: Path, language: str, question: str, found: list[int]
) -> None:
    engine = await EmbeddedRetrieval.open(tmp_path, language)
    await put(engine, "c", "d", "a horse that runs", "ein Reiter mit Pferd", "the of is des mit")
    candidates = await engine.candidates(Query("c", question), vector("q"), 50, MODEL)
    # German "des" and "mit" are words like any other.
    assert sorted(c.chunk.position for c in candidates if c.words) == found
    await engine.close()


async def moved(engine: Retrieval, model: ModelIdentity, dim: int) -> list[int]:
    """Moves corpus c: chunks are in capitals then, with vectors of ones."""

    async def rewrite(chunks: Sequence[TextChunk], vectors: np.ndarray) -> tuple[Sequence[TextChunk], np.ndarray]:
        made = [replace(c, text=c.text.upper(), ids=(7,), variant=b"") for c in chunks]
        return made, np.ones((len(vectors), dim), np.float32)

    return [done async for done in engine.move("c", rewrite, model)]


async def same(chunks: Sequence[TextChunk], vectors: np.ndarray) -> tuple[Sequence[TextChunk], np.ndarray]:
    return chunks, vectors


OTHER = replace(MODEL, fingerprint=b"g" * 32, embedder="another", name="a new one")


async def test_a_corpus_is_moved_to_another_model_and_embedder(tmp_path: Path, reopen: Reopen) -> None:
    engine = await reopen(tmp_path)
    for name in ("a", "b"):
        await put(engine, "c", name, f"{name} one", f"{name} two")
    assert await moved(engine, OTHER, 3) == [2, 2]
    for _ in range(2):
        stored = [(c.text, c.ids) for c, _ in await engine.chunks("c", "b", OTHER)]
        assert stored == [("B ONE", (7,)), ("B TWO", (7,))]
        assert [(i.chunks, i.model, i.embedder) for i in await engine.corpora()] == [(4, "a new one", "another")]
        assert leftovers(tmp_path) == []
        found = await engine.candidates(Query("c", "one"), np.ones(3, np.float32), 50, OTHER)
        assert sorted(c.chunk.text for c in found if c.words) == ["A ONE", "B ONE"]
        # A move indexes all rows. LanceDB refuses phrase queries of indexed rows.
        quoted = await engine.candidates(Query("c", '"one"'), np.ones(3, np.float32), 50, OTHER)
        assert sorted(c.chunk.text for c in quoted if c.words) == ["A ONE", "B ONE"]
        engine = await reopen(tmp_path)
    await engine.replace("c", "e", [TextChunk("e", 0, "x", (1,))], np.ones((1, 3), np.float32), OTHER)
    await engine.delete("c", "e")
    with pytest.raises(FailedPrecondition, match="another model"):
        await put(engine, "c", "d", "text")
    await moved(engine, replace(OTHER, embedder=""), 0)
    for name in ("a", "b"):
        await engine.delete("c", name)
    assert await moved(engine, MODEL, DIM) == []
    await put(engine, "c", "d", "text")


async def test_a_move_that_fails_or_is_left_changes_nothing(tmp_path: Path, reopen: Reopen) -> None:
    engine = await reopen(tmp_path)
    await put(engine, "c", "a", "one")
    await put(engine, "c", "b", "two")

    async def fail(chunks: Sequence[TextChunk], vectors: np.ndarray) -> tuple[Sequence[TextChunk], np.ndarray]:
        if chunks[0].document == "b":
            raise Unavailable("no embedder")
        return chunks, vectors

    with pytest.raises(Unavailable):
        _ = [done async for done in engine.move("c", fail, OTHER)]
    leaving = engine.move("c", fail, OTHER)
    assert await anext(leaving) == 1
    await leaving.aclose()  # type: ignore[attr-defined]
    assert sorted(await texts(engine, "c", "one two")) == ["one", "two"]
    assert leftovers(tmp_path) == []
    await put(engine, "c", "d", "three")


async def test_what_changes_during_a_move_waits_for_it(tmp_path: Path, reopen: Reopen) -> None:
    engine = await reopen(tmp_path)
    for name in ("a", "b", "c"):
        await put(engine, "c", name, "text")
    go = asyncio.Event()

    async def wait(chunks: Sequence[TextChunk], vectors: np.ndarray) -> tuple[Sequence[TextChunk], np.ndarray]:
        await go.wait()
        return chunks, vectors

    async def move() -> None:
        _ = [done async for done in engine.move("c", wait, replace(MODEL, embedder="another"))]

    moving = asyncio.create_task(move())
    changes = [asyncio.create_task(change) for change in (put(engine, "c", "d", "x"), engine.delete("c", "a"))]
    assert await texts(engine, "c", "text") == ["text"] * 3
    go.set()
    await moving
    with pytest.raises(FailedPrecondition, match="embeddings of another"):
        await changes[0]
    assert await changes[1] == (1, 1)
    assert [i.name for i in await engine.documents("c")] == ["b", "c"]
    gone = asyncio.create_task(move())
    await asyncio.sleep(0)
    assert await engine.delete("c") == (2, 2)
    await asyncio.gather(gone, return_exceptions=True)
    assert await engine.corpora() == []


async def test_changes_during_a_move_whose_callers_leave_are_no_unhandled_errors(
    tmp_path: Path, reopen: Reopen
) -> None:
    engine = await reopen(tmp_path)
    await put(engine, "c", "a", "text")
    unhandled: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    moving = engine.move("c", same, OTHER)
    assert await anext(moving) == 1
    leaving = [asyncio.create_task(change) for change in (put(engine, "c", "d", "x"), engine.delete("c", "none"))]
    await until(lambda: len(engine._tables["c"]._changes) == 2)
    waiting = [*engine._tables["c"]._changes]
    for task in leaving:
        task.cancel()
    assert [done async for done in moving] == []
    await asyncio.wait([*leaving, *waiting])
    del task, leaving, waiting
    gc.collect()
    assert unhandled == []


async def test_a_deletion_ends_a_move_at_its_next_document(tmp_path: Path, reopen: Reopen) -> None:
    engine = await reopen(tmp_path)
    for name in ("a", "b", "c"):
        await put(engine, "c", name, "text")
    moving = engine.move("c", same, OTHER)
    assert await anext(moving) == 1
    deleting = asyncio.create_task(engine.delete("c"))
    await until(lambda: "c" not in engine._tables)
    with pytest.raises(NotFound, match="corpus 'c' was deleted while it was moved"):
        await anext(moving)
    assert await deleting == (3, 3)


async def test_the_second_of_two_moves_at_once_says_that_the_corpus_was_moved(tmp_path: Path, reopen: Reopen) -> None:
    engine = await reopen(tmp_path)
    await put(engine, "c", "d", "text")
    first, second = asyncio.create_task(moved(engine, OTHER, 3)), asyncio.create_task(moved(engine, OTHER, 3))
    assert await first == [1]
    with pytest.raises(FailedPrecondition, match="corpus 'c' was moved or replaced meanwhile"):
        await second
    assert [c.text for c, _ in await engine.chunks("c", "d", OTHER)] == ["TEXT"]


async def test_a_move_whose_indexes_can_not_be_made_changes_nothing(tmp_path: Path, reopen: Reopen) -> None:
    engine = await reopen(tmp_path)
    await put(engine, "c", "d", "text")
    engine._language = "Klingon"
    with pytest.raises(ValueError, match="Klingon"):
        await moved(engine, OTHER, 3)
    assert await texts(engine, "c", "text") == ["text"]


async def test_a_move_that_is_left_at_its_end_is_finished(tmp_path: Path, reopen: Reopen) -> None:
    engine = await reopen(tmp_path)
    await put(engine, "c", "d", "text")
    old = engine._tables["c"]
    moving = asyncio.create_task(moved(engine, OTHER, 3))
    while not old._gone:  # noqa: ASYNC110 - until the new table is in its place, but not open
        await asyncio.sleep(0)
    moving.cancel()
    await asyncio.gather(moving, return_exceptions=True)
    async with asyncio.timeout(10):
        assert [c.text for c, _ in await engine.chunks("c", "d", OTHER)] == ["TEXT"]
        await engine.replace("c", "e", [TextChunk("e", 0, "x", (1,))], np.ones((1, 3), np.float32), OTHER)
        with pytest.raises(FailedPrecondition, match="another model"):
            await put(engine, "c", "d", "text")


async def test_readers_wait_for_the_end_of_a_move(tmp_path: Path, reopen: Reopen) -> None:
    engine = await reopen(tmp_path)
    for i in range(10):
        await put(engine, "c", f"d{i}", f"text {i}")
    old = engine._tables["c"]
    moving = asyncio.create_task(moved(engine, MODEL, DIM))
    while not moving.done():
        assert len(await engine.chunks("c", "d3", MODEL)) == 1
        if old._gone:
            assert len(await engine.candidates(Query("c", "text"), vector("text"), 50, MODEL)) == 10
    await moving


async def test_a_move_leaves_nothing_to_the_old_table(
    tmp_path: Path, reopen: Reopen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even the indexing of its last changes, which would find the files of the new one."""
    monkeypatch.setattr(indexed_table, "_IDLE_SECONDS", 0.0)
    engine = await reopen(tmp_path)
    for i in range(3):
        await put(engine, "c", f"d{i}", "text")
    moving = engine.move("c", same, OTHER)
    lock = engine._tables["c"]._lock
    await anext(moving)
    await until(lambda: bool(lock._waiters))
    _ = [done async for done in moving]
    assert "not added to the indexes" not in caplog.text


async def test_a_move_that_was_cut_short_at_its_end_is_finished(tmp_path: Path, reopen: Reopen) -> None:
    engine = await reopen(tmp_path)
    await put(engine, "c", "d", "old")
    await put(engine, "new", "d", "new")
    await engine.close()
    (tmp_path / "moved").mkdir()
    os.rename(tmp_path / "corpora/corpus-new.lance", tmp_path / "moved/corpus-c.lance")
    (tmp_path / "moving/x").mkdir(parents=True)
    engine = await reopen(tmp_path)
    assert [i.name for i in await engine.corpora()] == ["c"]
    assert await texts(engine, "c", "old new") == ["new"]
    assert leftovers(tmp_path) == []


async def test_equal_scores_are_ordered_by_document_and_position(engine: Retrieval) -> None:
    for name in ("b", "c", "a"):
        await put(engine, "c", name, "same text", "same text")
    found = await engine.candidates(Query("c", "same"), vector("q"), 50, MODEL)
    assert [c.key for c, _ in rank(found, 0.3, 6)] == [(d, p) for d in "abc" for p in (0, 1)]
    near = await engine.nearest("c", "", vector("same text"), 3, MODEL)
    assert [c.key for c in near] == [("a", 0), ("a", 1), ("b", 0)]


@pytest.mark.long
async def test_another_model_is_refused(engine: Retrieval) -> None:
    await put(engine, "c", "d", "text")
    other = replace(MODEL, fingerprint=b"g" * 32)
    with pytest.raises(FailedPrecondition, match=r"with another model \(a model\) than .*: run `fusionkv move c`"):
        await put(engine, "c", "e", "text", model=other)
    with pytest.raises(FailedPrecondition, match="another prompt template"):
        await engine.candidates(Query("c", "q"), vector("q"), 5, replace(MODEL, tokenizer=b"u" * 32))
    for embedder, now in (("another", "the gateway's embedder is another"), ("", "the gateway has no embedder")):
        with pytest.raises(FailedPrecondition, match=f"with embeddings of an embedder, but {now}: run"):
            await engine.chunks("c", "d", replace(MODEL, embedder=embedder))
    await engine.delete("c")
    await put(engine, "c", "d", "text", model=other)


async def test_what_is_not_there_is_not_found(engine: Retrieval) -> None:
    with pytest.raises(NotFound, match="no corpus 'c'"):
        await engine.documents("c")
    await put(engine, "c", "d", "text")
    await engine.check("c")
    with pytest.raises(NotFound, match="no corpus 'none'"):
        await engine.check("none")
    with pytest.raises(NotFound, match="no document 'x': list the corpus"):
        await engine.delete("c", "x")
    assert await engine.delete("c", "d") == (1, 1)
    assert await engine.delete("c") == (0, 0)
    with pytest.raises(NotFound):
        await engine.candidates(Query("c", "q"), vector("q"), 5, MODEL)


@pytest.mark.long
async def test_documents_are_paged_by_name(engine: Retrieval) -> None:
    names = ["a", "b'c", 'b"d', "z", "ä"]
    await asyncio.gather(*[put(engine, "c", n, "t") for n in reversed(names)])
    await put(engine, "..", "d", "t")
    first = await engine.documents("c", limit=2)
    rest = await engine.documents("c", after=first[-1].name)
    assert [i.name for i in first + rest] == sorted(names)
    assert [(i.name, i.documents) for i in await engine.corpora()] == [("..", 1), ("c", 5)]
    await engine.delete("c", "b'c")
    assert len(await engine.documents("c")) == 4


async def test_variants_are_kept_only_for_the_chunk_they_were_made_from(engine: Retrieval) -> None:
    await put(engine, "c", "d", "one", "two")
    old = [c for c, _ in await engine.chunks("c", "d", MODEL)]
    done = [TextChunk(c.document, c.position, c.text, c.ids, b"v" * 32, 7) for c in old]
    await put(engine, "c", "d", "one", "changed")
    await engine.set_variants("c", [*done, TextChunk("gone", 0, "x", (1,), b"v", 7)])
    now = [c for c, _ in await engine.chunks("c", "d", MODEL)]
    assert [(c.text, c.variant, c.neighbours) for c in now] == [("one", b"v" * 32, 7), ("changed", b"", 0)]
    assert await texts(engine, "c", "one changed") == ["one", "changed"]


async def test_many_writers_of_one_name_leave_one_document(engine: Retrieval) -> None:
    await asyncio.gather(*[put(engine, "c", "d", *[f"v{v} p{p}" for p in range(v + 1)]) for v in range(8)])
    left = [c.text for c, _ in await engine.chunks("c", "d", MODEL)]
    assert len({t.split()[0] for t in left}) == 1
    assert (await engine.documents("c"))[0].chunks == len(left) == 1 + int(left[0].split()[0][1:])


async def test_a_caller_that_gives_up_tears_nothing(engine: Retrieval) -> None:
    await put(engine, "c", "d", "a first")
    waiting = [asyncio.create_task(put(engine, "c", f"d{i}", f"text {i}")) for i in range(20)]
    await asyncio.sleep(0)
    for task in waiting[::2]:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await put(engine, "c", "e", "the last")
    counted = await engine.documents("c")
    for item in counted:
        assert len(await engine.chunks("c", item.name, MODEL)) == item.chunks
    assert {"d", "e", *[f"d{i}" for i in range(1, 20, 2)]} <= {i.name for i in counted}


@pytest.mark.long
async def test_a_corpus_deleted_during_ingest_is_made_again_or_gone(engine: Retrieval) -> None:
    await put(engine, "c", "d", "text")
    await asyncio.gather(*[put(engine, "c", f"d{i}", "text") for i in range(10)], engine.delete("c"))
    names = {i.name for corpus in await engine.corpora() for i in await engine.documents(corpus.name)}
    assert names <= {f"d{i}" for i in range(10)}
    await put(engine, "c", "last", "text")
    assert "last" in {i.name for i in await engine.documents("c")}


async def test_searches_that_are_left_keep_no_others_waiting(
    tmp_path: Path, reopen: Reopen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LanceDB would, for the part of an index that they were loading."""
    monkeypatch.setattr(indexed_table, "_IDLE_SECONDS", 0.0)
    engine = await reopen(tmp_path)
    await put(engine, "c", "d", *(f"fruit {number}" for number in range(500)))
    await until(lambda: not engine._tables["c"]._commits)
    for number in range(12):
        engine = await reopen(tmp_path)  # with empty caches
        leaving = asyncio.create_task(texts(engine, "c", "fruit"))
        await asyncio.sleep(0.001 * number)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert await asyncio.wait_for(texts(engine, "c", "fruit"), 20)


async def test_no_more_searches_run_than_may_even_if_callers_leave(
    tmp_path: Path, reopen: Reopen, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await reopen(tmp_path)
    await put(engine, "c", "d", "text")
    running, go = 0, asyncio.Event()

    async def search(*_: Any) -> Any:
        nonlocal running
        running += 1
        await go.wait()
        running -= 1
        raise Unavailable("none")

    monkeypatch.setattr(engine._tables["c"], "by_both", search)
    for _ in range(2):
        leaving = [asyncio.create_task(texts(engine, "c", "text")) for _ in range(10)]
        await until(lambda: running == embedded._SEARCHES)
        for task in leaving:
            task.cancel()
        await asyncio.wait(leaving)
    assert running == embedded._SEARCHES
    go.set()
    await until(lambda: not running)
    monkeypatch.undo()
    assert await texts(engine, "c", "text") == ["text"]


async def test_a_corpus_whose_creation_is_left_is_of_its_model(tmp_path: Path, reopen: Reopen) -> None:
    engine = await reopen(tmp_path)
    leaving = asyncio.create_task(put(engine, "c", "d", "text"))
    await until((tmp_path / "corpora/corpus-c.lance").exists)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    with pytest.raises(FailedPrecondition, match="another model"):
        await engine.replace("c", "d", [TextChunk("d", 0, "x", (1,))], np.ones((1, 3), np.float32), OTHER)
    await put(engine, "c", "d", "text")


@pytest.mark.long
async def test_a_corpus_whose_deletion_is_left_is_deleted(engine: Retrieval) -> None:
    await put(engine, "c", "d", "old")
    async with engine._tables["c"].frozen() if isinstance(engine, EmbeddedRetrieval) else contextlib.nullcontext():
        deleting = asyncio.create_task(engine.delete("c"))
        await asyncio.sleep(0.01)
        deleting.cancel()
    await asyncio.gather(deleting, return_exceptions=True)
    await put(engine, "c", "e", "new")
    assert [i.name for i in await engine.documents("c")] == ["e"]


async def test_what_a_crash_left_of_a_corpus_is_nothing(tmp_path: Path, reopen: Reopen) -> None:
    engine = await reopen(tmp_path)
    await put(engine, "c", "d", "text")
    await engine.close()
    # A corpus whose first commit never came, and one whose deletion was cut short.
    (tmp_path / "corpora/corpus-half.lance/data").mkdir(parents=True)
    (tmp_path / "deleted/x").mkdir(parents=True)
    engine = await reopen(tmp_path)
    assert [i.name for i in await engine.corpora()] == ["c"]
    await put(engine, "half", "d", "text")
    await engine.delete("c")
    await put(engine, "c", "e", "other words")
    assert await texts(engine, "c", "text other words") == ["other words"]
    await engine.close()
    assert leftovers(tmp_path) == []


def open_files(folder: Path) -> int:
    files = [f"/proc/self/fd/{file}" for file in os.listdir("/proc/self/fd")]
    return sum(str(folder) in os.readlink(file) for file in files if os.path.islink(file))


@pytest.mark.long
@pytest.mark.slow
async def test_changes_keep_few_files_open(tmp_path: Path, reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_table, "_IDLE_SECONDS", 0.0)
    engine = await reopen(tmp_path)
    for i in range(64):
        words = [f"page {i % 24} version {i} text {k} some words" for k in range(3)]
        await put(engine, "c", f"d{i % 24}", *words)
        await until(lambda: not engine._tables["c"]._commits)
        async with engine._tables["c"]._lock:
            pass  # that is done, too
        assert set(await texts(engine, "c", f"version {i}", count=3)) >= {words[0]}
    assert open_files(tmp_path) < 8


async def test_deleted_and_replaced_text_leaves_the_disk(
    tmp_path: Path, reopen: Reopen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compaction alone keeps the rows of a fragment of which few are deleted."""
    monkeypatch.setattr(indexed_table, "_IDLE_SECONDS", 0.0)
    monkeypatch.setattr(indexed_table, "_ERASE_SECONDS", 0.05)
    monkeypatch.setattr(indexed_table, "_KEEP_VERSIONS", timedelta(milliseconds=1))
    engine = await reopen(tmp_path)
    for i in range(3):
        await put(engine, "c", f"d{i}", *(f"secret{i}x{k} of many words" for k in range(60)))
    await put(engine, "c", "last", "secret of the last rows")
    await until(lambda: not engine._tables["c"]._erases)
    assert stored(tmp_path, "secret1x59")
    assert stored(tmp_path, "secret of the last rows")
    await engine.delete("c", "last")
    await until(lambda: not engine._tables["c"]._erases)
    assert not stored(tmp_path, "secret of the last rows")
    await put(engine, "c", "d1", "replacement")
    await until(lambda: not engine._tables["c"]._erases)
    assert not stored(tmp_path, "secret1x")
    assert [len(await engine.chunks("c", f"d{i}", MODEL)) for i in range(3)] == [60, 1, 60]
    assert await texts(engine, "c", "secret2x7") == ["secret2x7 of many words"]
    assert await texts(engine, "c", "replacement") == ["replacement"]
    assert stored(tmp_path, "secret0x0")


async def test_the_last_deleted_text_leaves_the_disk_of_a_gateway_that_starts_again(
    tmp_path: Path, reopen: Reopen, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(await reopen(tmp_path), "c", "d", "secret")
    await (await reopen(tmp_path)).delete("c", "d")
    monkeypatch.setattr(indexed_table, "_ERASE_SECONDS", 0.05)
    monkeypatch.setattr(indexed_table, "_KEEP_VERSIONS", timedelta(milliseconds=1))
    await reopen(tmp_path)
    await until(lambda: not stored(tmp_path, "secret"))


async def test_deleted_text_leaves_the_disk_of_a_gateway_whose_clock_was_set_back(
    tmp_path: Path, reopen: Reopen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions that are young for longer are those of a clock that was ahead."""
    monkeypatch.setattr(indexed_table, "_ERASE_SECONDS", 0.05)
    monkeypatch.setattr(indexed_table, "_KEEP_VERSIONS", timedelta(hours=1))
    move, rounds = indexed_table._move_beside_deleted, list[bool]()

    async def counted(table: Any) -> bool:
        rounds.append(await move(table))
        return rounds[-1]

    monkeypatch.setattr(indexed_table, "_move_beside_deleted", counted)
    engine = await reopen(tmp_path)
    await put(engine, "c", "d", *(f"many words {k}" for k in range(60)))
    await put(engine, "c", "last", "secret of the last rows")
    await engine.delete("c", "last")
    await until(lambda: len(rounds) > 3 or not engine._tables["c"]._erases)
    assert stored(tmp_path, "secret of the last rows")
    monkeypatch.setattr(indexed_table, "_KEEP_VERSIONS", timedelta(milliseconds=1))
    await until(lambda: not engine._tables["c"]._erases)
    assert not stored(tmp_path, "secret of the last rows")


def stored(folder: Path, text: str) -> bool:
    return any(text.encode() in file.read_bytes() for file in folder.rglob("*.lance") if file.is_file())


async def test_documents_are_packed_and_unpacked_beside_the_event_loop(
    engine: Retrieval, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 10,000 chunks takes 0.4 s, and sorting 1,000 chunks by their words 70 ms."""
    threads: dict[str, set[threading.Thread]] = {}

    def watch(module: ModuleType, name: str) -> None:
        work = getattr(module, name)

        def watched(*given: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread())
            return work(*given)

        monkeypatch.setattr(module, name, watched)

    if isinstance(engine, EmbeddedRetrieval):
        names = {embedded: ("rows_of", "chunks_of", "by_shared_words")}
    else:
        names = {milvus_rows: ("of_chunk", "chunk"), milvus: ("by_shared_words",)}
    for module, watched in names.items():
        for name in watched:
            watch(module, name)
    await put(engine, "c", "d", "text")
    for near in (vector("text"), None):
        assert len(await engine.nearest("c", "text", near, 1, MODEL)) == 1
        assert len(await engine.candidates(Query("c", "text"), near, 1, MODEL)) == 1
    assert len(await engine.chunks("c", "d", MODEL)) == 1
    if isinstance(engine, EmbeddedRetrieval):
        assert await moved(engine, MODEL, DIM) == [1]
    assert len(threads) == 3
    assert threading.current_thread() not in set().union(*threads.values())


async def test_a_tenant_whose_first_caller_leaves_is_opened(tmp_path: Path) -> None:
    tenants = Tenants("", b"", Quotas(None), lambda name: EmbeddedRetrieval.open(tmp_path / name))
    first = asyncio.create_task(tenants.get("acme"))
    while not (tmp_path / "acme/lock").exists():  # noqa: ASYNC110 - until the folder is locked, but not open
        await asyncio.sleep(0)
    first.cancel()
    left = await asyncio.gather(first, return_exceptions=True)
    assert isinstance(left[0], asyncio.CancelledError)
    await put((await tenants.get("acme")).retrieval, "c", "d", "text")
    await tenants.close()


async def test_a_folder_that_could_not_be_opened_may_be_opened_later(
    tmp_path: Path, reopen: Reopen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There were no file descriptors left for the second of its corpora."""
    engine = await reopen(tmp_path)
    for corpus in ("a", "b"):
        await put(engine, corpus, "d", "text")
    await engine.close()
    connect, calls = embedded.connect_async, 0

    async def connected(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return await connect(*given, **named)

    monkeypatch.setattr(embedded, "connect_async", connected)
    with pytest.raises(OSError, match="Too many open files"):
        await EmbeddedRetrieval.open(tmp_path)
    monkeypatch.undo()
    assert [item.name for item in await (await reopen(tmp_path)).corpora()] == ["a", "b"]


async def test_a_damaged_corpus_is_named(tmp_path: Path, reopen: Reopen) -> None:
    engine = await reopen(tmp_path)
    await put(engine, "c", "d", "text")
    await engine.close()
    for version in (tmp_path / "corpora/corpus-c.lance/_versions").iterdir():
        version.write_bytes(b"garbage")
    with pytest.raises(OSError, match=r"corpus 'c' can't be read: remove .*corpus-c.lance and ingest it again"):
        await EmbeddedRetrieval.open(tmp_path)


@pytest.mark.parametrize("name", ["db", "a b", "ä#%20", ".fusionkv/gateway"])
async def test_any_folder_will_do(tmp_path: Path, reopen: Reopen, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    await put(await reopen(Path(name)), "c", "d", "text")
    assert (tmp_path / name / "corpora").is_dir()
    assert [i.name for i in await (await reopen(tmp_path / name)).corpora()] == ["c"]


async def test_the_embedded_engine_survives_a_restart_and_locks_its_folder(tmp_path: Path, reopen: Reopen) -> None:
    engine = await reopen(tmp_path)
    await put(engine, "c", "d", "four", "ümläut")
    await put(engine, "c", "e", "a longer text that goes")
    await put(engine, "c", "e", "shorter")
    await put(engine, "c", "f", "goes")
    await engine.delete("c", "f")
    await put(engine, "e", "f", "three plums")
    with pytest.raises(OSError, match="in use by another gateway"):
        await EmbeddedRetrieval.open(tmp_path)
    for _ in range(2):
        # Sizes are those of the text.
        assert [(i.name, i.chunks, i.bytes) for i in await engine.documents("c")] == [("d", 2, 12), ("e", 1, 7)]
        corpora = [(i.name, i.documents, i.chunks, i.bytes) for i in await engine.corpora()]
        assert corpora == [("c", 2, 3, 19), ("e", 1, 1, 11)]
        assert await texts(engine, "c", "ümläut") == ["ümläut"]
        engine = await reopen(tmp_path)
    with pytest.raises(FailedPrecondition):
        await put(engine, "c", "x", "t", model=ModelIdentity(b"g" * 32, b"", "an embedder"))


async def test_stray_files_do_not_stop_a_start_and_data_is_private(tmp_path: Path, reopen: Reopen) -> None:
    folder = tmp_path / "data"
    engine = await reopen(folder)
    await put(engine, "c", "d", "text")
    await engine.close()
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "corpora/corpus-x.lance").write_text("x")
    (folder / "moved").mkdir()
    for fifo in ("corpora/corpus-y.lance", "moved/corpus-c.lance", "corpora/z", "fifo"):
        os.mkfifo(folder / fifo)
    for mode, private in ((0o755, 0o700), (0o775, 0o770), (0o2770, 0o2770)):
        folder.chmod(mode)
        engine = await reopen(folder)
        assert [item.name for item in await engine.corpora()] == ["c"]
        assert await texts(engine, "c", "text") == ["text"]
        await engine.close()
        assert folder.stat().st_mode & 0o7777 == private
    (folder / "lock").unlink()
    os.mkfifo(folder / "lock")
    with pytest.raises(OSError, match="lock is not a file: remove it"):
        await reopen(folder)
