"""A real gateway with a real worker and cache: documents in, answers out, and every kind of bad input."""

import re
from typing import Any

import pytest

from fusionkv.gateway import genai
from fusionkv.gateway.client import langchain, requests, results
from fusionkv.gateway.client.client import Client
from fusionkv.gateway.client.results import Sources, Summary, Token
from fusionkv.gateway.http import replies
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import DeadlineExceeded, InvalidArgument, NotFound
from tests.gateway.conftest import Stack
from tests.gateway.test_parse import pdf

pytestmark = pytest.mark.system


def test_an_answer_streams_sources_tokens_and_one_summary(client: Client) -> None:
    events = list(client.stream("base", "code of Name3?", top_k=3, max_tokens=7, recipe="prophetkv"))
    assert isinstance(events[0], Sources)
    assert all(isinstance(e, Token) for e in events[1:-1])
    summary = events[-1]
    assert isinstance(summary, Summary)
    assert (len(events) - 2, summary.tokens_generated, summary.finish_reason) == (7, 7, "max_tokens")
    assert "page-3.txt" in [p.document for p in events[0].passages]
    assert summary.chunks_retrieved == len(events[0].passages) == 3
    assert summary.context_tokens == sum(p.tokens for p in events[0].passages)
    accounted = summary.tokens_lossless + summary.tokens_reused + summary.tokens_recomputed
    assert accounted == summary.context_tokens
    assert (summary.recipe, summary.degraded) == ("prophetkv", False)
    seconds = summary.seconds
    assert 0 < seconds.retrieve + seconds.plan < seconds.ttft <= seconds.total


def test_the_same_question_is_served_from_the_cache_and_answers_the_same(client: Client) -> None:
    first = client.ask("base", "code of Name1?", recipe="full_reuse", max_tokens=8)
    again = client.ask("base", "code of Name1?", recipe="full_reuse", max_tokens=8)
    assert again.text == first.text
    assert again.summary.chunks_missed == 0
    assert again.summary.tokens_encoded == 0
    assert sum(h.chunks for h in again.summary.hits) == again.summary.chunks_retrieved == 6


def test_ratio_1_answers_as_full_attention(client: Client) -> None:
    full = client.ask("base", "code of Name2?", recipe="full_attention", max_tokens=8)
    same = client.ask("base", "code of Name2?", recipe="prophetkv", ratio=1.0, max_tokens=8)
    assert same.text == full.text
    assert same.summary.ratio == 1


def test_sources_come_in_the_order_asked_for(client: Client) -> None:
    document, rank, reverse = (
        [p.document for p in client.ask("base", "code of Name4?", order=order, max_tokens=1).sources]
        for order in ("document", "rank", "rank_reversed")
    )
    assert document == sorted(rank)
    assert rank[0] == "page-4.txt"
    assert reverse == rank[::-1]


def test_stop_strings_and_seeds_reach_the_worker(client: Client) -> None:
    def sampled(seed: int) -> str:
        return client.ask("base", "x?", max_tokens=12, temperature=5.0, seed=seed).text

    assert sampled(1) == sampled(1) != sampled(2)
    text = client.ask("base", "code of Name0?", max_tokens=12).text
    stopped = client.ask("base", "code of Name0?", max_tokens=12, stop=[text[3]])
    assert stopped.text == text[: text.index(text[3])]
    assert stopped.summary.finish_reason == "stop_string"


@pytest.mark.parametrize(
    ("name", "content", "passages"),
    [
        ("a.txt", b"plain words", ["plain words"]),
        ("b.md", b"# Head\n\nsome *words*", ["# Head\n\nsome *words*"]),
        ("c.html", b"<h1>Head</h1><p>some <b>words</b></p>", ["# Head\n\nsome **words**"]),
        ("d.pdf", pdf("words in a file", "and more"), ["words in a file\n\nand more"]),
    ],
)
def test_every_media_type_becomes_passages(client: Client, name: str, content: bytes, passages: list[str]) -> None:
    done = client.ingest("types", name, content)
    assert (done.chunks, done.replaced) == (len(passages), False)
    found = {(p.document, p.position): p.text for p in client.retrieve("types", "words", top_k=20)}
    assert [found[name, i] for i in range(len(passages))] == passages
    assert client.ingest("types", name, content).replaced


def test_a_long_document_is_split_and_a_shorter_one_replaces_it(client: Client) -> None:
    text = "\n\n".join(f"Paragraph {i} says nothing of note." for i in range(20))
    long = client.ingest("split", "d.txt", text)
    assert long.chunks > 5
    assert client.ingest("split", "d.txt", "Only this.").chunks == 1
    assert [p.text for p in client.retrieve("split", "paragraph of only that", top_k=50)] == ["Only this."]


def test_a_question_without_passages_is_answered_without_context(client: Client) -> None:
    client.ingest("empty", "d.txt", "text")
    client.delete("empty", "d.txt")
    answer = client.ask("empty", "anything?", max_tokens=3)
    assert answer.sources == ()
    assert answer.summary.chunks_retrieved == answer.summary.context_tokens == 0
    assert answer.summary.tokens_generated == 3


def test_stats_count(client: Client, stack: Any) -> None:
    before = client.stats()
    client.ask("base", "q?", max_tokens=1)
    with pytest.raises(InvalidArgument):
        client.ask("base", "")
    after = client.stats()
    assert after.requests == before.requests + 2
    assert after.requests_failed == before.requests_failed + 1
    assert after.worker == stack.workers[0].address
    assert re.fullmatch("[0-9a-f]{64}", after.model_fingerprint)


QUESTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"corpus": "nowhere"}, NotFound, "no corpus 'nowhere'"),
    ({"corpus": "../x"}, InvalidArgument, "invalid corpus name"),
    ({"recipe": "magic"}, InvalidArgument, "unknown recipe 'magic'; known: .*prophetkv"),
    ({"question": "x" * 70_000}, InvalidArgument, "the question has 70000 characters; the maximum is 65536"),
    ({"question": "long " * 500}, InvalidArgument, r"the prompt has \d+ tokens .* the model's maximum is 2048"),
    ({"max_tokens": 5000}, InvalidArgument, "and 5000 more are requested; the model's maximum is 2048"),
    ({"top_k": 129}, InvalidArgument, "top_k is 129: the maximum is 128"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), QUESTIONS)
def test_a_bad_question_is_refused(client: Client, wrong: dict[str, Any], error: Any, message: str) -> None:
    asked = {"corpus": "base", "question": "code of Name0?", "max_tokens": 1, **wrong}
    with pytest.raises(error, match=message):
        client.ask(**asked)
    assert client.ask("base", "code of Name0?", max_tokens=1).summary.tokens_generated == 1


DOCUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"corpus": ""}, "invalid corpus name"),
    ({"corpus": "bad name"}, "invalid corpus name 'bad name'"),
    ({"corpus": "x" * 65}, "invalid corpus name"),
    ({"name": ""}, "invalid document name"),
    ({"name": "a\nb.txt"}, "invalid document name"),
    ({"name": "x" * 513}, "1 to 512 printable characters"),
    ({"name": "a.exe"}, "the media type is unknown"),
    ({"media_type": "video/mp4"}, "unknown media type 'video/mp4'"),
    ({"content": b"x" * (65 << 10)}, "66560 bytes; the maximum is 65536"),
    ({"content": b"long words " * 5000}, "chunks; the maximum is 200"),
    ({"content": b"\xff\xfe"}, "not UTF-8"),
]


@pytest.mark.parametrize(("wrong", "message"), DOCUMENTS, ids=[d[1][:30] for d in DOCUMENTS])
def test_a_bad_document_is_refused_and_leaves_nothing(client: Client, wrong: dict[str, Any], message: str) -> None:
    client.ingest("docs", "a.txt", "as it stood")
    with pytest.raises(InvalidArgument, match=message):
        client.ingest(**{"corpus": "docs", "name": "a.txt", "content": b"text", **wrong})
    assert [p.text for p in client.retrieve("docs", "stood")] == ["as it stood"]


def test_the_callers_deadline_is_kept(client: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        client.ask("base", "q?", max_tokens=1500, timeout=0.05)
    assert client.ask("base", "q?", max_tokens=1).summary.tokens_generated == 1


def cached(response: pb.GenerateResponse) -> set[int]:
    """Tokens from the cache: by the OpenAI-compatible endpoint, by LangChain's chat model and by the span."""
    summary = results.event(response)
    assert isinstance(summary, Summary)
    chunk = langchain._chunk(summary)
    assert chunk is not None
    return {
        replies._usage(summary)["prompt_tokens_details"]["cached_tokens"],
        chunk.message.usage_metadata["input_token_details"]["cache_read"],  # type: ignore[attr-defined]
        genai.answer_attributes(response.summary, "m")["gen_ai.usage.cache_read.input_tokens"],  # type: ignore[arg-type]
    }


def test_cached_tokens_are_those_that_were_found_and_none_that_was_encoded(stack: Stack) -> None:
    for name in ("lake", "hill"):
        stack.client.ingest("usage", f"{name}.txt", f"The {name} is far away.")
    request = requests.generate("usage", "How far is it?", recipe="full_reuse", max_tokens=1)
    cold, warm = ([*stack.client._stub.Generate(request)][-1] for _ in range(2))
    assert cold.summary.tokens_lossless + cold.summary.tokens_reused == cold.summary.context_tokens
    assert cold.summary.chunks_missed == 2
    assert cached(cold) == {0}
    assert cached(warm) == {warm.summary.context_tokens}
