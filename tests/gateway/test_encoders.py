"""`fusionkv encode --queue`, as processes: shared, killed in the middle, and what can't be encoded."""

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusionkv.gateway.client.client import AsyncClient, Client
from fusionkv.gateway.ingest.encoder import Encoder
from fusionkv.gateway.ingest.work_queue import WorkQueue
from tests.gateway.conftest import Stack
from tests.system.redis_process import RedisServer

pytestmark = [pytest.mark.system, pytest.mark.timeout(240), pytest.mark.slow]
Launch = Callable[..., Any]
DOCUMENTS = 12


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill9()


@pytest.fixture(scope="module")
def corpora(stack: Stack) -> Stack:
    """Two corpora of some documents each, of several chunks."""
    for corpus in ("one", "two"):
        ingest(stack.client, corpus, DOCUMENTS // 2)
    return stack


def ingest(client: Client, corpus: str, documents: int) -> None:
    for number in range(documents):
        text = " ".join(f"Page {number} of {corpus} says {number * i}." for i in range(40))
        client.ingest(corpus, f"{number}.txt", text)


class Encoders:
    """Starts encoders of runs, over both corpora if none is named."""

    def __init__(self, launch: Launch, gateway: str, redis: RedisServer, worker: Any = None) -> None:
        self._launch = launch
        self._gateway = gateway
        self._worker = worker
        self.redis = redis

    def start(self, run: str, *flags: str, min_idle: str = "60") -> Any:
        own = ("--gateway", self._gateway, "--queue", self.redis.url, "--run", run, "--min-idle", min_idle, "--json")
        given = flags if any(not flag.startswith("-") for flag in flags[:1]) else ("one", "two", *flags)
        return self._launch("fusionkv.gateway.cli.main", "encode", "--recipe", "fusionrag", *given, *own, services=0)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The worker stands still: documents that are in work stay so, if they are not encoded yet."""
        self._worker.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._worker.process.send_signal(signal.SIGCONT)

    def pending(self, run: str) -> int:
        """Documents in work."""
        key = f"{{fusionkv:run:{run}}}:items"
        redis = self.redis.client()
        return int(redis.xpending(key, "encoders")["pending"]) if redis.exists(key) else 0

    def wait_for_work(self, run: str, count: int = 1) -> None:
        until = time.monotonic() + 60
        while self.pending(run) < count:
            assert time.monotonic() < until, f"nobody works on {run}"
            time.sleep(0.002)


@pytest.fixture
def encoders(launch: Launch, corpora: Stack, redis: RedisServer) -> Encoders:
    return Encoders(launch, corpora.gateway.address, redis, corpora.workers[0])


def summary(encoder: Any) -> dict[str, Any]:
    """What it said at its end."""
    lines = [json.loads(line) for line in encoder.log.splitlines() if line.startswith('{"event"')]
    found: dict[str, Any] = lines[-1]
    assert found["event"] == "summary", encoder.log
    return found


def chunks(client: Client, *corpora: str) -> int:
    return sum(item.chunks for item in client.list() if item.name in corpora)


def test_encoders_share_a_run_and_outlive_one_that_is_killed(encoders: Encoders, corpora: Stack) -> None:
    total = chunks(corpora.client, "one", "two")
    with encoders.held():
        killed = encoders.start("a", "--concurrency", "4", min_idle="1")
        encoders.wait_for_work("a", 4)
        killed.kill9()
    assert encoders.pending("a") == 4
    others = [encoders.start("a", min_idle="1") for _ in range(2)]
    for encoder in others:
        assert encoder.wait(120) == 0, encoder.log
        end = summary(encoder)
        # Each document and each chunk once, though some of them were begun by one and ended by another.
        assert (end["documents"], end["documents_set_aside"]) == (DOCUMENTS, 0)
        assert end["chunks_encoded"] + end["chunks_skipped"] == end["chunks"] == total
    assert "taken over" in others[0].log + others[1].log
    # All of it is stored: a second pass finds nothing to do, and a third process finds the second pass over.
    again = encoders.start("b")
    assert again.wait(120) == 0, again.log
    assert (summary(again)["chunks_encoded"], summary(again)["chunks_skipped"]) == (0, total)
    late = encoders.start("b")
    assert late.wait(60) == 0
    assert summary(late) == summary(again)


def test_who_is_asked_to_end_leaves_its_documents_to_others_at_once(encoders: Encoders, corpora: Stack) -> None:
    ingest(corpora.client, "left", DOCUMENTS)
    with encoders.held():
        first = encoders.start("c", "left", "--concurrency", "4", min_idle="600")
        encoders.wait_for_work("c", 4)
        first.process.send_signal(signal.SIGTERM)
        assert first.wait() == 143
    second = encoders.start("c", "left", min_idle="600")
    # Silence would have to last ten minutes.
    assert second.wait(180) == 0, second.log
    assert summary(second)["documents"] == DOCUMENTS


def test_a_document_that_its_encoders_die_of_is_set_aside(encoders: Encoders, corpora: Stack) -> None:
    ingest(corpora.client, "deadly", DOCUMENTS)
    with encoders.held():
        dead = encoders.start("d", "deadly", "--concurrency", "1")
        encoders.wait_for_work("d")
        dead.kill9()
    assert encoders.pending("d") == 1
    # What nobody of the run wrote is among those that are named at the end.
    encoders.redis.client().xadd("{fusionkv:run:d}:aside", {"odd": "1"})
    heir = encoders.start("d", "deadly", "--attempts", "1", min_idle="0.1")
    assert heir.wait(120) == 1
    end = summary(heir)
    assert (end["documents"], end["documents_set_aside"]) == (DOCUMENTS - 1, 1)
    assert "1 encoders ended over it" in heir.log
    assert "fusionkv: ?/?: ?" in heir.log


def test_a_document_that_fails_is_set_aside_with_the_reason(
    launch: Launch, corpora: Stack, redis: RedisServer, tmp_path: Path
) -> None:
    """A chunk that is longer than the model takes."""
    flags = ("--chunk-tokens", "4096", "--data-dir", str(tmp_path / "gateway"), "--listen", "127.0.0.1:0")
    gateway = launch("fusionkv.gateway", "--workers", corpora.workers[0].address, *flags)
    with Client(gateway.address) as client:
        client.ingest("mixed", "a.txt", "a short page")
        client.ingest("mixed", "b.txt", "word " * 500)
        client.ingest("mixed", "c.txt", "another short page")
    encoder = Encoders(launch, gateway.address, redis).start("e", "mixed", "--attempts", "2", min_idle="0.2")
    assert encoder.wait(120) == 1, encoder.log
    assert (summary(encoder)["documents"], summary(encoder)["documents_set_aside"]) == (2, 1)
    assert "mixed/b.txt: INVALID_ARGUMENT" in encoder.log
    (kept,) = redis.client().xrange("{fusionkv:run:e}:aside")
    assert b"tokens to encode; the model takes" in kept[1][b"reason"]


def test_what_concerns_every_document_ends_the_encoder(encoders: Encoders) -> None:
    nowhere = encoders.start("f", "none")
    assert nowhere.wait() == 1
    assert "no corpus 'none'" in nowhere.log
    unfit = encoders.start("f", "one", "--recipe", "full_attention")
    assert unfit.wait() == 1
    assert "reuses no chunks" in unfit.log
    assert encoders.start("f").wait() == 0
    other = encoders.start("f", "one")
    assert other.wait() == 1
    assert "another name" in other.log


def test_a_redis_that_forgets_all_only_costs_time(encoders: Encoders, corpora: Stack, redis: RedisServer) -> None:
    ingest(corpora.client, "forgotten", DOCUMENTS)
    with encoders.held():
        first = encoders.start("g", "forgotten", "--concurrency", "2", min_idle="1")
        encoders.wait_for_work("g", 2)
        redis.client().flushall()
    assert first.wait(120) == 0, first.log
    assert summary(first)["documents"] <= DOCUMENTS
    # What was encoded before stays so.
    again = encoders.start("h", "forgotten")
    assert again.wait(120) == 0, again.log
    end = summary(again)
    assert (end["chunks_encoded"], end["chunks_skipped"]) == (0, chunks(corpora.client, "forgotten"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("cursor", "seven "), ("cursor", "9 "), ("cursor", "0 no page of a gateway"), ("done", "many")],
)
async def test_what_no_encoder_wrote_only_costs_time(
    corpora: Stack, redis: RedisServer, request: pytest.FixtureRequest, name: str, value: str
) -> None:
    run = request.node.name
    redis.client().hset(f"{{fusionkv:run:{run}}}:state", name, value)
    queue = WorkQueue(redis.url, run)
    async with AsyncClient(corpora.gateway.address) as client:
        encoder = Encoder(
            client, queue, ["one", "two"], "fusionrag", attempts=2, concurrency=1, patience=200, wait=0.0
        )
        await encoder.run()
    await queue.leave()
    assert encoder.standing.done == DOCUMENTS
