"""What breaks around a gateway: workers killed and busy, callers that leave, a cache that is gone, kill -9."""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusionkv.gateway.client.client import Client
from fusionkv.gateway.client.results import Token
from fusionkv.protos.runtime.errors import InvalidArgument, ResourceExhausted, ServiceError, Unavailable
from tests.commands import fusionkv
from tests.ports import free_port
from tests.services import Launch, start_cache, start_gateway, start_worker

pytestmark = pytest.mark.system


def retry(call: Callable[[], Any], *more: type[ServiceError], seconds: float = 60) -> Any:
    """The result of `call` once it stops failing with a status that says to try again, or with one `more`."""
    over = threading.Event()
    timer = threading.Timer(seconds, over.set)
    timer.start()
    try:
        while True:
            try:
                return call()
            except (Unavailable, ResourceExhausted, *more):
                if over.wait(0.05):
                    raise
    finally:
        timer.cancel()


def test_a_killed_worker_is_replaced_before_the_first_token_and_told_of_after_it(
    launch: Launch, tiny_model: Path, tmp_path: Path
) -> None:
    first = start_worker(launch, tiny_model, "--listen", f"127.0.0.1:{free_port()}")
    second = start_worker(launch, tiny_model)
    gateway = start_gateway(launch, tmp_path, [first, second])
    with Client(gateway.address, timeout=60) as client:
        client.ingest("c", "d.txt", "some text")
        first.kill9()
        # Every one of them is answered, whichever worker its turn was at.
        for i in range(8):
            assert client.ask("c", f"question {i}?", max_tokens=1).summary.tokens_generated == 1
        events = client.stream("c", "a long one?", max_tokens=1500)
        next(e for e in events if isinstance(e, Token))
        second.kill9()
        with pytest.raises(Unavailable):
            list(events)
        with pytest.raises(Unavailable, match="fusion worker"):
            client.ask("c", "nobody there?")
        assert [i.name for i in client.list()] == ["c"]
        start_worker(launch, tiny_model, "--listen", first.address)
        assert retry(lambda: client.ask("c", "back again?", max_tokens=1)).summary.tokens_generated == 1


@pytest.mark.slow
def test_the_same_chunks_go_to_the_same_worker(launch: Launch, tiny_model: Path, tmp_path: Path) -> None:
    workers = [start_worker(launch, tiny_model) for _ in range(2)]
    gateway = start_gateway(launch, tmp_path, workers)
    with Client(gateway.address, timeout=60) as client:

        def same(corpus: str) -> bool:
            """Whether both questions about each of twelve pages nobody asked about before come to one worker."""
            for i in range(12):
                client.ingest(corpus, f"{i}.txt", f"page about subject{i} and nothing else but {corpus}")

            def ask(subject: int) -> Any:
                return client.ask(corpus, f"subject{subject}?", recipe="full_reuse", top_k=1, max_tokens=1).summary

            # No cache service: what is found again was found in a worker's own pool.
            asked = [(ask(i), ask(i)) for i in range(12)]
            assert all(first.chunks_missed == 1 for first, _ in asked)
            if any([(h.tier, h.chunks) for h in again.hits] != [("device", 1)] for _, again in asked):
                return False
            # One request more than the other worker has is worth it; how many are, test_affinity.py says.
            events = client.stream(corpus, "subject0?", recipe="full_reuse", top_k=1, max_tokens=1500)
            next(e for e in events if isinstance(e, Token))
            missed = ask(0).chunks_missed
            events.close()  # type: ignore[attr-defined]
            return bool(missed == 0)

        # A worker that stands still for a quarter of a second is passed over for two seconds and more, and a round
        # with such a moment does not count. Of workers chosen at random, one round of 8192 would be met.
        assert any(same(f"round-{number}") for number in range(8))


def test_a_caller_that_leaves_frees_the_worker(launch: Launch, tiny_model: Path, tmp_path: Path) -> None:
    worker = start_worker(launch, tiny_model, "--max-requests", "1", "--max-queue", "0")
    gateway = start_gateway(launch, tmp_path, worker)
    with Client(gateway.address, timeout=60) as client:
        client.ingest("c", "d.txt", "some text")
        events = client.stream("c", "a long one?", max_tokens=1900)
        next(e for e in events if isinstance(e, Token))
        with pytest.raises(ResourceExhausted):
            client.ask("c", "busy?", max_tokens=1)
        events.close()  # type: ignore[attr-defined]
        # Well before the 1900 tokens would have been made.
        assert retry(lambda: client.ask("c", "free?", max_tokens=1)).summary.tokens_generated == 1


def test_too_many_requests_are_refused(launch: Launch, tiny_model: Path, tmp_path: Path) -> None:
    gateway = start_gateway(launch, tmp_path, start_worker(launch, tiny_model), "--max-requests", "1")
    with Client(gateway.address, timeout=60) as client:
        client.ingest("c", "d.txt", "some text")
        events = client.stream("c", "a long one?", max_tokens=1900)
        next(e for e in events if isinstance(e, Token))
        with pytest.raises(ResourceExhausted, match="1 requests are in flight;"):
            client.ask("c", "one more?")
        events.close()  # type: ignore[attr-defined]
        assert retry(lambda: client.ask("c", "now?", max_tokens=1)).summary.tokens_generated == 1


def test_without_the_cache_answers_are_the_same_and_marked(launch: Launch, tiny_model: Path, tmp_path: Path) -> None:
    cache = start_cache(launch, tmp_path)
    worker = start_worker(launch, tiny_model, cache=cache)
    gateway = start_gateway(launch, tmp_path, worker)
    with Client(gateway.address, timeout=60) as client:
        for i in range(4):
            client.ingest("c", f"{i}.txt", f"page {i} holds some text")
        before = client.ask("c", "page?", recipe="full_attention", max_tokens=6)
        cache.kill9()
        after = client.ask("c", "page?", recipe="prophetkv", max_tokens=6)
        assert after.summary.degraded
        assert after.summary.degraded_reason
        assert after.text == before.text
        assert client.stats().requests_degraded == 1


@pytest.mark.slow
def test_a_gateway_killed_during_ingest_has_whole_documents_only(
    launch: Launch, tiny_model: Path, tmp_path: Path
) -> None:
    worker = start_worker(launch, tiny_model)
    gateway = start_gateway(launch, tmp_path, worker, "--chunk-tokens", "32")
    acknowledged: list[str] = []
    ten = threading.Event()

    def ingest(part: int) -> None:
        with Client(gateway.address, timeout=60) as client, contextlib.suppress(ServiceError):
            for i in range(1000):
                name = f"{part}-{i:03}.txt"  # of one length, as the number of chunks depends on it
                client.ingest("c", name, "\n\n".join(f"{name} part {p}" for p in range(3)))
                acknowledged.append(name)
                if len(acknowledged) >= 10:
                    ten.set()

    threads = [threading.Thread(target=ingest, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    assert ten.wait(120)
    gateway.kill9()
    for thread in threads:
        thread.join(60)
    again = start_gateway(launch, tmp_path, worker)
    with Client(again.address, timeout=60) as client:
        items = {i.name: i.chunks for i in client.list("c")}
        assert set(acknowledged) <= set(items)
        chunks = items[acknowledged[0]]
        assert set(items.values()) == {chunks}
        for name in acknowledged[:5]:
            found = [p for p in client.retrieve("c", f"{name} part", top_k=20) if p.document == name]
            assert len(found) == chunks


@pytest.mark.slow
def test_a_document_that_takes_too_long_holds_up_neither_others_nor_the_end(
    launch: Launch, tiny_model: Path, tmp_path: Path
) -> None:
    worker = start_worker(launch, tiny_model)
    flags = ("--parse-seconds", "1", "--parsers", "1", "--max-document-chunks", "1000000")
    gateway = start_gateway(launch, tmp_path, worker, *flags)
    # About a minute of splitting: the model has a token for each byte.
    slow = "".join(f"word{i} " for i in range(1_400_000))
    with Client(gateway.address, timeout=60) as client:
        with pytest.raises(InvalidArgument, match="parsing took longer than 1 s"):
            client.ingest("c", "slow.txt", slow)
        # On a busy machine the quick one may be late as well.
        assert retry(lambda: client.ingest("c", "quick.txt", "quick"), InvalidArgument).chunks == 1
        assert client.stats().model
    assert gateway.stop(45) == 0


@pytest.mark.slow
def test_a_busy_gateway_refuses_documents_and_the_command_waits(
    launch: Launch, tiny_model: Path, tmp_path: Path
) -> None:
    limits = ("--max-requests", "1", "--max-document-bytes", "1KiB", "--max-ingest-bytes", "1KiB")
    gateway = start_gateway(launch, tmp_path, start_worker(launch, tiny_model), *limits)
    pages = tmp_path / "pages"
    pages.mkdir()
    for i in range(12):
        (pages / f"{i}.txt").write_text("some words " * 60)
    fusionkv("ingest", "c", pages, "--gateway", gateway.address, "--concurrency", "12")
    with Client(gateway.address, timeout=60) as client:
        assert len(client.list("c")) == 12
        assert client.stats().requests_failed > 0, "or nothing was refused"
