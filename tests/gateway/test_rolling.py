"""Rolling restarts and new addresses, as in Kubernetes: no question fails, streams included."""

import asyncio
import contextlib
import itertools
import json
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusionkv.gateway.client.client import Client
from fusionkv.gateway.workers import members
from tests.dns import Nameserver, serving
from tests.ports import free_port
from tests.services import Launch, start_cache, start_gateway, start_worker
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.long]
# Seconds for which a name's answer is cached, and a cluster's.
TTL, CLUSTER_TTL = 2.0, 30.0
PASSAGES = ("Report Velkorda. The lake is blue. The code of Bervek is 535.", "Report Dorlin. The hill is green.")
QUESTION = "Report Velkorda: code of Bervek?"


class Callers:
    """Threads that ask, one question after another, until they are stopped."""

    def __init__(self, *asks: Callable[[], object]) -> None:
        self.errors: list[str] = []
        self.answers = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._go, args=(ask,)) for ask in asks]
        for each in self._threads:
            each.start()

    def _go(self, ask: Callable[[], object]) -> None:
        while not self._stop.is_set():
            try:
                ask()
                self.answers += 1
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                time.sleep(0.1)

    def stop(self) -> None:
        self._stop.set()
        for each in self._threads:
            each.join(60)
            assert not each.is_alive()


@contextlib.contextmanager
def asked(*asks: Callable[[], object]) -> Iterator[Callers]:
    callers = Callers(*asks)
    try:
        yield callers
    finally:
        callers.stop()


def question(client: Client, max_tokens: int = 4) -> Any:
    answer = client.ask(passages=PASSAGES, question=QUESTION, max_tokens=max_tokens)
    assert answer.summary.tokens_generated > 0
    return answer


@pytest.fixture
def nameserver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Nameserver, tuple[str, ...]]]:
    with serving(tmp_path, getattr(request, "param", TTL)) as found:
        yield found


@pytest.mark.parametrize("nameserver", [TTL, CLUSTER_TTL], indirect=True)
def test_workers_are_replaced_under_load(
    launch: Launch, reference_model: Path, tmp_path: Path, nameserver: tuple[Nameserver, tuple[str, ...]]
) -> None:
    """Each is stopped by SIGTERM, and its successor has another address, as pods have."""
    server, before = nameserver
    port, hosts = free_port(), itertools.count(1)

    def start() -> tuple[str, Any]:
        host = f"127.0.3.{next(hosts)}"
        return host, start_worker(launch, reference_model, "--listen", f"{host}:{port}")

    running = dict(start() for _ in range(2))
    server.names["workers.test"] = [*running]
    flags = ("--workers", f"dns:workers.test:{port}")
    gateway = start_gateway(launch, tmp_path, None, *flags, before=before)
    # Without a client's retries: the gateway has to find another worker itself.
    with Client(gateway.address, retries=0, timeout=60) as client:
        wait_until(lambda: gateway.log.count("added worker") == 2)
        time.sleep(1)
        with asked(lambda: question(client), lambda: question(client, 96)) as callers:
            for host, worker in [*running.items()]:
                answers = callers.answers
                worker.process.send_signal(signal.SIGTERM)
                server.names["workers.test"].remove(host)
                assert worker.wait() == 0
                successor, running[successor] = start()
                server.names["workers.test"].append(successor)
                # By then a gateway has connected to a new worker; in a cluster, minReadySeconds waits for that.
                time.sleep(server.ttl + members.RESOLVE_SECONDS + 1)
                assert callers.answers > answers
    assert callers.errors == []


def test_a_cache_service_at_another_address_is_found(
    launch: Launch, reference_model: Path, tmp_path: Path, nameserver: tuple[Nameserver, tuple[str, ...]]
) -> None:
    server, before = nameserver
    port = free_port()

    def start(number: int) -> Any:
        server.names["cache.test"] = [f"127.0.4.{number}"]
        return start_cache(launch, tmp_path / str(number), "--listen", f"127.0.4.{number}:{port}")

    cache = start(1)
    env = {"FUSIONKV_WORKER_LOOKUP_TIMEOUT": "2"}
    worker = start_worker(launch, reference_model, "--cache", f"cache.test:{port}", env=env, before=before)
    gateway = start_gateway(launch, tmp_path, worker)
    with Client(gateway.address, timeout=60) as client:
        assert not question(client).summary.degraded
        assert cache.stop() == 0
        assert question(client).summary.degraded, "there is none"
        start(2)
        # gRPC by default asks for a name only every 30 s.
        wait_until(lambda: not question(client).summary.degraded, TTL + 8)


class Balancer:
    """Passes each connection on to one of the ready backends, as a Service does; what is open stays."""

    def __init__(self) -> None:
        self.ready: list[tuple[str, int]] = []
        self.port = free_port()
        self._turn = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        async with await asyncio.start_server(self._connected, "127.0.0.1", self.port):
            await self._stopped.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
            await asyncio.wait([task])

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.ready:
            backend = self.ready[next(self._turn) % len(self.ready)]
            with contextlib.suppress(OSError):
                far_reader, far_writer = await asyncio.open_connection(*backend)
                await asyncio.gather(self._pipe(reader, far_writer), self._pipe(far_reader, writer))
        writer.close()

    @staticmethod
    async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()


def completed(port: int) -> None:
    """One question over HTTP, each in a connection of its own."""
    messages = [{"role": "user", "content": QUESTION}]
    body = json.dumps({"model": "fusionkv", "messages": messages, "passages": PASSAGES, "max_tokens": 4})
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["choices"]


def test_gateways_are_replaced_under_load(launch: Launch, reference_model: Path, tmp_path: Path) -> None:
    worker = start_worker(launch, reference_model)
    grpc, http = Balancer(), Balancer()
    numbers = itertools.count()

    def start() -> tuple[Any, ...]:
        flags = ("--http-listen", "127.0.0.1:0")
        gateway = start_gateway(launch, tmp_path / str(next(numbers)), worker, *flags, services=2)
        found = [gateway.address, *gateway.addresses["fusionkv-gateway-http"]]
        return gateway, *(("127.0.0.1", int(address.rpartition(":")[2])) for address in found)

    def ready() -> None:
        grpc.ready, http.ready = ([gateway[place] for gateway in gateways] for place in (1, 2))

    gateways = [start() for _ in range(2)]
    ready()
    with contextlib.ExitStack() as stack:
        stack.callback(grpc.close)
        stack.callback(http.close)
        clients = [stack.enter_context(Client(f"127.0.0.1:{grpc.port}", timeout=60)) for _ in range(2)]
        short, long = clients
        asks = (lambda: question(short), lambda: question(long, 96), lambda: completed(http.port))
        with asked(*asks) as callers:
            for _ in range(2):
                # The new one comes first, as in a Deployment, and what ends goes on for a while (preStop).
                gateways.append(start())
                ended, *_ = gateways.pop(0)
                ready()
                answers = callers.answers
                time.sleep(1)
                assert ended.stop() == 0
                wait_until(lambda before=answers: callers.answers > before)
    assert callers.errors == []
