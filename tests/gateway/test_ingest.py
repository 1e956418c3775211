"""Files in: JSON lines, sources, what is kept of chunks, another embedder; and what is found then."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from fusionkv.gateway import plan
from fusionkv.gateway.auth.tenants import Meter, Quota, Tenant
from fusionkv.gateway.client import requests
from fusionkv.gateway.client.results import Passage, passages
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.embed.base import Embedder, Reranker
from fusionkv.gateway.ingest import parse, precompute
from fusionkv.gateway.ingest.document import of_line
from fusionkv.gateway.ingest.ingest import Ingest, _documents_of
from fusionkv.gateway.ingest.parsers import ParsedDocument
from fusionkv.gateway.ingest.precompute import Precompute
from fusionkv.gateway.pipeline import Pipeline
from fusionkv.gateway.plan import given
from fusionkv.gateway.retrieval.base import HybridSearch, Query, Retrieval
from fusionkv.gateway.retrieval.embedded import EmbeddedRetrieval
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.fusion.v1 import fusion_pb2
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime import rpc
from fusionkv.protos.runtime.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from tests.gateway.conftest import Reopen
from tests.gateway.test_tokens import vocabulary

TOPICS = ("horse", "code", "lake")
PARAGRAPHS = [f"Paragraph {i} tells of a horse that has the code {i}." for i in range(4)]


class Topics(Embedder):
    """A vector says which of three topics a text names. texts: all that it was asked for."""

    def __init__(self, name: str = "topics", dim: int = 4) -> None:
        self.name, self.dim = name, dim
        self.texts: list[str] = []
        self.away = False

    async def embed(self, texts: Sequence[str], *, question: bool = False, tenant: str = "") -> np.ndarray:
        if self.away:
            raise Unavailable("the embedder is away")
        self.texts += texts
        made = np.full((len(texts), self.dim), 0.01, np.float32)
        for row, text in zip(made, texts, strict=True):
            row[: len(TOPICS)] += [topic in text.lower() for topic in TOPICS]
        return made / np.linalg.norm(made, axis=1, keepdims=True)

    async def close(self) -> None:
        pass


class Shortest(Reranker):
    name = "shortest"

    async def score(self, question: str, passages: Sequence[str]) -> list[float]:
        return [-float(len(text)) for text in passages]

    async def close(self) -> None:
        pass


class Workers:
    """All that is asked of workers: which model they run. There is nothing else here to ask for."""

    def __init__(self) -> None:
        self.vocabulary = vocabulary()
        self.vocabulary.model.max_tokens = 4096
        self.encoded: list[fusion_pb2.EncodeRequest] = []

    async def model(self, timeout: float = 1.0, check: Any = None) -> Vocabulary:
        return self.vocabulary

    async def encode(self, request: fusion_pb2.EncodeRequest) -> fusion_pb2.EncodeResponse:
        self.encoded.append(request)
        return fusion_pb2.EncodeResponse(variant=b"v" * 32)


class InThisProcess:
    """Parses as parsers in processes of their own do (test_parsers.py)."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config

    async def parse(
        self, tenant: Tenant, content: bytes, kind: str, vocabulary: Vocabulary, first_line: int
    ) -> tuple[list[ParsedDocument], int]:
        sizes, parsed = (self._config.chunk_tokens, self._config.overlap_tokens), []
        for document in parse.parse(content, kind, self._config.max_text_bytes, first_line):
            with of_line(document.line):
                pieces = vocabulary.chunks(document, *sizes) if document.text.strip() else []
            fields = document.name, document.title, document.metadata, document.line
            parsed.append(ParsedDocument(*fields, pieces))
        return parsed, 0


class Rig:
    def __init__(self, engine: Retrieval, embedder: Embedder | None, reranker: Reranker | None = None) -> None:
        self.engine, self.workers = engine, Workers()
        self.tenant = Tenant("", engine, Meter(Quota))
        config, workers = GatewayConfig(chunk_tokens=64), self.workers
        self.search = HybridSearch(config, embedder, reranker)
        self.ingesting = Ingest(config, workers, self.search)  # type: ignore[arg-type]
        self.ingesting._parsers = InThisProcess(config)  # type: ignore[assignment]
        self.pipeline = Pipeline(config, workers, self.search)  # type: ignore[arg-type]
        self.precompute = Precompute(config, workers, self.search)  # type: ignore[arg-type]

    async def ingest(self, name: str, content: str, **more: Any) -> pb.IngestResponse:
        return await self.ingesting.file(self.tenant, requests.ingest("c", name, content, **more), Deadline.after(60))

    async def retrieve(self, question: str, where: Mapping[str, str] | None = None, top_k: int = 0) -> list[Passage]:
        found = await self.pipeline.retrieve(
            self.tenant, Query("c", question, where or {}), top_k, Deadline.after(60)
        )
        return list(passages(pb.RetrieveResponse(passages=[source for _, source in found])))

    async def chunks(self, document: str) -> Any:
        return await self.engine.chunks("c", document, self.search.identity(self.workers.vocabulary.identity))

    async def encode(self, recipe: str, name: str = "", **changed: Any) -> list[pb.PrecomputeResponse]:
        """changed: attributes of the tenant that differ."""
        request = pb.PrecomputeRequest(corpus="c", name=name, recipe=recipe)
        return [p async for p in self.precompute.run(dataclasses.replace(self.tenant, **changed), request)]

    def limit(self, tokens: int) -> None:
        """Gives the tenant a quota of so many tokens a minute, of which none are used, and lets a first call in."""
        meter = Meter(lambda: Quota(tokens_per_minute=tokens), clock=lambda: 0.0)
        meter.admit()
        self.tenant = dataclasses.replace(self.tenant, meter=meter)

    async def names(self) -> list[str]:
        return [item.name for item in await self.engine.documents("c")]

    async def move(self) -> list[int]:
        return [progress.done async for progress in self.ingesting.move(self.engine, "c")]


@pytest.fixture
async def engine(tmp_path: Path, reopen: Reopen) -> EmbeddedRetrieval:
    return await reopen(tmp_path / "data")


@pytest.fixture
def rig(engine: EmbeddedRetrieval) -> Rig:
    return Rig(engine, Topics())


@pytest.fixture
def topics(rig: Rig) -> Any:
    return rig.search.embedder


async def test_what_is_unchanged_is_embedded_once(rig: Rig, topics: Topics) -> None:
    for replaced in (0, 1):
        done = await rig.ingest("d.txt", "\n\n".join(PARAGRAPHS))
        assert (done.documents, done.chunks, done.replaced) == (1, 4, replaced)
        assert topics.texts == PARAGRAPHS
    changed = [PARAGRAPHS[0], "Another paragraph tells of a lake, and of nothing else.", *PARAGRAPHS[2:]]
    await rig.ingest("d.txt", "\n\n".join(changed))
    assert topics.texts == [*PARAGRAPHS, changed[1]]
    (near,) = await rig.retrieve("Which water?", top_k=1)
    assert near.document == "d.txt"
    vectors = np.stack([vector for _, vector in await rig.chunks("d.txt")])
    np.testing.assert_allclose(vectors, await Topics().embed(changed), atol=1e-6)


@pytest.mark.parametrize(
    ("error", "free"),
    [(InvalidArgument, True), (FailedPrecondition, True), (Unavailable, True), (DeadlineExceeded, False)],
)
async def test_a_prompt_that_a_worker_refuses_costs_no_tokens(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: type[ServiceError], free: bool
) -> None:
    async def generate(request: fusion_pb2.GenerateRequest, timeout: float) -> AsyncGenerator[Any]:
        raise error("no")
        yield

    monkeypatch.setattr(rig.workers, "generate", generate, raising=False)
    rig.limit(1)
    asked = requests.generate(question="Which?", passages=["A lake."], recipe="a3")
    with pytest.raises(error):
        _ = [event async for event in rig.pipeline.answer(rig.tenant, asked, Deadline.after(60))]
    with contextlib.nullcontext() if free else pytest.raises(ResourceExhausted):
        rig.tenant.meter.admit()


async def test_a_prompt_that_is_too_long_costs_what_it_took_to_find_out(rig: Rig) -> None:
    vocabulary, made = rig.workers.vocabulary, 0

    def chunk(text: str) -> list[int]:
        nonlocal made
        made += 1
        return [1] * 1000

    vocabulary.model.max_tokens = 2500
    given = requests.generate(question="Which?", passages=["A lake."] * 100, recipe="a3")
    long = requests.generate(question="Which? " * 3000, passages=["A lake."], recipe="a3")
    for asked, said in ((given, "first 3 of 100"), (long, "the prompt has")):
        rig.limit(3000)
        with mock.patch.object(vocabulary, "chunk", chunk), pytest.raises(InvalidArgument, match=said):
            await anext(rig.pipeline.answer(rig.tenant, asked, Deadline.after(60)))
        with pytest.raises(ResourceExhausted, match="tokens per minute"):
            rig.tenant.meter.admit()
    assert made == 4, "three, and the one of the long question"


async def test_an_answer_that_is_read_too_slowly_ends(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(request: fusion_pb2.GenerateRequest, timeout: float) -> AsyncGenerator[Any]:
        while True:  # what had arrived before the worker's deadline
            yield fusion_pb2.GenerateResponse(token={"id": 1, "text": "x"})

    monkeypatch.setattr(rig.workers, "generate", generate, raising=False)
    asked = requests.generate(question="Which?", passages=["A lake."], recipe="a3")

    async def read() -> None:
        async for _ in rig.pipeline.answer(rig.tenant, asked, Deadline.after(0.3)):
            await asyncio.sleep(0.05)

    with pytest.raises(DeadlineExceeded, match=r"was not read within 0\.3 s"):
        await asyncio.wait_for(read(), 60)


async def test_a_document_in_pieces_is_that_of_one_piece(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def uploaded(*pieces: bytes, size: int, patience: float = 30.0) -> pb.IngestResponse:
        async def sent() -> AsyncIterator[pb.UploadRequest]:
            yield pb.UploadRequest(document=pb.IngestRequest(corpus="c", name="d.txt"), size_bytes=size)
            for piece in pieces:
                if not piece:
                    await asyncio.sleep(60)
                yield pb.UploadRequest(content=piece)

        monkeypatch.setattr("fusionkv.gateway.ingest.ingest._STALL_SECONDS", patience)
        return await rig.ingesting.upload(rig.tenant, sent(), Deadline.after(60))

    text = "\n\n".join(PARAGRAPHS).encode()
    whole = await rig.ingest("d.txt", text.decode())
    again = await uploaded(text[:50], text[50:], size=len(text))
    assert (again.chunks, again.tokens, again.replaced) == (whole.chunks, whole.tokens, 1)
    for pieces, size, said in (
        ((text,), len(text) - 1, "longer than"),
        ((text, b"x"), len(text), "longer than"),
        ((text,), len(text) + 1, "ended after"),
        ((), 33 << 20, "the maximum is 33554432"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            await uploaded(*pieces, size=size)
    for size in (1000, 1):  # also after all of it: a call that never ends would keep its room
        with pytest.raises(DeadlineExceeded, match=f"1 of {size} bytes arrived in time, and not the end"):
            await asyncio.wait_for(uploaded(b"x", b"", size=size, patience=0.1), 30)
    assert not rig.ingesting._bytes.held


async def test_pieces_take_room_before_they_arrive(rig: Rig) -> None:
    more = asyncio.Event()

    async def sent() -> AsyncIterator[pb.UploadRequest]:
        yield pb.UploadRequest(document=pb.IngestRequest(corpus="c", name="d.txt"), size_bytes=1)
        await more.wait()
        yield pb.UploadRequest(content=b"x")

    begun = [asyncio.create_task(rig.ingesting.upload(rig.tenant, sent(), Deadline.after(60))) for _ in range(40)]
    done, waiting = await asyncio.wait(begun, timeout=0.2)
    assert len(waiting) == (256 << 20) // rpc.MAX_REQUEST_BYTES, "each may send a message of that size"
    assert {type(each.exception()) for each in done} == {ResourceExhausted}
    more.set()
    await asyncio.gather(*waiting)


@pytest.mark.parametrize("documents", [1, 3, 20])
async def test_a_primer_is_of_first_chunks_of_a_few_documents(rig: Rig, documents: int) -> None:
    lines = [json.dumps({"id": f"{number:02}", "text": f"It is {number}."}) for number in range(documents)]
    await rig.ingest("d.jsonl", "\n".join(lines))
    await rig.ingest("long.txt", "\n\n".join(PARAGRAPHS))
    for name, chunks in (("", documents + 4), ("long.txt", 4)):
        progress = await rig.encode("a3+primed", name, salt="acme")
        assert (progress[-1].done, len(rig.workers.encoded)) == (chunks, chunks)
        sample = [(await rig.chunks(f"{number:02}"))[0][0].ids for number in range(min(8, documents))]
        sample += [(await rig.chunks("long.txt"))[0][0].ids] * (documents < 8)
        for asked in rig.workers.encoded:
            expected = (asked.MODE_PRIMED, "acme", plan.corpus_name("acme", "c"))
            assert (asked.mode, asked.tenant, asked.corpus) == expected
            assert [tuple(part.ids) for part in asked.before] == sample
        rig.workers.encoded.clear()


async def test_chunks_of_a_primer_fit_into_the_models_length_and_are_no_tokens_of_a_quota(rig: Rig) -> None:
    lines = [json.dumps({"id": f"{number}", "text": f"It is {number}. " * 4}) for number in range(9)]
    await rig.ingest("d.jsonl", "\n".join(lines))
    limit = rig.workers.vocabulary.model.max_tokens = 300
    spent: list[int] = []
    meter = mock.Mock(check_tokens=lambda: None, spend=spent.append)
    await rig.encode("a3+primed", meter=meter)
    tokens = [len(asked.chunk.ids) for asked in rig.workers.encoded]
    for asked in rig.workers.encoded:
        assert 1 < len(asked.before) < 8
        assert sum(len(part.ids) for part in (asked.system, asked.chunk, *asked.before)) <= limit
    assert spent == [2 * count for count in tokens], "each is encoded twice"


async def test_chunks_are_encoded_alone_for_recipes_without_a_primer(rig: Rig) -> None:
    await rig.ingest("d.txt", "\n\n".join(PARAGRAPHS))
    await rig.encode("a3")
    assert {(asked.mode, len(asked.before)) for asked in rig.workers.encoded} == {(1, 0)}


async def test_what_was_encoded_ahead_of_time_stays_with_its_chunk(rig: Rig) -> None:
    await rig.ingest("d.txt", "\n\n".join(PARAGRAPHS))
    await rig.encode("a3+similarity_guided(1)")
    assert len(rig.workers.encoded) == 4
    await rig.ingest("d.txt", "\n\n".join([PARAGRAPHS[2], "A new one tells of something else, at some length."]))
    kept = [(chunk.variant, chunk.neighbours) for chunk, _ in await rig.chunks("d.txt")]
    assert kept == [(b"v" * 32, 1), (b"", 0)]


async def test_json_lines_are_many_documents(rig: Rig, topics: Topics) -> None:
    lines = [
        {"id": "h/1", "title": "Horses", "text": "One has the code 7.", "metadata": {"year": "2020", "pages": 3}},
        "A lake is told of in a line without an id.",
        {
            "text": "".join(f"long text {n} of a horse. " for n in range(10)),
            "title": "Long",
            "metadata": {"year": "2021"},
        },
    ]
    content = "\n".join(map(json.dumps, lines))
    done = await rig.ingest("all.jsonl", content, metadata={"set": "a", "year": "?"}, prefix="p/", first_line=101)
    assert (done.documents, done.replaced) == (3, 0)
    assert await rig.names() == ["p/all.jsonl#102", "p/all.jsonl#103", "p/h/1"]
    (horse, *_) = await rig.retrieve("code of the horse", {"year": "2020"})
    assert (horse.document, horse.title, horse.text) == ("p/h/1", "Horses", "One has the code 7.")
    assert horse.metadata == {"set": "a", "year": "2020", "pages": "3"}
    assert topics.texts[0] == "Horses\nOne has the code 7."
    # Given as a passage it is the same chunk.
    ((chunk, _),) = given([pb.Passage(title=horse.title, text=horse.text)], rig.workers.vocabulary)
    ((stored, _),) = await rig.chunks("p/h/1")
    assert (chunk.text, chunk.ids) == (stored.text, stored.ids)
    long = await rig.retrieve("horse", {"year": "2021"}, top_k=20)
    assert len(long) > 3
    assert all(p.title == "Long" and p.text.startswith("long text") for p in long)
    assert {p.document for p in await rig.retrieve("horse lake", {"set": "a"})} == set(await rig.names())
    assert await rig.retrieve("horse", {"set": "b"}) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": "x", "text": "a"}\n\n{"id": "x", "text": "b"}', "lines 11 and 13 have the same id 'x'"),
        ('{"id": "x\\n", "text": "a"}', "line 11: invalid document name"),
        ('"a"\n{"text"', "line 12 is not JSON"),
        (f'"a"\n{{"text": "b", "title": "{"long " * 40}"}}', "line 12: chunk_tokens = 64 leaves no room"),
    ],
)
async def test_lines_that_are_refused_leave_nothing(rig: Rig, content: str, message: str) -> None:
    await rig.ingest("d.txt", "text")
    with pytest.raises(InvalidArgument, match=message):
        await rig.ingest("all.jsonl", content, first_line=11)
    assert await rig.names() == ["d.txt"]


async def test_a_chunk_that_no_prompt_can_hold_is_refused(rig: Rig) -> None:
    rig.workers.vocabulary.model.max_tokens = 32
    await rig.ingest("short.txt", "text")
    with pytest.raises(FailedPrecondition, match=r"than a prompt of this model can have \(32\): lower"):
        await rig.ingest("long.txt", "word " * 64)
    assert await rig.names() == ["short.txt"]


async def test_a_document_of_another_source_is_not_replaced_silently(rig: Rig) -> None:
    await rig.ingest("readme.md", "of the first", source="/a/readme.md")
    with pytest.raises(AlreadyExists, match=r"'readme.md' of corpus 'c' came from /a/readme.md, but .*--replace"):
        await rig.ingest("readme.md", "of the second", source="/b/readme.md")
    line = json.dumps({"id": "readme.md", "text": "of a line"})
    with pytest.raises(AlreadyExists):
        await rig.ingest("x.jsonl", f'{line}\n"another"', source="/b/x.jsonl")
    assert await rig.names() == ["readme.md"]
    assert (await rig.ingest("readme.md", "of the first, again", source="/a/readme.md")).replaced == 1
    await rig.ingest("readme.md", "of the second", source="/b/readme.md", prefix="b/")
    assert (await rig.ingest("readme.md", "of the second", source="/b/readme.md", replace=True)).replaced == 1
    assert (await rig.ingest("readme.md", "of who does not say", source="")).replaced == 1
    assert await rig.names() == ["b/readme.md", "readme.md"]


async def test_documents_of_two_sources_that_arrive_at_once_do_not_replace_each_other(rig: Rig) -> None:
    """While one is embedded, it is not stored yet."""
    sources = ("/a/readme.md", "/b/readme.md", "")
    calls = [rig.ingest("readme.md", f"of {source}", source=source) for source in sources]
    replacing = rig.ingest("readme.md", "of another", source="/c/readme.md", replace=True)
    done = await asyncio.gather(*calls, replacing, return_exceptions=True)
    assert [type(each) for each in done] == [pb.IngestResponse, AlreadyExists, *[pb.IngestResponse] * 2]
    assert "'readme.md' of corpus 'c' came from /a/readme.md" in str(done[1])


async def test_an_embedder_of_another_width_than_before_is_told(rig: Rig, topics: Topics) -> None:
    await rig.ingest("d.txt", "\n\n".join(PARAGRAPHS))
    topics.dim = 8
    with pytest.raises(FailedPrecondition, match="have 4 dimensions, but those of the embedder have 8"):
        await rig.ingest("d.txt", "\n\n".join([*PARAGRAPHS, "Another tells of a lake, and of nothing else at all."]))


async def test_metadata_of_a_file_is_shared_by_its_lines_and_limited(rig: Rig) -> None:
    """It is stored with each chunk: 4 KB of it, in a thousand pairs, would be 70 MB for 18,000 lines of 4 bytes."""
    lines, pairs = "\n".join(['"a"'] * 1000), {f"{number:03}": "x" for number in range(1000)}
    with pytest.raises(InvalidArgument, match="source and metadata of all chunks have more than 1048576 characters"):
        await rig.ingest("many.jsonl", lines, metadata=pairs)
    with pytest.raises(InvalidArgument, match="source and metadata of all chunks have more than"):
        await rig.ingest("many.jsonl", lines, source="/" + "x" * 2000)
    assert await rig.ingest("few.jsonl", '"a"\n"b"', metadata=pairs)
    parsed = [ParsedDocument(name, "", (), 1, [("text", [1])]) for name in ("a", "b")]
    made = _documents_of(pb.IngestRequest(metadata=pairs), parsed, 1 << 20)
    assert made["a"][0].metadata is made["b"][0].metadata


async def test_bad_metadata_is_refused(rig: Rig) -> None:
    for metadata in ({"a=b": "x"}, {"": "x"}, {"a": "x" * 5000}):
        with pytest.raises(InvalidArgument, match="metadata"):
            await rig.ingest("d.txt", "text", metadata=metadata)
    with pytest.raises(InvalidArgument, match="a filter takes at most 16 pairs"):
        plan.check_filter({str(i): "x" for i in range(17)})


async def test_meaning_counts_beside_words(rig: Rig) -> None:
    for number, text in enumerate(["A horse ran.", "This is the code of it.", "The lake is deep."]):
        await rig.ingest(f"{number}.txt", text)
    found = await rig.retrieve("Is there a horse by the deep water?")
    assert [p.document for p in found[:2]] == ["0.txt", "2.txt"]
    assert found[0].score > found[1].score > found[2].score


async def test_a_reranker_has_the_last_word(engine: EmbeddedRetrieval) -> None:
    rig = Rig(engine, Topics(), Shortest())
    for number in range(5):
        await rig.ingest(f"{number}.txt", f"A horse ran {'far ' * (5 - number)}away.")
    found = await rig.retrieve("Which horse ran far?", top_k=3)
    assert [p.document for p in found] == ["4.txt", "3.txt", "2.txt"]
    assert [p.score for p in found] == sorted((p.score for p in found), reverse=True)


async def test_an_embedder_that_is_away_is_told_and_nothing_stored(rig: Rig, topics: Topics) -> None:
    await rig.ingest("d.txt", "a horse")
    topics.away = True
    for call in (rig.ingest("e.txt", "a lake"), rig.retrieve("a horse?")):
        with pytest.raises(Unavailable, match="the embedder is away"):
            await call
    assert await rig.names() == ["d.txt"]


async def test_a_corpus_of_another_embedder_or_model_is_told_and_moved(engine: EmbeddedRetrieval) -> None:
    """From words alone to embeddings, to another embedder, to another model, and back to words."""
    first = Rig(engine, None)
    await first.ingest("a.txt", "A horse ran. " * 20, source="/a.txt", metadata={"k": "v"})
    await first.ingest("b.txt", "The lake is deep.")
    assert [p.document for p in await first.retrieve("lake")] == ["b.txt"]
    rigs = [Rig(engine, each) for each in (Topics(), Topics("other", 8), Topics("other", 8), None)]
    for rig in rigs[2:]:
        model = vocabulary(chunk="[{text}]").model
        model.name, model.max_tokens = "another model", 4096
        rig.workers.vocabulary = Vocabulary(model)
    expected = [
        "no embeddings, but the gateway's embedder is topics",
        "embeddings of topics, but the gateway's embedder is other",
        "another prompt template",
        "embeddings of other, but the gateway has no embedder",
    ]
    for rig, told in zip(rigs, expected, strict=True):
        for call in (rig.retrieve("lake"), rig.ingest("c.txt", "text")):
            with pytest.raises(FailedPrecondition, match=f"{told}.*: run `fusionkv move c`"):
                await call
        done = await rig.move()
        assert (done[0], done[-1], done) == (0, sum(i.chunks for i in await engine.documents("c")), sorted(done))
        (passage, *_) = await rig.retrieve("lake")
        ids = rig.workers.vocabulary.chunk("The lake is deep.")
        assert (passage.document, passage.text, passage.tokens) == ("b.txt", "The lake is deep.", len(ids))
        (horse, *_) = await rig.retrieve("horse", {"k": "v"})
        assert horse.document == "a.txt"
        (corpus,) = await engine.corpora()
        assert corpus.model == rig.workers.vocabulary.model.name
        assert corpus.embedder == (rig.search.embedder.name if rig.search.embedder else "")


async def test_progress_of_a_batch_is_reported_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that the work ends with its reader, and that its error is raised."""
    monkeypatch.setattr(precompute, "_REPORT_SECONDS", 0.01)
    done: list[bool] = []
    go = [asyncio.Event() for _ in range(3)]

    async def work(fails: bool = False) -> None:
        for event in go:
            await event.wait()
            done.append(True)
        if fails:
            raise Unavailable("no worker")

    go[0].set()
    async with aclosing(precompute._now_and_then(work(), done)) as reports:
        await anext(reports)
        assert len(done) == 1
        go[1].set()
        await anext(reports)
        assert len(done) == 2
    await asyncio.sleep(0)
    for event in go:
        event.set()
    await asyncio.sleep(0.05)
    assert len(done) == 2, "the work was cancelled"
    with pytest.raises(Unavailable):
        _ = [each async for each in precompute._now_and_then(work(fails=True), done)]
