"""`fusionkv encode`: with encoders of its own, one of which is killed, and over services that come late."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusionkv.fusion_worker.encode import encoders
from fusionkv.fusion_worker.encode.batch_encoder import BatchEncoder
from fusionkv.gateway.client.client import Client
from fusionkv.kvcache_service.client import CacheClient
from fusionkv.protos.fusion.v1 import fusion_pb2
from fusionkv.protos.runtime.errors import InvalidArgument, Unavailable
from tests.gateway.conftest import Stack
from tests.ports import free_port
from tests.processes import descendants, ended
from tests.services import Launch, start_cache, start_worker
from tests.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.timeout(480), pytest.mark.slow]
# Chunks that are handed out together, and how many of such an encoder has at once.
BATCH, HELD = 32, 2


def ingest(client: Client, corpus: str, documents: int, pages: int = 80) -> int:
    """Stores documents of several batches; returns the corpus's chunks."""
    for number in range(documents):
        text = " ".join(f"Page {number} of {corpus} says {number * i} and {i}." for i in range(pages))
        client.ingest(corpus, f"{number}.txt", text)
    return sum(item.chunks for item in client.list() if item.name == corpus)


Encode = Callable[..., Any]


@pytest.fixture
def encode(launch: Launch, stack: Stack, tiny_model: Path) -> Encode:
    """Starts `fusionkv encode` over a stack, with encoders of its own."""
    own = ("--gateway", stack.gateway.address, "--model", str(tiny_model), "--cache", stack.cache.address, "--json")
    return lambda *flags: launch("fusionkv.gateway.cli.main", "encode", *own, *flags, services=0)


def progress(encoder: Any, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in encoder.log.splitlines() if line.startswith('{"event"')]
    return [line for line in lines if line["event"] == kind]


async def stored(stack: Stack) -> int:
    """Entries that were put into the cache service so far, again or for the first time."""
    client = CacheClient(stack.cache.address)
    try:
        return (await client.stats()).puts
    finally:
        await client.close()


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[tuple[str, int]]:
    """The address of a Ray cluster of one node with two CPUs, and the process that all of its others descend from."""
    pytest.importorskip("ray", reason="pip install -e '.[ray]'")
    # In the foreground, so that its processes are known and end with it.
    flags = ("--head", "--block", "--num-cpus=2", "--num-gpus=0", "--include-dashboard=false", "--port=0")
    memory = ("--object-store-memory=100000000", "--disable-usage-stats")
    ray = Path(sys.executable).parent / "ray"
    process = subprocess.Popen([ray, "start", *flags, *memory], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = next(line for line in process.stdout if "--address=" in line).split("--address='")[1].split("'")[0]
    yield address, process.pid
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)


@pytest.mark.long
@pytest.mark.parametrize("where", ["processes", "ray"])
async def test_one_is_killed(where: str, encode: Encode, stack: Stack, request: pytest.FixtureRequest) -> None:
    corpus = f"killed-{where}"
    total = ingest(stack.client, corpus, 6)
    before, flags, root, name = await stored(stack), ["--encoders", "2"], 0, "spawn_main"
    if where == "ray":
        address, root = request.getfixturevalue("ray_cluster")
        flags, name = [*flags, "--ray", address], "ray::_Holder"
    encoder = encode(corpus, "--recipe", "full_reuse", *flags)
    encoder.wait_for_line('{"event": "encode"', timeout=120)
    descendants(root or encoder.process.pid, name)[0].kill()
    assert encoder.wait(200) == 0, encoder.log
    end = progress(encoder, "encode")[-1]
    assert (end["done"], end["total"]) == (total, total)
    assert len(progress(encoder, "encode")) > 2, "it was killed at the end"
    # What the gateway's workers find afterwards is all of it.
    assert progress(encoder, "precompute")[-1]["skipped"] == total
    assert total <= await stored(stack) - before <= total + HELD * BATCH


@pytest.mark.long
async def test_a_command_that_is_killed_takes_its_encoders_with_it(encode: Encode, stack: Stack) -> None:
    ingest(stack.client, "orphans", 6)
    encoder = encode("orphans", "--recipe", "full_reuse", "--encoders", "2")
    encoder.wait_for_line('{"event": "encode"', timeout=120)
    started = descendants(encoder.process.pid, "spawn_main")
    assert len(started) == 2
    encoder.kill9()
    await until(lambda: all(map(ended, started)))


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["fusionrag", "default"])
def test_chunks_are_encoded_as_workers_would_encode_them(recipe: str, encode: Encode, stack: Stack) -> None:
    """A worker finds every chunk behind the neighbours, or the primer, that it would take itself."""
    corpus = f"ahead-{recipe}"
    total = ingest(stack.client, corpus, 1, pages=40)
    encoder = encode(corpus, "--recipe", recipe, "--encoders", "1")
    assert encoder.wait(120) == 0, encoder.log
    assert progress(encoder, "precompute")[-1]["skipped"] == total
    assert "encoded them again" not in encoder.log
    summary = stack.client.ask(corpus, "What says page 0?", recipe=recipe, max_tokens=1).summary
    assert (summary.chunks_missed, summary.tokens_encoded) == (0, 0)


def test_a_cache_service_that_is_away_is_told_as_such(tiny_model: Path) -> None:
    """By an error that is tried again, and not by a group of them."""
    flags = {"model": str(tiny_model), "cache": f"127.0.0.1:{free_port()}", "threads": 1, "pool_bytes": 64 << 20}
    encoder = BatchEncoder(None, flags)
    requests = [fusion_pb2.EncodeRequest(mode=1, chunk=fusion_pb2.Tokens(ids=[n, 2, 3])) for n in range(6)]
    for request in requests:
        request.system.ids.append(1)
    with pytest.raises(Unavailable):
        encoder.encode([request.SerializeToString() for request in requests])


@pytest.mark.long
def test_what_is_wrong_with_encoders_is_said(encode: Encode, stack: Stack, tmp_path: Path) -> None:
    ingest(stack.client, "wrong", 1, pages=4)
    (tmp_path / "wrong.toml").write_text("[worker]\nnothing = 1\n")
    for flags, said in (
        (("--encoders", "1", "--cache", "none"), "set its address with --cache"),
        (("--encoders", "1", "--model", "/nowhere"), "/nowhere is no model"),
        (("--encoders", "1", "--config", str(tmp_path / "wrong.toml")), "nothing"),
        (("--ray", "127.0.0.1:1"), "no Ray cluster at 127.0.0.1:1"),
    ):
        failed = encode("wrong", *flags)
        assert failed.wait(120) == 1
        assert said in failed.log.splitlines()[-1]


@pytest.mark.parametrize(
    ("nodes", "count", "each"),
    [
        ([8], 1, 8), ([8], 3, 2), ([4, 4], 1, 4), ([4, 4], 2, 4), ([4, 4], 3, 2), ([2, 6], 2, 3), ([0, 4, 4], 3, 2),
        ([1, 1], 5, 1), ([16, 2, 2, 2], 4, 4),
    ],
)  # fmt: skip
def test_every_actor_has_room_on_one_node(nodes: list[int], count: int, each: int) -> None:
    assert encoders._cpus(nodes, count) == each


async def test_no_more_is_read_than_encoders_have_room_for_and_what_fails_is_tried_again() -> None:
    read, most = 0, 0
    done: list[int] = []

    async def batches() -> Any:
        nonlocal read
        for _ in range(40):
            read += 1
            yield [b""]

    class Encoder:
        def __init__(self, *errors: Exception, starting: bool = False) -> None:
            self.left, self.starting = [*errors], starting

        async def ready(self) -> None:
            if self.starting:  # it has no room on its cluster yet, and gets no batch
                await asyncio.Event().wait()

        async def encode(self, batch: encoders.Batch) -> tuple[int, int]:
            nonlocal most
            await asyncio.sleep(0)
            most = max(most, read - len(done))
            if self.left:
                raise self.left.pop()
            return len(batch), 0

    def count(chunks: int, existed: int) -> None:
        done.append(chunks)

    await asyncio.wait_for(encoders.encode_all(batches(), [Encoder(), Encoder(starting=True)], count), 10)
    assert len(done) == 40
    assert most <= 3 * 2 + 1
    last, again = InvalidArgument("never"), Unavailable("not yet", retry_after=0.01)
    failing = Encoder(last, again, encoders.EncoderLost("died"))
    with pytest.raises(InvalidArgument, match="never"):
        await asyncio.wait_for(encoders.encode_all(batches(), [failing], count), 10)
    assert not failing.left


class Late:
    """A gateway and a worker, whose addresses are known before they are there."""

    def __init__(self, launch: Launch, folder: Path, model: Path) -> None:
        self.address, self.cache = f"unix:{folder}/gateway.sock", f"unix:{folder}/kvcache.sock"
        self._launch, self._folder, self._model = launch, folder, model

    def gateway(self) -> Any:
        flags = ("--listen", self.address, "--workers", f"unix:{self._folder}/worker.sock")
        return self._launch("fusionkv.gateway", *flags, "--data-dir", str(self._folder / "gateway"))

    def worker(self) -> Any:
        flags = ("--listen", f"unix:{self._folder}/worker.sock", "--cache", self.cache)
        return start_worker(self._launch, self._model, *flags)

    def encode(self, *flags: str) -> Any:
        own = ("encode", "notes", "--recipe", "fusionrag", "--gateway", self.address)
        return self._launch("fusionkv.gateway.cli.main", *own, *flags, services=0)

    def ingest(self) -> None:
        with Client(self.address) as client:
            client.ingest("notes", "a.md", " ".join(f"The code of page {i} is {7 * i}." for i in range(40)))


@pytest.fixture
def late(launch: Launch, tmp_path: Path, tiny_model: Path) -> Late:
    made = Late(launch, tmp_path, tiny_model)
    start_cache(launch, tmp_path, "--listen", made.cache)
    return made


@pytest.mark.long
def test_what_comes_late_is_waited_for(late: Late) -> None:
    encoder = late.encode("--wait", "600")
    encoder.wait_for_line("waiting for up to")
    assert "no corpus" not in encoder.log
    gateway = late.gateway()
    encoder.wait_for_line("no corpus 'notes'")
    for flags in ((), ("--wait", "0.1")):
        impatient = late.encode(*flags)
        assert impatient.wait() == 1
        assert "fusionkv: gateway: no corpus 'notes'" in impatient.log.splitlines()[-1]
    worker = late.worker()
    late.ingest()
    assert encoder.wait(120) == 0, encoder.log
    assert re.search(r" [1-9]\d* chunks encoded, 0 already stored", encoder.log)

    # The corpus has no documents, as at the moment after its making, and here for as long as it takes.
    with Client(late.address) as client:
        client.delete("notes", "a.md")
    encoder = late.encode("--wait", "600")
    encoder.wait_for_line("corpus 'notes' has no documents yet")
    late.ingest()
    assert encoder.wait(120) == 0, encoder.log

    # The corpus is there at an upgrade, and the worker still loads its model.
    for service in (worker, gateway):
        assert service.stop() == 0
    late.gateway()
    encoder = late.encode("--wait", "600")
    encoder.wait_for_line("waiting for up to")
    late.worker()
    assert encoder.wait(120) == 0, encoder.log
    assert " 0 chunks encoded" in encoder.log
