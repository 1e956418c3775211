"""What probes learn without a token: whether the gateway runs, and whether it can answer questions."""

import asyncio
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx2
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fusionkv.gateway.config import GatewayConfig
from fusionkv.gateway.servicer import SERVICE
from fusionkv.gateway.workers.vllm import VLLMEngine
from fusionkv.gateway.workers.workers import WorkerPool
from fusionkv.protos.deadline import Deadline
from tests.gateway.conftest import Serve, Start
from tests.http_server import serving
from tests.services import Launch, listening, start_gateway, token_entry, token_flags
from tests.waiting import until, wait_until

pytestmark = pytest.mark.system
HTTP = "fusionkv-gateway-http"
BOTH = ("--http-listen", "127.0.0.1:0")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def statuses(gateway: Any) -> dict[str, int]:
    """The status of each route for probes."""
    base = f"http://{gateway.addresses[HTTP][0]}"
    return {path: httpx2.get(base + path, timeout=20).status_code for path in ("/livez", "/readyz", "/health")}


def health(gateway: Any, service: str) -> int:
    with grpc.insecure_channel(gateway.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=20).status)


READY = {"/livez": 200, "/readyz": 200, "/health": 200}
NOT_READY = {"/livez": 200, "/readyz": 503, "/health": 503}


def test_a_gateway_is_ready_while_a_worker_answers(start: Start, serve: Serve, tmp_path: Path) -> None:
    """With tokens required, of which probes have none."""
    first, second = start(), start()
    flags = token_flags(tmp_path, token_entry("a" * 32, "app"))
    _, gateway = serve([first, second], *BOTH, *flags, services=2)
    wait_until(lambda: statuses(gateway) == READY)
    wait_until(lambda: health(gateway, SERVICE.full_name) == SERVING)
    head = httpx2.head(f"http://{gateway.addresses[HTTP][0]}/livez")
    assert (head.status_code, head.content) == (200, b"")
    # One that hangs has its connection yet.
    first.process.send_signal(signal.SIGSTOP)
    second.stop()
    wait_until(lambda: statuses(gateway) == NOT_READY)
    wait_until(lambda: health(gateway, SERVICE.full_name) == NOT_SERVING)
    assert health(gateway, "") == SERVING
    first.process.send_signal(signal.SIGCONT)
    wait_until(lambda: statuses(gateway) == READY)
    wait_until(lambda: health(gateway, SERVICE.full_name) == SERVING)


class Worker:
    """Counts the health checks that it answers; it describes no model."""

    def __init__(self) -> None:
        self.checks = 0

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        self.checks += 1
        return health_pb2.HealthCheckResponse(status=SERVING)

    @property
    def handler(self) -> grpc.GenericRpcHandler:
        method = grpc.unary_unary_rpc_method_handler(
            self.Check, health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": method})


async def test_many_probes_cost_a_worker_one_check_a_second(launch: Launch, tmp_path: Path) -> None:
    worker = Worker()
    async with listening(worker.handler) as address:
        started = asyncio.to_thread(
            start_gateway, launch, tmp_path, SimpleNamespace(address=address), *BOTH, services=2
        )
        url = f"http://{(await started).addresses[HTTP][0]}/readyz"
        async with httpx2.AsyncClient(timeout=60) as probes:
            await until(lambda: worker.checks > 0)
            began, before = time.monotonic(), worker.checks
            replies = await asyncio.gather(*(probes.get(url) for _ in range(200)))
            checks, seconds = worker.checks - before, time.monotonic() - began
    assert {reply.status_code for reply in replies} == {200}
    assert checks <= seconds + 1


async def test_with_vllm_a_gateway_is_ready_while_vllm_is() -> None:
    answer = 200

    async def health(request: web.Request) -> web.Response:
        return web.Response(status=answer)

    worker = Worker()
    async with serving(web.get("/health", health)) as url, listening(worker.handler) as address:
        engine = VLLMEngine(WorkerPool([address]), GatewayConfig(decode="vllm", vllm_url=f"{url}/v1"))
        assert await engine.ready(20)
        answer = 404  # such as a proxy in front of several
        assert await engine.ready(20)
        answer = 503
        assert not await engine.ready(20)
        await engine.close()
        alone = VLLMEngine(WorkerPool(["127.0.0.1:1"]), GatewayConfig(decode="vllm", vllm_url=url))
        answer = 200
        assert not await alone.ready(20), "no worker has described the model"
        await alone.close()


async def test_with_vllm_a_gateway_that_is_busy_is_ready_yet() -> None:
    """Each answer has a connection, of which aiohttp opens 100 by default; max_requests limits them."""
    held, end = 0, asyncio.Event()

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def chat(request: web.Request) -> web.Response:
        nonlocal held
        held += 1
        await end.wait()
        return web.json_response({})

    worker, busy = Worker(), GatewayConfig().max_requests
    routes = web.get("/health", health), web.post("/v1/chat/completions", chat)
    async with serving(*routes) as url, listening(worker.handler) as address:
        engine = VLLMEngine(WorkerPool([address]), GatewayConfig(decode="vllm", vllm_url=url))
        chats = [asyncio.ensure_future(anext(engine.chat({}, "", Deadline.after(60)))) for _ in range(busy)]
        await until(lambda: held == busy, 20)
        assert await engine.ready(20)
        end.set()
        assert await asyncio.gather(*chats) == [{}] * busy
        await engine.close()


async def test_a_hung_worker_hides_no_other() -> None:
    """Whichever of them is asked first, and though one waits for the whole time."""

    async def hang(request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        await asyncio.sleep(60)
        return health_pb2.HealthCheckResponse(status=SERVING)

    worker, hung = Worker(), Worker()
    hung.Check = hang  # type: ignore[method-assign]
    async with listening(worker.handler) as one, listening(hung.handler) as other:
        pools = [WorkerPool([one, other]), WorkerPool([other]), WorkerPool(["dns:a..b:7071"])]
        assert [await pool.ready(2) for pool in pools] == [True, False, False]
        for pool in pools:
            await pool.close()
