"""What callers send beside documents: time and memory grow with its length, or a limit cuts it."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionkv.gateway import plan
from fusionkv.gateway.auth.access import Bearer
from fusionkv.gateway.auth.tenants import Quotas
from fusionkv.gateway.auth.verifiers import StaticTokens
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.http import requests
from fusionkv.gateway.http.server import parse
from fusionkv.gateway.retrieval import base, milvus_rows, page_tokens
from fusionkv.gateway.retrieval.base import Query, TextChunk
from fusionkv.gateway.retrieval.embedded import EmbeddedRetrieval
from fusionkv.gateway.tokens import ModelIdentity
from fusionkv.protos.runtime import settings
from fusionkv.protos.runtime.errors import ServiceError
from tests.fuzz import decoders, growth, shapes
from tests.fuzz.effort import SECONDS
from tests.fuzz.growth import Cost
from tests.gateway.test_http_limits import Served, ended, sent
from tests.gateway.test_jwt import coded

# Characters or bytes of the smallest input; the largest has four times as many.
SMALL = 160_000 if SECONDS else 8_000
DEADLINE = 10.0
SEARCHED = plan.MAX_QUESTION // (4 if SECONDS else 32)


def grows(make: Mapping[str, Callable[[int], Any]], measure: growth.Measure[Any], n: int = SMALL) -> None:
    """Every shape; all that fail are told."""
    assert len(make) >= 30
    failures = []
    for name, shape in make.items():
        try:
            growth.check(shape, measure, n, deadline=DEADLINE)
        except AssertionError as error:
            failures.append(f"{name}: {error}")
    assert not failures, "\n".join(failures)


def answered(call: Callable[[Any], Any]) -> growth.Measure[Any]:
    return growth.in_thread(call, errors=(ServiceError, ValueError, OSError))


def test_bodies_of_chat_requests() -> None:
    def asked(body: bytes) -> None:
        wanted = requests.completion(parse(body))
        plan.check_question(wanted.request.question)
        wanted.request.SerializeToString()

    grows(shapes.JSON, answered(asked))


def _part(text: str) -> str:
    return coded(text.encode(errors="replace"))


_HEAD = _part('{"alg":"ES256","kid":"k"}')
_TOKENS: Mapping[str, Callable[[str], str]] = {
    "as it is": lambda text: text,
    "as a JWT's head": lambda text: f"{_part(text)}.e30.AAAA",
    "in a JWT's head": lambda text: f"{_part(json.dumps({'alg': 'ES256', 'kid': text}))}.e30.AAAA",
    "as a JWT's claims": lambda text: f"{_HEAD}.{_part(text)}.AAAA",
    "as a JWT's signature": lambda text: f"{_HEAD}.e30.{_part(text)}",
}


@pytest.mark.parametrize("where", _TOKENS)
def test_tokens(bearer: Bearer, where: str) -> None:
    form = _TOKENS[where]

    def admitted(text: str) -> None:
        asyncio.run(bearer.admit([f"Bearer {form(text)}"], "/gateway.v1.GatewayService/List"))

    # Those that are cut by their length alone, and what is decoded of the longest that are not.
    grows(shapes.TEXTS, answered(admitted))

    def verified(text: str) -> None:
        for verifier in bearer._verifiers:
            asyncio.run(verifier.caller(form(text)))

    grows(shapes.TEXTS, answered(verified), SMALL // 10)


@pytest.mark.parametrize("name", decoders.GUIDED)
def test_bytes(name: str) -> None:
    decode, _ = decoders.GUIDED[name]
    # Behind the checksum of a record, and behind the head of a frame, whatever stands there is looked at.
    grows(shapes.BYTES, growth.in_thread(decode))


def listed(token: str) -> str:
    return page_tokens.decode("tenant", "corpus", token)


@pytest.mark.parametrize(
    "call", [base.check_corpus, base.check_document, listed, plan.check_question, milvus_rows.without_function_words]
)
def test_names_and_questions(call: Callable[[str], object]) -> None:
    grows(shapes.TEXTS, growth.in_thread(call, errors=ServiceError))


def of_file(file: Path) -> GatewayConfig:
    return settings.load(GatewayConfig, "gateway", file=file, environ={})


@pytest.mark.parametrize(("read", "head"), [(StaticTokens, ""), (Quotas, ""), (of_file, "[gateway]\n")])
def test_files(read: Callable[[Path], object], head: str, tmp_path: Path) -> None:
    file = tmp_path / "file"

    def load(text: str) -> None:
        file.write_text(head + text, errors="replace")
        read(file)

    grows(shapes.TOML, answered(load))


@pytest.mark.parametrize("name", ["TOP_K", "MAX_DOCUMENT_BYTES", "DENSE_WEIGHT", "LISTEN"])
def test_the_environment(name: str) -> None:
    def load(text: str) -> None:
        settings.load(GatewayConfig, "gateway", environ={f"FUSIONKV_GATEWAY_{name}": text})

    grows(shapes.TEXTS, answered(load))


def of_process(call: Callable[[Any], Any]) -> growth.Measure[Any]:
    """As `answered`, of all threads: what searches has its own."""

    def measure(given: Any) -> Cost:
        before, began = growth.trim(), time.process_time()
        with contextlib.suppress(ServiceError, ValueError):
            call(given)
        return Cost(time.process_time() - began, max(0, growth.peak() - before))

    return measure


def test_searches(tmp_path: Path) -> None:
    """Of the longest questions that are taken, by words, over a small corpus."""
    model = ModelIdentity(b"f" * 32, b"t" * 32, "e")

    async def search(text: str) -> None:
        plan.check_question(text)
        await retrieval.candidates(Query("c", text), np.ones(4, np.float32) / 2, 10, model)

    async def start() -> EmbeddedRetrieval:
        made = await EmbeddedRetrieval.open(tmp_path)
        chunks = [TextChunk("d", i, f"a word w{i} 9 é <eos> {i}", (i + 1,)) for i in range(100)]
        await made.replace("c", "d", chunks, np.ones((100, 4), np.float32) / 2, model)
        return made

    with asyncio.Runner() as runner:
        retrieval = runner.run(start())
        try:
            grows(shapes.TEXTS, of_process(lambda text: runner.run(search(text))), SEARCHED)
        finally:
            runner.run(retrieval.close())


def test_http() -> None:
    limits: dict[str, float] = {f"http_{what}_seconds": 2.0 for what in ("head", "body", "send")}

    async def exchanged(data: bytes) -> None:
        one = Served("127.0.0.1:0", http_idle_seconds=0.1, **limits)
        (address,) = await one.start()
        try:
            reader, writer = await sent(address, data)
            writer.write_eof()
            await ended(reader)
            writer.close()
        except ConnectionError:
            pass
        finally:
            await one.stop(0)

    grows(shapes.HTTP, growth.in_thread(lambda data: asyncio.run(exchanged(data))), SMALL)
