"""A real gateway with a real worker and cache: documents in, answers out, and every kind of bad input."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionkv.gateway.client import requests
from fusionkv.gateway.client.client import Client
from fusionkv.gateway.client.results import Sources, Summary, Token
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.gateway.v1 import gateway_pb2_grpc
from fusionkv.protos.runtime import rpc
from fusionkv.protos.runtime.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound
from tests.gateway.conftest import write_model
from tests.gateway.test_parse import pdf
from tests.waiting import wait_until

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


def test_versions_by_earlier_context_are_kept_and_found(client: Client) -> None:
    """Computed where they stand, so the first answer is full attention's; then found by what stood before them."""
    for i in range(3):
        client.ingest("versions", f"page-{i}.txt", f"Report Velnora. The colour of Name{i} is {i}.")
    asked: dict[str, Any] = {"recipe": "cache_craft+versions(2)", "max_tokens": 8}
    full = client.ask("versions", "colour?", recipe="full_attention", max_tokens=8)
    answers = [client.ask("versions", "colour?", **asked)]
    assert answers[0].text == full.text

    def found() -> bool:
        answers.append(client.ask("versions", "colour?", **asked))
        return sum(hit.chunks for hit in answers[-1].summary.hits if hit.kind == "alternative") == 2

    # They are stored in the background; until then the worker has what it computed.
    wait_until(found)
    again = answers[-1]
    assert again.summary.chunks_missed == 0
    assert again.summary.tokens_lossless == again.sources[0].tokens
    whole = client.ask("versions", "colour?", recipe="cache_craft+versions(2)", ratio=1.0, max_tokens=8)
    assert whole.text == full.text


def test_sources_come_in_the_order_asked_for(client: Client) -> None:
    def names(order: str) -> list[str]:
        answer = client.ask("base", "code of Name4?", order=order, max_tokens=1)
        return [p.document for p in answer.sources]

    assert names("document") == sorted(names("rank"))
    assert names("rank")[0] == "page-4.txt"
    assert names("rank_reversed") == names("rank")[::-1]


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


def test_documents_are_listed_in_pages_and_deleted(client: Client, stack: Any) -> None:
    for name in ("c", "a", "b"):
        client.ingest("pages", f"{name}.txt", "text")
    with rpc.dial_sync(stack.gateway.address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        first = stub.List(pb.ListRequest(corpus="pages", page_size=2))
        assert [i.name for i in first.items] == ["a.txt", "b.txt"]
        rest = stub.List(pb.ListRequest(corpus="pages", page_size=2, page_token=first.next_page_token))
        assert [i.name for i in rest.items] == ["c.txt"]
        assert rest.next_page_token == ""
        assert "pages" in [i.name for i in stub.List(pb.ListRequest()).items]
        with pytest.raises(Exception, match="bad page token"):
            stub.List(pb.ListRequest(corpus="pages", page_token="zz"))
    assert client.delete("pages", "b.txt").documents == 1
    gone = client.delete("pages")
    assert (gone.documents, gone.chunks) == (2, 2)
    with pytest.raises(NotFound, match="no corpus 'pages'"):
        client.delete("pages")


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
    ({"ratio": 1.5}, InvalidArgument, "ratio is 1.5: it must be from 0 to 1"),
    ({"question": ""}, InvalidArgument, "the question is empty"),
    ({"question": "x" * 70_000}, InvalidArgument, "the question has 70000 characters; the maximum is 65536"),
    ({"question": "long " * 500}, InvalidArgument, r"the prompt has \d+ tokens .* the model's maximum is 2048"),
    ({"max_tokens": 5000}, InvalidArgument, "and 5000 more are requested; the model's maximum is 2048"),
    ({"top_k": 129}, InvalidArgument, "top_k is 129: the maximum is 128"),
    ({"top_k": -1}, InvalidArgument, "invalid option"),
    ({"order": "random"}, InvalidArgument, "unknown order 'random'"),
]


@pytest.mark.parametrize(
    ("wrong", "error", "message"), QUESTIONS, ids=[str(next(iter(q[0].items())))[:30] for q in QUESTIONS]
)
def test_a_bad_question_is_refused_and_the_next_one_answered(
    client: Client, wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    asked = {"corpus": "base", "question": "code of Name0?", "max_tokens": 1, **wrong}
    with pytest.raises(error, match=message):
        client.ask(**asked)
    assert client.ask("base", "code of Name0?", max_tokens=1).summary.tokens_generated == 1


DOCUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"corpus": "bad name"}, "invalid corpus name 'bad name'"),
    ({"corpus": ""}, "invalid corpus name"),
    ({"corpus": "x" * 65}, "invalid corpus name"),
    ({"name": ""}, "invalid document name"),
    ({"name": "a\nb.txt"}, "invalid document name"),
    ({"name": "x" * 513}, "1 to 512 printable characters"),
    ({"name": "a.exe"}, "the media type is unknown"),
    ({"media_type": "video/mp4"}, "unknown media type 'video/mp4'"),
    ({"content": b"x" * (65 << 10)}, "66560 bytes; the maximum is 65536"),
    ({"content": b"long words " * 5000}, "chunks; the maximum is 200"),
    ({"content": b"\xff\xfe"}, "not UTF-8"),
    ({"content": b""}, "no text"),
    ({"name": "a.jsonl", "content": b'"a"\n{"text"'}, "line 2 is not JSON"),
]


@pytest.mark.parametrize(("wrong", "message"), DOCUMENTS, ids=[d[1][:30] for d in DOCUMENTS])
def test_a_bad_document_is_refused_and_leaves_nothing(client: Client, wrong: dict[str, Any], message: str) -> None:
    client.ingest("docs", "a.txt", "as it stood")
    with pytest.raises(InvalidArgument, match=message):
        client.ingest(**{"corpus": "docs", "name": "a.txt", "content": b"text", **wrong})
    assert [p.text for p in client.retrieve("docs", "stood")] == ["as it stood"]


def test_a_corpus_of_another_model_is_refused(
    client: Client, stack: Any, launch: Callable[..., Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    other = stack.worker(write_model(tmp_path, seed=1))
    client.ingest("base", "new.txt", "one more")
    client.delete("base", "new.txt")
    stack.gateway.stop()
    own, stack.workers = stack.workers, [other]
    try:
        gateway = stack.start_gateway()
        with Client(gateway.address) as second:
            for call in (
                lambda: second.ask("base", "q?"),
                lambda: second.ingest("base", "b.txt", "text"),
                lambda: second.retrieve("base", "q?"),
            ):
                with pytest.raises(FailedPrecondition, match=r"another model.*run `fusionkv move base`"):
                    call()
            second.ingest("mine", "a.txt", "text")
            assert second.ask("mine", "text?", max_tokens=2).summary.tokens_generated == 2
            second.delete("mine")
        gateway.stop()
    finally:
        other.stop()
        stack.workers = own
        stack.gateway = stack.start_gateway()
        stack.client.close()
        stack.client = Client(stack.gateway.address, timeout=60)
    # The first model's corpora outlived two restarts.
    assert stack.client.ask("base", "code of Name5?", max_tokens=1, top_k=1).sources[0].document == "page-5.txt"


def test_the_callers_deadline_is_kept(stack: Any) -> None:
    with pytest.raises(DeadlineExceeded):
        stack.client.ask("base", "q?", max_tokens=1500, timeout=0.05)
    assert stack.client.ask("base", "q?", max_tokens=1).summary.tokens_generated == 1


def test_requests_are_plain_messages() -> None:
    made = requests.generate("c", "q", ratio=0.0, seed=0, stop=["x"])
    assert made.HasField("ratio")
    assert made.sampling.HasField("seed")
    assert json.loads(json.dumps(list(made.sampling.stop))) == ["x"]
