"""A real gateway with a real worker and cache: documents in, answers out, bad input, and chunks encoded ahead."""

import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from fusionkv import langchain
from fusionkv.fusion_worker.quality.verdict import PRIMED
from fusionkv.gateway.client import ORDER_NAMES, requests, results
from fusionkv.gateway.client.client import Client
from fusionkv.gateway.client.results import Sources, Summary, Token
from fusionkv.gateway.pipeline import answer_attributes
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ServiceError,
)
from tests.gateway.conftest import Serve, Stack, Start
from tests.services import Launch, start_cache

pytestmark = pytest.mark.system


def test_an_answer_streams_sources_tokens_and_one_summary(client: Client) -> None:
    events = list(client.stream("base", "code of Name3?", top_k=3, max_tokens=7, recipe="prophetkv"))
    assert [type(event) for event in events] == [Sources, *[Token] * 7, Summary]
    passages, s = events[0].passages, events[-1]  # type: ignore[union-attr]
    assert "page-3.txt" in [p.document for p in passages]
    assert s.chunks_retrieved == len(passages) == 3
    accounted = s.tokens_lossless + s.tokens_reused + s.tokens_recomputed
    assert accounted == s.context_tokens == sum(p.tokens for p in passages)
    assert (s.recipe, s.degraded, s.tokens_generated, s.finish_reason) == ("prophetkv", False, 7, "max_tokens")
    assert 0 < s.seconds.retrieve + s.seconds.plan < s.seconds.ttft <= s.seconds.total


def test_sources_come_in_the_order_asked_for(client: Client) -> None:
    document, rank, reverse, ends, default = (
        [p.document for p in client.ask("base", "code of Name4?", max_tokens=1, **order).sources]
        for order in (*({"order": name} for name in ORDER_NAMES if name != "prefix"), {})
    )
    assert document == sorted(rank)
    assert rank[0] == "page-4.txt"
    assert reverse == rank[::-1]
    assert default == ends == rank[:1] + rank[:0:-1]
    assert [p.document for p in client.retrieve("base", "code of Name4?")] == rank


def test_stop_strings_and_seeds_reach_the_worker(client: Client) -> None:
    def sampled(seed: int) -> str:
        return client.ask("base", "x?", max_tokens=12, temperature=5.0, seed=seed).text

    assert sampled(1) == sampled(1) != sampled(2)
    text = client.ask("base", "code of Name0?", max_tokens=12).text
    stopped = client.ask("base", "code of Name0?", max_tokens=12, stop=[text[3]])
    assert stopped.text == text[: text.index(text[3])]
    assert stopped.summary.finish_reason == "stop_string"


def test_a_question_without_passages_is_answered_without_context(client: Client) -> None:
    client.ingest("empty", "d.txt", "text")
    client.delete("empty", "d.txt")
    answer = client.ask("empty", "anything?", max_tokens=3)
    s = answer.summary
    assert (answer.sources, s.chunks_retrieved, s.context_tokens, s.tokens_generated) == ((), 0, 0, 3)


def test_stats_count(client: Client, stack: Any) -> None:
    before = client.stats()
    client.ask("base", "q?", max_tokens=1)
    with pytest.raises(InvalidArgument):
        client.ask("base", "")
    after = client.stats()
    assert (after.requests - before.requests, after.requests_failed - before.requests_failed) == (2, 1)
    assert after.worker == stack.worker.address
    assert re.fullmatch("[0-9a-f]{64}", after.model_fingerprint)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"corpus": "nowhere"}, "no corpus 'nowhere'"),
        ({"corpus": "../x"}, "invalid corpus name"),
        ({"question": "x" * 70_000}, "the question has 70000 characters; the maximum is 65536"),
        (
            {"question": "long " * 500},
            r"the prompt has \d+ tokens .* more than the model's maximum of 2048 in total: shorten the question",
        ),
        (
            {"question": "long?", "max_tokens": 2048},
            r" more than the model's maximum of 2048 .*: ask for at most \d+ tokens \(max_tokens\)",
        ),
        ({"top_k": 129}, "top_k is 129: the maximum is 128"),
    ],
)
def test_a_bad_question_is_refused(client: Client, wrong: dict[str, Any], message: str) -> None:
    asked = {"corpus": "base", "question": "code of Name0?", "max_tokens": 1, **wrong}
    with pytest.raises(NotFound if wrong == {"corpus": "nowhere"} else InvalidArgument, match=message):
        client.ask(**asked)
    assert client.ask("base", "code of Name0?", max_tokens=1).summary.tokens_generated == 1


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"temperature": 200.0}, InvalidArgument, r"temperature is 200: it must be from 0 \(greedy\) to 100"),
        ({"temperature": 0.5, "top_p": 1.0000001}, InvalidArgument, r"top_p is 1\.0000001: it must be from 0 to 1"),
        ({"recipe": "deeplayer+window()"}, InvalidArgument, r"unknown recipe modifier 'window\(\)'"),
        ({"recipe": "prophetkv", "ratio": 1.5}, InvalidArgument, "ratio is 1.5: it must be from 0 to 1"),
        ({"recipe": "ape+snapkv(8)"}, InvalidArgument, "ape attends .* takes no snapkv"),
        ({"recipe": "default+linked(1)"}, FailedPrecondition, r"deeplayer\+primed\+linked\(1\) takes 1: it was not"),
        ({"recipe": "cacheclip"}, FailedPrecondition, "start the worker with --auxiliary"),
    ],
)
def test_what_a_worker_would_refuse_is_refused_before_any_event(
    client: Client, wrong: dict[str, Any], error: type[ServiceError], message: str
) -> None:
    with pytest.raises(error, match=message):
        next(iter(client.stream("base", "code of Name0?", **wrong)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"corpus": ""}, "invalid corpus name"),
        ({"corpus": "bad name"}, "invalid corpus name 'bad name'"),
        ({"corpus": "x" * 65}, "invalid corpus name"),
        ({"name": ""}, "invalid document name"),
        ({"name": "a\nb.txt"}, "invalid document name"),
        ({"name": "a\u202eb.txt"}, "invalid document name"),
        ({"name": "a\u2028b.txt"}, "invalid document name"),
        ({"name": "x" * 513}, "1 to 512 printable characters"),
        ({"name": "a.exe"}, "the media type is unknown"),
        ({"content": b"x" * (65 << 10)}, "66560 bytes; the maximum is 65536"),
        ({"content": b"\xff\xfe"}, "not UTF-8"),
    ],
)
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
    chunk = langchain._chunk(summary, ())
    return {
        results.usage(summary)["prompt_tokens_details"]["cached_tokens"],
        chunk.message.usage_metadata["input_token_details"]["cache_read"],  # type: ignore[attr-defined]
        answer_attributes(response.summary, "m")["gen_ai.usage.cache_read.input_tokens"],  # type: ignore[arg-type]
    }


def test_cached_tokens_are_those_that_were_found_and_none_that_was_encoded(stack: Stack) -> None:
    for name in ("lake", "hill"):
        stack.client.ingest("usage", f"{name}.txt", f"The {name} is far away.")
    request = requests.generate("usage", "How far is it?", recipe="full_reuse", max_tokens=1)
    (*told, cold), (*again, warm) = ([*stack.client._stub.Generate(request)] for _ in range(2))
    assert [each.token for each in again] == [each.token for each in told]
    assert cold.summary.tokens_lossless + cold.summary.tokens_reused == cold.summary.context_tokens
    assert cold.summary.chunks_missed == 2
    assert cached(cold) == {0}
    assert cached(warm) == {warm.summary.context_tokens}


def test_the_default_recipe_reuses_chunks_as_they_were_encoded(client: Client) -> None:
    """With neighbours where a corpus was encoded so, alone where it was not; by both names that the default has."""
    for i in range(4):
        client.ingest("near", f"{i}.txt", f"The colour of Name{i} is {i}.")
        client.ingest("alone", f"{i}.txt", f"The taste of Name{i} is {i}.")
    [*client.precompute("near", "default", neighbours=2)]

    def asked(corpus: str, recipe: str = "", **more: Any) -> Summary:
        return client.ask(corpus, "Colour or taste of Name1?", recipe=recipe, max_tokens=1, **more).summary

    for name in ("", "default"):
        summary = asked("near", name)
        assert (summary.recipe, summary.ratio) == (f"{PRIMED.recipe}+similarity_guided(2)", PRIMED.ratio)
        found = {hit.kind: hit.chunks for hit in summary.hits}
        # The first one stands where it was encoded as the others' neighbour: lossless, which is better still.
        assert (summary.chunks_missed, found) == (0, {"exact": 1, "alternative": 3})
        summary = asked("alone", name)
        assert (summary.recipe, summary.ratio) == (PRIMED.recipe, PRIMED.ratio)
    assert asked("near", "prophetkv").recipe == "prophetkv"
    assert asked("near", ratio=1.0).tokens_reused == 0


def test_the_default_recipe_finds_every_chunk_that_was_encoded_ahead_of_time(client: Client) -> None:
    for i in range(9):
        client.ingest("ahead", f"{i}.txt", f"Of Name{i}: " + "".join(f"a{i} b{i} c{n} " for n in range(20)))
    first, second = ([*client.precompute("ahead")][-1] for _ in range(2))
    assert (first.skipped, second.skipped) == (0, first.total)
    for name in ("Name1", "Name8"):  # the primer holds chunks of the first eight
        summary = client.ask("ahead", f"{name}, a2, b3 and c4?", top_k=12, max_tokens=1).summary
        assert (summary.recipe, summary.ratio) == (PRIMED.recipe, PRIMED.ratio)
        assert (summary.chunks_missed, summary.tokens_encoded) == (0, 0)
        found = {hit.kind: hit.chunks for hit in summary.hits}
        assert found == {"exact": 1, "alternative": 11}, "the first after the system prompt, others after the primer"
    with pytest.raises(InvalidArgument, match="recipe 'prefix_cache' reuses no chunks"):
        [*client.precompute("ahead", "prefix_cache")]


def test_a_tenant_uses_what_was_encoded_ahead_of_time(cache: Any, start: Start, serve: Serve) -> None:
    client, _ = serve(start(cache=cache), "--tenant", "acme")
    for i in range(9):
        client.ingest("c", f"{i}.txt", f"Of Name{i}: " + f"a{i} b{i} c{i} " * 20)
    assert [[*client.precompute("c")][-1].skipped for _ in range(2)] == [0, 9]
    summary = client.ask("c", "Name1, a2, b3 and c4?", max_tokens=1).summary
    assert (summary.recipe, summary.chunks_missed, summary.tokens_encoded) == (PRIMED.recipe, 0, 0)


def test_what_the_cache_lost_is_encoded_again(start: Start, launch: Launch, serve: Serve, tmp_path: Path) -> None:
    """Two caches, one after the other, below one gateway's corpora."""
    for name in ("first", "second"):
        client, gateway = serve(start(cache=start_cache(launch, tmp_path / name)))
        if name == "first":
            for i in range(3):
                client.ingest("c", f"{i}.txt", f"page {i} is about subject{i}")
        assert [[*client.precompute("c", "fusionrag")][-1].skipped for _ in range(2)] == [0, 3]
        summary = client.ask("c", "subject1?", recipe="fusionrag", max_tokens=1).summary
        assert (summary.degraded, summary.chunks_missed, summary.tokens_encoded) == (False, 0, 0)
        assert gateway.stop() == 0


@pytest.mark.slow
def test_encoding_outlasts_a_cache_that_stands_still(
    launch: Launch, start: Start, serve: Serve, tmp_path: Path
) -> None:
    cache = start_cache(launch, tmp_path)
    client, _ = serve(start("--lookup-timeout", "0.5", "--fetch-timeout", "0.5", cache=cache))
    client.ingest("c", "1.txt", "page 1 is about subject1")
    cache.process.send_signal(signal.SIGSTOP)
    # The worker gives up on the cache earlier than that, twice.
    threading.Timer(1.5, cache.process.send_signal, [signal.SIGCONT]).start()
    assert [*client.precompute("c")][-1].done == 1
