"""A worker in the test's own process, over tiny models of every family, and an oracle beside it."""

import asyncio
import copy
import itertools
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker import models as worker_models
from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.fusion_worker.compute.packed_linear import pack
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.decode.sampling import Best, Sampler, SamplingParams
from fusionkv.fusion_worker.servicer import FusionServicer, handler
from fusionkv.kvcache_service.client import Entry
from fusionkv.protos.answer.v1.answer_pb2 import Summary
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from tests.fusion_worker.linked import with_link_tokens
from tests.fusion_worker.oracle import (
    CLOSE,
    FAMILIES,
    KV,
    VARIED,
    Ids,
    byte_tokenizer,
    error,
    network,
    prompt,
    random_ids,
)
from tests.kernels.inputs import DEVICE
from tests.services import listening
from tests.waiting import until

# Of a request's first token, or of each of its tokens behind those before it.
Expected = torch.Tensor | Callable[[list[int]], torch.Tensor]


@dataclass
class Answer:
    ids: list[int]
    text: str
    summary: Summary
    logits: list[torch.Tensor]


@dataclass
class Gate:
    """Stops the engine's thread inside the step that draws a token of one request, until it is opened."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)


@dataclass
class Rig:
    """A worker in this process: the servicer as gRPC would call it, and what every token was drawn from.

    Requests are of `tenant` unless they name another.
    """

    servicer: FusionServicer
    model: worker_models.Model
    drawn: dict[int, list[torch.Tensor]]
    numbers: "itertools.count[int]"
    gates: "dict[int, Gate]"
    tenant: str

    @property
    def pool(self) -> Any:
        return self.servicer.pool

    def request(
        self, system: Ids, chunks: Sequence[Ids], question: Ids, recipe: str = "prophetkv", **more: Any
    ) -> pb.GenerateRequest:
        variants = more.pop("variants", [[]] * len(chunks))
        named = {k: more.pop(k) for k in ("ratio", "tenant", "corpus", "model_fingerprint") if k in more}
        return pb.GenerateRequest(
            recipe=recipe,
            system=pb.Tokens(ids=system),
            chunks=[pb.Chunk(ids=c, variants=v) for c, v in zip(chunks, variants, strict=True)],
            question=pb.Tokens(ids=question),
            sampling=pb.Sampling(**{"max_tokens": 1, **more}),
            **{"tenant": self.tenant, **named},
        )

    async def ask(self, *parts: Any, expected: Expected | None = None, **more: Any) -> Answer:
        """Answers greedily by default; the seed tells requests apart.

        expected: the first token's logits, or a function of the tokens so far that gives the next one's.
        """
        more.setdefault("seed", (1 << 40) + next(self.numbers))
        request = self.request(*parts, **more)
        ids, text, summary = [], "", None
        async for response in self.servicer.Generate(request, None):
            assert summary is None, "something came after the summary"
            if response.HasField("token"):
                ids.append(response.token.id)
                text += response.token.text
            else:
                summary = response.summary
        assert summary is not None
        s = summary
        assert s.tokens_lossless + s.tokens_reused + s.tokens_recomputed == s.context_tokens
        assert s.tokens_generated == len(ids)
        logits = self.drawn[request.sampling.seed]
        each = [expected(ids[:at]) for at in range(len(logits))] if callable(expected) else [expected]
        errors = [error(a, b) for a, b in zip(logits, each, strict=False) if b is not None]
        assert all(off < CLOSE for off in errors), f"{request.recipe} is off by {errors}"
        return Answer(ids, text, summary, logits)

    async def block(self, *parts: Any, **more: Any) -> tuple[Gate, "asyncio.Task[Answer]"]:
        """Asks, and returns when the engine stands in the step that draws the request's first token."""
        seed = (1 << 50) + next(self.numbers)
        gate = self.gates[seed] = Gate()
        task = asyncio.create_task(self.ask(*parts, seed=seed, **more))
        assert await asyncio.to_thread(gate.reached.wait, 60)
        return gate, task

    until = staticmethod(until)

    async def encode(
        self, system: Ids, before: Sequence[Ids], chunk: Ids, mode: str = "EXACT", **more: Any
    ) -> pb.EncodeResponse:
        parts = {"system": pb.Tokens(ids=system), "before": [pb.Tokens(ids=b) for b in before]}
        kind = pb.EncodeRequest.Mode.Value(f"MODE_{mode}")
        fields = {"chunk": pb.Tokens(ids=chunk), "mode": kind, "tenant": self.tenant, **parts, **more}
        return await self.servicer.Encode(pb.EncodeRequest(**fields), None)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[WorkerClient]:
        """The gateway's client of this worker, over gRPC."""
        async with listening(handler(self.servicer)) as address:
            made = WorkerClient(address)
            try:
                yield made
            finally:
                await made.close()

    @property
    def namespace(self) -> bytes:
        return self.servicer.loader.namespace(self.tenant)

    async def kv_of(self, entry: Entry) -> KV:
        """What the cache service holds in an entry of float32."""
        buffer, shape = torch.empty(entry.size, dtype=torch.uint8), self.model.kv
        await self.servicer.cache.fetch(entry, buffer.numpy().data, timeout=5)
        found = buffer.view(torch.float32).view(shape.layers, 2, entry.tokens, shape.kv_heads, shape.head_dim)
        return [(k.transpose(0, 1)[None], v.transpose(0, 1)[None]) for k, v in found]

    async def stored(self) -> None:
        """Waits until everything encoded so far has reached the cache service."""
        await self.servicer.wait_idle()

    async def fill(self, *parts: Any, **more: Any) -> Answer:
        """Asks, and waits until all that was encoded for it is stored."""
        answer = await self.ask(*parts, **more)
        await self.stored()
        return answer

    async def settled(self) -> None:
        """Waits until the pool has one owner for every slot, and nobody uses it."""

        def sound() -> bool:
            with suppress(AssertionError):
                self.pool.check_integrity(idle=True)
                return True
            return False

        await self.until(sound)


Start = Callable[..., Awaitable[Rig]]


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch, tenant: str) -> AsyncIterator[Start]:
    """`await start(family, dtype, cache=, page_tokens=, ...)`: a worker that is checked and ended with the test."""
    drawn: dict[int, list[torch.Tensor]] = {}
    gates: dict[int, Gate] = {}

    class Recorder(Sampler):
        def __init__(self, params: SamplingParams) -> None:
            super().__init__(params)
            self._seed = params.seed

        def draw(self, logits: torch.Tensor, known: Best | None = None) -> int:
            if self._seed is not None:
                drawn.setdefault(self._seed, []).append(logits.to("cpu", copy=True))
                if self._seed in gates:
                    gates[self._seed].reached.set()
                    assert gates[self._seed].opened.wait(60)
            return super().draw(logits, known)

    monkeypatch.setattr("fusionkv.fusion_worker.request.Sampler", Recorder)
    rigs: list[Rig] = []
    numbers = itertools.count(1)

    async def make(
        family: str, dtype: torch.dtype = torch.float32, max_tokens: int = 2048, replace: Any = None, **more: Any
    ) -> Rig:
        ours = copy.deepcopy(network(family, dtype)).to(DEVICE)
        pack(ours.requires_grad_(False))
        made = worker_models.wrap(family, ours, byte_tokenizer(), family.encode().ljust(32), max_tokens)
        made = replace(made) if replace else made
        others = {name: more.pop(name, None) for name in ("auxiliary", "tp", "verdict")}
        # A busy machine is not a cache that fails.
        busy = {"lookup_timeout": 30.0, "fetch_timeout": 60.0, "cache_seconds": 120.0}
        settings = {"pool_bytes": 8 << 20, "page_tokens": 4, **busy, **more}
        servicer = FusionServicer(WorkerConfig(**settings), made, **others)
        rigs.append(Rig(servicer, made, drawn, numbers, gates, tenant))
        return rigs[-1]

    yield make
    for gate in gates.values():
        gate.opened.set()
    for rig in rigs:
        await rig.settled()
        await rig.servicer.close()
        rig.pool.check_integrity(idle=True)


@pytest.fixture(scope="module")
def cache_service(launch_module: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Address of a cache service process that the module's tests share."""
    folder: Path = tmp_path_factory.mktemp("kvcache")
    flags = ("--memory-bytes", "64MiB", "--disk-bytes", "256MiB")
    service = launch_module("fusionkv.kvcache_service", "--listen", "127.0.0.1:0", "--data-dir", str(folder), *flags)
    return str(service.address)


@pytest.fixture
def cached(start: Start, cache_service: str) -> Start:
    """As `start`, for workers that use the module's cache service."""
    return partial(start, cache=cache_service)


@pytest.fixture
def special(start: Start) -> Start:
    """As `start`, for models with link tokens."""
    return partial(start, replace=with_link_tokens)


@pytest.fixture
def parts(request: pytest.FixtureRequest) -> Any:
    """A prompt with chunks of the module's LENGTHS, or of one token, less and more than a page, and a window."""
    return prompt(*getattr(request.module, "LENGTHS", (13, 1, 30, 4, 7)))


@pytest.fixture
def text() -> dict[str, list[int]]:
    """Chunks by name, and the system prompt "S" and question "Q"."""
    lengths = {"S": 6, "Q": 5, "A": 13, "B": 22, "C": 9, "D": 17, "E": 1}
    return {name: random_ids(length, ord(name)) for name, length in lengths.items()}


class Near:
    """A cache service on a unix socket, over files that outlive it, and workers beside it, which may sign."""

    def __init__(self, launch: Any, start: Start, folder: Path, key_file: Path) -> None:
        self._launch, self._start, self.folder, self._keys = launch, start, folder, key_file
        self.address = f"unix:{folder}/s"
        self.serve()

    def serve(self) -> None:
        at = ("--listen", self.address, "--data-dir", str(self.folder / "data"), "--memory-bytes", "16MiB")
        self.service = self._launch("fusionkv.kvcache_service", *at)

    def restart(self) -> None:
        self.service.kill9()
        self.serve()

    async def worker(self, signing: bool = False, **more: Any) -> Rig:
        keys = self._keys if signing else None
        return await self._start("qwen3", cache=self.address, signing_keys=keys, **more)

    async def fill(self, parts: Any, **more: Any) -> None:
        """A worker of its own encodes a prompt and stores it."""
        await (await self.worker(**more)).fill(*parts, ratio=0.0)


@pytest.fixture
def near(launch: Any, start: Start, tmp_path: Path, key_file: Path) -> Near:
    return Near(launch, start, tmp_path, key_file)


@pytest.fixture
def tenant() -> str:
    """A name of its own for each test: nothing that others stored is found."""
    return uuid.uuid4().hex


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, kinds in (("family", FAMILIES), ("varied", VARIED)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, list(kinds))
