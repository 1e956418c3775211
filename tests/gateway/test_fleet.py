"""Several workers behind a gateway: which gets a prompt, one that stands still, and those of a DNS name."""

import asyncio
import contextlib
import random
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.fusion_worker.models import LAYOUT
from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.workers import members, vllm, workers
from fusionkv.gateway.workers.members import PrefixAffinity
from fusionkv.gateway.workers.workers import WorkerPool
from fusionkv.kvcache_service import keys
from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.contract.capabilities import check_usable
from fusionkv.protos.contract.recipes import find_recipe
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.fusion.v1.fusion_pb2_grpc import FusionServiceServicer
from fusionkv.protos.kvcache.v1 import kvcache_pb2
from fusionkv.protos.kvcache.v1.kvcache_pb2_grpc import KVCacheServiceServicer
from fusionkv.protos.runtime import rpc
from fusionkv.protos.runtime.errors import DeadlineExceeded, FailedPrecondition, NotFound, ServiceError, Unavailable
from tests.gateway import test_tokens
from tests.gateway.conftest import Serve, Start
from tests.ports import free_port
from tests.services import Launch, listening, start_cache, start_worker
from tests.waiting import until

pytestmark = pytest.mark.system
SERVICE = pb.DESCRIPTOR.services_by_name["FusionService"]
OTHER = kvcache_pb2.DESCRIPTOR.services_by_name["KVCacheService"]

IDS = pb.Tokens(ids=[1, 2, 3])
ENCODE = pb.EncodeRequest(chunk=IDS, mode=pb.EncodeRequest.MODE_NEIGHBOURS)
ASK = pb.GenerateRequest(question=IDS, sampling=pb.Sampling(max_tokens=2), recipe="full_attention", ratio=1.0)


async def generated(pool: WorkerPool) -> bool:
    # Without a limit of its own a call to it would end after 40 s, with its connection.
    async with asyncio.timeout(25):
        return [response async for response in pool.generate(ASK, Deadline.after(600))][
            -1
        ].summary.tokens_generated == 2


async def encoded(pool: WorkerPool) -> bool:
    return not (await pool.encode(ENCODE)).existed


async def described(pool: WorkerPool) -> bool:
    async with asyncio.timeout(25):
        return bool((await pool.model(Deadline.after(600))).model.name)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("call", "heard"), [(generated, True), (encoded, True), (encoded, False), (described, True)])
async def test_one_that_stops_is_not_waited_for(
    cache: Any, start: Start, monkeypatch: pytest.MonkeyPatch, call: Any, heard: bool
) -> None:
    """A health check finds it out: before it is given the request or, just heard, while nothing comes."""
    processes = {w.address: w.process for w in (start(cache=cache) for _ in range(2))}
    monkeypatch.setattr(members, "_FRESH_SECONDS", 600.0 if heard else 0.0)
    monkeypatch.setattr(members, "_LAST_SECONDS", 600.0)
    pool = WorkerPool([*processes])
    await until(lambda: all(member.client.connected for member in pool.members.known))
    for member in pool.members.known:
        member.record_reply()
    first, _ = await pool._order({})
    process = processes[first.client.address]
    process.send_signal(signal.SIGSTOP)
    try:
        assert await call(pool)
        # And not when its connection ended, after 40 s.
        assert first.deprioritised
    finally:
        process.send_signal(signal.SIGCONT)
    assert first.in_flight == 0
    await pool.close()


class Described(FusionServiceServicer):
    """A worker that knows only its model."""

    def __init__(self, device: str) -> None:
        self.model = pb.GetModelResponse()
        self.model.CopyFrom(test_tokens.vocabulary().model)
        self.model.device = device

    @property
    def handler(self) -> grpc.GenericRpcHandler:
        return rpc.handlers(SERVICE, self)

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return self.model


@contextlib.asynccontextmanager
async def pool_of(*served: grpc.GenericRpcHandler) -> AsyncIterator[WorkerPool]:
    """A pool that is connected to all of these, at the addresses of workers."""
    async with contextlib.AsyncExitStack() as stack:
        pool = WorkerPool([await stack.enter_async_context(listening(handler)) for handler in served])
        stack.push_async_callback(pool.close)
        await until(lambda: all(member.client.connected for member in pool.members.known))
        yield pool


async def test_workers_of_one_model_share_a_vocabulary_and_others_keep_theirs() -> None:
    models = [Described(f"cuda:{number}") for number in range(7)]
    for number in range(5):
        models[number].model.name = f"model {number}"
    async with pool_of(*(described.handler for described in models)) as pool:
        seen = []
        for _ in range(2):
            for asked in pool.members.known:
                for member in pool.members.known:
                    member.in_flight = int(member is not asked)
                seen.append(await pool.model(Deadline.after(30)))
    assert [vocabulary.model.name for vocabulary in seen[:5]] == [f"model {number}" for number in range(5)]
    assert len({*seen}) == 6, "the last two differ in their devices alone"
    assert seen[:7] == seen[7:]
    assert seen[5] is seen[6]


async def test_a_recipe_is_refused_only_if_no_worker_can_follow_it() -> None:
    check = partial(check_usable, find_recipe("cacheclip"), 0)
    without, with_one = Described("cpu"), Described("cpu")
    without.model.capabilities.auxiliary, with_one.model.capabilities.auxiliary = False, True
    async with pool_of(without.handler) as one, pool_of(without.handler, with_one.handler) as both:
        with pytest.raises(FailedPrecondition, match="start the worker with --auxiliary"):
            await one.model(Deadline.after(30), check)
        for member in both.members.known:
            member.in_flight += 1
            assert (await both.model(Deadline.after(30), check)).model.capabilities.auxiliary


def chunk_ids(number: int) -> list[int]:
    return [(number + i * i) % 250 for i in range(100)]


async def answer(worker: WorkerClient, chunks: range) -> tuple[list[int], int]:
    """The tokens of an answer about the corpus `c`, and the number of chunks that were missed."""
    parts = [pb.Chunk(ids=chunk_ids(number)) for number in chunks]
    sampling = pb.Sampling(max_tokens=8)
    asked = pb.GenerateRequest(
        system=IDS, chunks=parts, question=IDS, sampling=sampling, recipe="default", corpus="c"
    )
    *told, last = [response async for response in worker.generate(asked, Deadline.after(60))]
    assert not last.summary.degraded, last.summary.degraded_reason
    return [response.token.id for response in told], last.summary.chunks_missed


async def test_the_primer_is_deleted_with_its_corpus(cache: Any, start: Start, serve: Serve) -> None:
    processes = [start(cache=cache) for _ in range(2)]
    client, gateway = serve(processes)
    workers, store = [WorkerClient(process.address) for process in processes], CacheClient(cache.address)
    model = await workers[0].model()
    namespace = keys.namespace(model.fingerprint, {"dtype": model.dtype, "layout": LAYOUT}, "")

    async def primer_of(chunk: int) -> bool | None:
        """Whether the stored primer is made of a chunk; None if there is no primer."""
        (hit,) = (await store.lookup(namespace, [(keys.primer_name("c"), ())], timeout=20)).hits
        if hit.entry is None:
            return None
        data = bytearray(hit.entry.size)
        await store.fetch(hit.entry, memoryview(data), timeout=20)
        return keys.chunk_digest(chunk_ids(chunk)) in data

    async def delete() -> None:
        await asyncio.to_thread(client.ingest, "c", "a.txt", "the lake is blue")
        assert (await asyncio.to_thread(client.delete, "c")).documents == 1

    for worker in workers:
        await answer(worker, range(3))
    assert await primer_of(0)
    await delete()
    assert await primer_of(0) is None
    await answer(workers[1], range(3, 6))
    assert await primer_of(3), "the worker remembers the primer of the corpus that was deleted"
    # A deletion that did not reach a worker is repeated.
    with pytest.raises(NotFound):
        await asyncio.to_thread(client.delete, "c")
    assert await primer_of(3) is None
    await answer(workers[0], range(3))
    assert await primer_of(0)
    assert "may be kept" not in gateway.log
    cache.process.kill()
    await delete()
    await until(lambda: gateway.log.count("the primer of a deleted corpus may be kept") == 2)
    for client_of in (*workers, store):
        await client_of.close()


async def test_workers_over_one_cache_service_encode_after_the_same_primer(cache: Any, start: Start) -> None:
    async def stored(entries: int) -> None:
        """Waits until workers have stored so many, which they do in the background."""
        await until(lambda: reached(entries))

    async def reached(entries: int) -> bool:
        return (await store.stats()).puts >= entries

    workers = [WorkerClient(start(cache=cache).address) for _ in range(2)]
    store = CacheClient(cache.address)
    assert (await answer(workers[0], range(3)))[1] == 3
    await stored(5)  # of the system prompt, the primer and the chunks
    told, missed = await answer(workers[1], range(3, 6))
    assert missed == 3
    await stored(8)
    assert await answer(workers[0], range(3, 6)) == (told, 0)
    for client in (*workers, store):
        await client.close()


@pytest.mark.slow
def test_a_corpus_has_a_worker_with_its_model(
    launch: Launch, reference_model: Path, serve: Serve, tmp_path: Path
) -> None:
    """Beside a worker with another model, whichever of them would be asked first."""
    other = shutil.copytree(reference_model, tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    workers = {"one": start_worker(launch, reference_model), "two": start_worker(launch, other)}
    for corpus, worker in workers.items():
        client, gateway = serve(worker)
        client.ingest(corpus, "a.txt", "The code of Bervek is 535.")
        gateway.stop()
    client, gateway = serve([*workers.values()])
    for corpus in workers:
        assert client.ingest(corpus, "b.txt", "The age of Dorlin is 41.").chunks == 1
        assert len(client.retrieve(corpus, "Which code?")) == 1
        assert client.ask(corpus=corpus, question="Which code?", max_tokens=2).summary.chunks_retrieved == 1
    gateway.stop()
    client, _ = serve(workers["two"])
    with pytest.raises(FailedPrecondition, match=r"corpus 'one' was built with another model .* than the worker's"):
        client.ask(corpus="one", question="Which code?", max_tokens=2)


async def test_another_program_at_the_address_of_a_worker_is_passed_over() -> None:
    other = rpc.handlers(OTHER, KVCacheServiceServicer())
    async with pool_of(other) as alone, pool_of(other, Described("cpu").handler) as both:
        _, worker = both.members.known
        with worker.counted():
            assert (await both.model(Deadline.after(30))).model.fingerprint == b"f" * 32
        (address,) = (member.client.address for member in alone.members.known)
        with pytest.raises(Unavailable, match=f"^{address} is not a fusion worker of this version$"):
            await alone.model(Deadline.after(30))


class Hung(Described):
    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        await asyncio.sleep(60)
        return self.model

    async def Encode(self, request: pb.EncodeRequest, context: Any) -> pb.EncodeResponse:
        await asyncio.sleep(60)
        return pb.EncodeResponse()


async def test_callers_do_not_wait_for_a_hung_worker_one_after_another() -> None:
    async with pool_of(Hung("cpu").handler) as pool:
        started = time.monotonic()
        asked = await asyncio.gather(*(pool.model(Deadline.after(0.4)) for _ in range(5)), return_exceptions=True)
        assert time.monotonic() - started < 1.2, "2 s, one after another"
        assert all(isinstance(error, DeadlineExceeded) for error in asked), asked


async def test_vllm_does_not_wait_for_a_hung_worker_whose_model_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening(Described("cpu").handler) as address:
        pool = WorkerPool([address])
        engine = vllm.VLLMEngine(pool, GatewayConfig(decode="vllm", vllm_url="http://127.0.0.1:1"))
        known = await engine.model(Deadline.after(30))
    await until(lambda: not pool.address())
    async with listening(Hung("cpu").handler, address):
        await until(pool.address)
        monkeypatch.setattr(vllm, "_MODEL_SECONDS", 0.1)
        async with asyncio.timeout(10):
            assert await engine.model(Deadline.after(60)) is known
        await engine.close()


async def test_a_name_that_cannot_be_one_ends_nothing_and_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    pool = WorkerPool(["dns:a..b:7071"])
    with pytest.raises(Unavailable, match="the name in `workers` has no address"):
        async with asyncio.timeout(60):
            await pool.model(Deadline.after(30))
    assert "can't resolve dns:a..b:7071" in caplog.text
    assert not pool.members._resolving.done()
    await pool.close()
    async with listening(Described("cpu").handler) as address:
        both = WorkerPool(["dns:a..b:7071", f"dns:localhost:{address.rpartition(':')[2]}"])
        assert (await both.model(Deadline.after(30))).model.fingerprint == b"f" * 32
        await both.close()


async def test_a_chunk_that_no_worker_encodes_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_ENCODE_SECONDS", 0.2)
    async with pool_of(Hung("cpu").handler) as pool:
        with pytest.raises(DeadlineExceeded, match="no worker encoded a chunk within"):
            await pool.encode(ENCODE)


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[Path, tuple[str, ...]]:
    """A file that a process started with the command reads as /etc/hosts."""
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1 localhost\n")
    script = f'mount --bind {file} /etc/hosts && exec "$@"'
    before = ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "--")
    if not shutil.which("unshare") or subprocess.run([*before, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mounts: needs root, or user namespaces, and unshare (apt-get install util-linux)")
    return file, before


@pytest.mark.long
@pytest.mark.slow
def test_workers_of_a_name_come_and_go(start: Start, serve: Serve, hosts: tuple[Path, tuple[str, ...]]) -> None:
    file, before = hosts
    port = free_port()
    first = start("--listen", f"127.0.0.1:{port}")
    file.write_text("127.0.0.1 localhost workers.test\n")
    client, gateway = serve(first, "--workers", f"dns:workers.test:{port}", before=before)
    client.ingest("c", "a.txt", "some text")
    assert client.stats().worker == f"127.0.0.1:{port}"
    second = start("--listen", f"127.0.0.2:{port}")
    # In place: the mount is of the file, not of its name.
    file.write_text("127.0.0.2 workers.test\n127.0.0.1 localhost\n")
    gateway.wait_for_line(f"added worker of dns:workers.test:{port}: 127.0.0.2:{port}")
    gateway.wait_for_line(f"removed worker of dns:workers.test:{port}: 127.0.0.1:{port}")
    first.kill9()
    assert client.ask("c", "a question?", max_tokens=2).summary.tokens_generated == 2
    assert client.stats().worker == second.address
    file.write_text("127.0.0.1 localhost\n")
    gateway.wait_for_line("keeping its known workers")
    assert client.ask("c", "another?", max_tokens=2).summary.tokens_generated == 2


@pytest.mark.parametrize("place", [0, 1])
async def test_a_worker_that_is_removed_while_one_is_chosen_ends_no_request(
    monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    monkeypatch.setattr(members, "_CHECK_SECONDS", 0.3)
    kept: list[asyncio.StreamWriter] = []
    # They are connected to, and say nothing.
    silent = [await asyncio.start_server(lambda _, writer: kept.append(writer), "127.0.0.1", 0) for _ in range(2)]
    pool = WorkerPool([f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in silent])
    member = (await pool._order({}))[place]
    asking = asyncio.create_task(anext(pool.generate(ASK, Deadline.after(0.5))))
    await until(lambda: kept)
    removing = asyncio.create_task(members._retire(member))
    with pytest.raises(ServiceError):
        await asking
    await removing
    await pool.close()
    for each in (*kept, *silent):
        each.close()


TOPICS, PAGES, ROUNDS = 4, 6, 15


def prompt(topic: int, pages: Sequence[int], max_tokens: int = 2) -> pb.GenerateRequest:
    """A question for some pages of a topic."""
    chunks = [pb.Chunk(ids=[40 + topic, 50 + page] * 128) for page in sorted(pages)]
    sampling = pb.Sampling(max_tokens=max_tokens)
    return pb.GenerateRequest(recipe="full_reuse", chunks=chunks, question=pb.Tokens(ids=[1]), sampling=sampling)


@pytest.fixture(scope="module")
def pair(launch_module: Launch, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Addresses of two, each with room for less than three of four topics: a token of the model takes 256 bytes."""
    cache = start_cache(launch_module, tmp_path_factory.mktemp("affinity"))
    return [start_worker(launch_module, tiny_model, "--pool-bytes", "1MiB", cache=cache).address for _ in range(2)]


def asked() -> list[pb.GenerateRequest]:
    """Questions that want four of the six pages of their topic; topics in any order."""
    chance = random.Random(1)
    topics = [topic for _ in range(ROUNDS) for topic in range(TOPICS)]
    chance.shuffle(topics)
    return [prompt(topic, chance.sample(range(PAGES), 4)) for topic in topics]


async def from_pool(call: Callable[[int, pb.GenerateRequest], Any]) -> int:
    """Chunks that were in the pool of the worker which answered, in the second half of all."""
    hits = 0
    requests = asked()
    for number, request in enumerate(requests):
        async with contextlib.aclosing(call(number, request)) as responses:
            async for response in responses:
                if response.HasField("summary") and number >= len(requests) // 2:
                    hits += sum(hit.chunks for hit in response.summary.hits if hit.tier == "device")
    return hits


async def test_prompts_go_where_their_chunks_are(pair: list[str]) -> None:
    """Beside the same prompts given to both workers in turn. The load is the same: one at a time."""
    clients = [WorkerClient(address) for address in pair]
    in_turn = await from_pool(lambda number, request: clients[number % 2].generate(request))
    pool = WorkerPool(pair)
    routed = await from_pool(lambda _, request: pool.generate(request, Deadline.after(60)))
    for each in (*clients, pool):
        await each.close()
    print(f"chunks from the pool: {routed} of {4 * ROUNDS * TOPICS // 2}, in turn {in_turn}")
    assert routed > 1.2 * in_turn


async def test_a_busy_worker_is_passed_over_for_all_it_holds(pair: list[str]) -> None:
    pool = WorkerPool(pair)
    request = prompt(0, range(4))
    async for _ in pool.generate(request, Deadline.after(60)):
        pass
    (warm,) = (m for m in pool.members.known if m.holdings.share({}) == 0 and m.holdings._tokens)
    (cold,) = (m for m in pool.members.known if m is not warm)
    streams = [pool.generate(prompt(0, range(4), max_tokens=120), Deadline.after(60)) for _ in range(4)]
    for stream in streams:
        await anext(stream)
    # Two more than the other has are worth it, for what it holds; then both hold it, and share.
    assert (warm.in_flight, cold.in_flight) in {(2, 2), (3, 1)}
    for stream in streams:
        await stream.aclose()
    await pool.close()


def test_holdings_are_bounded_by_the_pool() -> None:
    holdings = PrefixAffinity()
    holdings.resize(100)
    for number in range(10):
        holdings.use({b"%d" % number: 30})
    assert holdings.share({b"9": 30, b"8": 30, b"7": 30}) == 1
    assert holdings.share({b"6": 30}) == 0
    holdings.use({b"7": 30})
    holdings.use({b"new": 30})
    assert holdings.share({b"7": 30, b"8": 10}) == 0.75
    holdings.resize(30)
    assert holdings.share({b"new": 1, b"7": 1}) == 0.5
    holdings.clear()
    assert holdings.share({b"new": 1}) == holdings.share({}) == 0
