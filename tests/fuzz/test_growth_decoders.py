"""What callers send beside documents: time and memory grow with its length, or a limit cuts it."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fusionkv.gateway import plan
from fusionkv.gateway.auth.access import Bearer
from fusionkv.gateway.http import requests
from fusionkv.gateway.http.server import parse
from fusionkv.gateway.retrieval import base, milvus_rows, page_tokens
from fusionkv.protos.runtime.errors import ServiceError
from tests.fuzz import growth, shapes
from tests.fuzz.effort import SECONDS
from tests.gateway.test_jwt import coded

# Characters or bytes of the smallest input; the largest has four times as many.
SMALL = 160_000 if SECONDS else 8_000
DEADLINE = 10.0


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


def listed(token: str) -> str:
    return page_tokens.decode("tenant", "corpus", token)


@pytest.mark.parametrize(
    "call", [base.check_corpus, base.check_document, listed, plan.check_question, milvus_rows.without_function_words]
)
def test_names_and_questions(call: Callable[[str], object]) -> None:
    grows(shapes.TEXTS, growth.in_thread(call, errors=ServiceError))
