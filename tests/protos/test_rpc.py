"""`serve`, in a process of its own: statuses, health, reflection, limits, drain."""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.gateway.client.client import Client
from fusionkv.gateway.config import GatewayConfig
from fusionkv.protos.deadline import NO_DEADLINE
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.kvcache.v1 import kvcache_pb2_grpc
from fusionkv.protos.runtime import errors, process, rpc
from fusionkv.protos.runtime.admission import Arrivals
from tests.http2 import Connection, message_head
from tests.stopwatch import SLOWER
from tests.waiting import until

pytestmark = pytest.mark.system
SERVER = str(Path(__file__).with_name("rpc_server.py"))
NAME = "kvcache.v1.KVCacheService"


def stub_of(channel: Any) -> Any:
    return kvcache_pb2_grpc.KVCacheServiceStub(channel)


@pytest.fixture(scope="module")
def server(launch_module: Any) -> Any:
    return launch_module(SERVER, "5", "127.0.0.1:0")


@pytest.fixture
async def channel(server: Any) -> AsyncIterator[grpc.aio.Channel]:
    async with rpc.dial(server.address) as channel:
        yield channel


Serve = Callable[[str], tuple[Any, grpc.aio.Channel]]


@pytest.fixture
async def serve(launch: Any) -> AsyncIterator[Serve]:
    """Starts a server that drains for so long; returns it, and a channel to it."""
    async with AsyncExitStack() as stack:

        def start(drain_seconds: str) -> tuple[Any, grpc.aio.Channel]:
            server = launch(SERVER, drain_seconds, "127.0.0.1:0")
            channel = rpc.dial(server.address)
            stack.push_async_callback(channel.close)
            return server, channel

        yield start


async def begun(server: Any, channel: Any) -> Callable[[], Awaitable[None]]:
    """Begins a Put, which the returned function finishes."""
    pieces: asyncio.Queue[bytes] = asyncio.Queue()

    async def requests() -> AsyncIterator[pb.PutRequest]:
        while piece := await pieces.get():
            yield pb.PutRequest(data=piece)

    put = stub_of(channel).Put(requests())
    await pieces.put(b"12345")
    await asyncio.to_thread(server.wait_for_line, "received 5")

    async def finish() -> None:
        for piece in (b"678", b""):
            await pieces.put(piece)
        assert (await put).key == (8).to_bytes(8, "big")

    return finish


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value


@pytest.mark.parametrize("kind", errors.ServiceError.__subclasses__(), ids=lambda k: k.__name__)
async def test_every_error_arrives_with_its_status_and_becomes_itself_again(channel: Any, kind: Any) -> None:
    error = await failure(stub_of(channel).Lookup(pb.LookupRequest(namespace=kind.__name__.encode())))
    assert error.code() == kind.status
    again = errors.from_rpc(error, "look up")
    assert (type(again), str(again)) == (kind, f"look up: what to do about {kind.__name__}")


async def test_the_unforeseen_is_internal_and_the_log_says_where_but_not_its_text(channel: Any, server: Any) -> None:
    """The text of an error may quote what a caller sent."""
    error = await failure(stub_of(channel).Lookup(pb.LookupRequest(namespace=b"secret")))
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error: ValueError")
    server.wait_for_line(f"unexpected error in {NAME}.Lookup")
    server.wait_for(lambda: "ValueError" in server.lines(), 60)
    assert "in Lookup" in server.log
    assert "secret" not in server.log


async def test_a_stream_may_fail_after_its_first_reply(channel: Any) -> None:
    replies = stub_of(channel).Fetch(pb.FetchRequest(key=b"fail"))
    assert (await replies.read()).data == b"first"
    error = await failure(replies.read())
    assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, "bad checksum")


async def test_a_cancelled_call_ends_the_method(serve: Serve) -> None:
    server, channel = serve("5")
    # Some of them are between two replies, where no CancelledError reaches the method: it must be closed.
    for _ in range(30):
        replies = stub_of(channel).Fetch(pb.FetchRequest())
        await replies.read()
        replies.cancel()
    await asyncio.to_thread(server.wait_for, lambda: server.log.count("ended") == 30, 60)


async def test_a_method_ends_with_the_task_that_called_it(serve: Serve) -> None:
    server, channel = serve("5")

    async def call() -> None:
        await stub_of(channel).Prefetch(pb.PrefetchRequest())

    task = asyncio.create_task(call())
    await asyncio.to_thread(server.wait_for_line, "begun")
    task.cancel()
    await asyncio.to_thread(server.wait_for_line, "ended")


async def test_health_is_checked_listed_and_watched(channel: Any, server: Any) -> None:
    health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
    serving, unknown = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    services = ("", NAME, "grpc.health.v1.Health")
    for service in services:
        assert (await health.Check(health_pb2.HealthCheckRequest(service=service))).status == serving
    error = await failure(health.Check(health_pb2.HealthCheckRequest(service="none")))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    listed = await health.List(health_pb2.HealthListRequest())
    assert {name: each.status for name, each in listed.statuses.items()} == dict.fromkeys(services, serving)
    assert "NotImplementedError" not in server.log
    for service, status in ((NAME, serving), ("x", unknown)):
        watch = health.Watch(health_pb2.HealthCheckRequest(service=service))
        assert (await watch.read()).status == status
        watch.cancel()


async def test_a_watcher_that_reads_nothing_holds_up_neither_others_nor_the_drain(serve: Serve) -> None:
    server, channel = serve("1")
    with Connection(server.address, window=0) as silent:
        stream = silent.open("/grpc.health.v1.Health/Watch")
        silent.send(stream, message_head(0), end=True)
        while stream not in silent.replies:
            assert silent.receive(20), "it was not answered"
        health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=5 * SLOWER)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        server.process.terminate()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await asyncio.to_thread(server.wait) == 0


@pytest.mark.parametrize(
    "method",
    [
        *(f"/grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch")),
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        f"/{NAME}/Lookup",
    ],
)
async def test_bytes_that_are_no_message_are_the_callers_mistake(channel: Any, server: Any, method: str) -> None:
    said = len(server.lines())
    error = await failure(channel.stream_stream(method)(iter([b"\xff"])).read())
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert not any("Error" in line for line in server.lines(said))


async def test_reflection_lists_the_services(channel: Any) -> None:
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    reply = await call.read()
    names = {service.name for service in reply.list_services_response.service}
    assert names == {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_messages_over_grpcs_usual_limit_pass_and_over_ours_are_refused(channel: Any) -> None:
    large = pb.DeleteRequest(namespace=bytes(rpc.MAX_REQUEST_BYTES - 5))
    assert (await stub_of(channel).Delete(large)).deleted == rpc.MAX_REQUEST_BYTES - 5
    too_large = pb.DeleteRequest(namespace=bytes(rpc.MAX_REQUEST_BYTES))
    assert (await failure(stub_of(channel).Delete(too_large))).code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("others", [0, 1])
async def test_a_place_goes_to_a_call_that_still_waits(others: int) -> None:
    """Also if one that does not is cancelled in the turn of the loop in which the place is left."""
    arrivals, entered, leave = Arrivals(places=1), list[str](), asyncio.Event()

    async def call(name: str) -> None:
        async with arrivals.place():
            entered.append(name)
            if name == "holder":
                await leave.wait()

    calls = [asyncio.create_task(call(name)) for name in ("holder", *["waiting"] * others, "cancelled")]
    await asyncio.sleep(0)
    leave.set()
    calls[-1].cancel()
    *ended, cancelled = await asyncio.gather(*calls, return_exceptions=True)
    assert (ended, type(cancelled)) == ([None] * (1 + others), asyncio.CancelledError)
    assert (entered, arrivals.free) == (["holder", *["waiting"] * others], 1)


async def test_a_unix_socket_and_a_port_at_once(launch: Any, tmp_path: Path) -> None:
    server = launch(SERVER, "5", f"unix:{tmp_path}/s", "127.0.0.1:0")
    assert len(server.addresses["test"]) == 2
    for address in server.addresses["test"]:
        async with rpc.dial(address) as channel:
            await stub_of(channel).Stats(pb.StatsRequest())
        with rpc.dial_sync(address) as channel_sync:
            stub_of(channel_sync).Stats(pb.StatsRequest())


def test_a_taken_port_is_refused_by_name(server: Any, launch: Any) -> None:
    with pytest.raises(AssertionError, match=f"can't listen on {server.address}: is the address in use"):
        launch(SERVER, "5", server.address)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_drain_finishes_calls_in_flight_and_refuses_new_ones(serve: Serve, number: signal.Signals) -> None:
    server, channel = serve("30")
    finish = await begun(server, channel)
    health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
    watch = health.Watch(health_pb2.HealthCheckRequest(service=NAME))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    server.process.send_signal(number)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watch.cancel()

    async def refused() -> bool:
        """Soon after health says so: what comes in between is still taken."""
        async with rpc.dial(server.address) as late:
            try:
                await stub_of(late).Stats(pb.StatsRequest())
            except grpc.aio.AioRpcError as error:
                return error.code() is grpc.StatusCode.UNAVAILABLE
        return False

    await until(refused)
    await finish()
    assert await asyncio.to_thread(server.wait) == 0
    assert server.log.splitlines()[-2:] == ["drained", "test stopped"]


async def test_a_drain_ends_in_time_whatever_is_in_flight(serve: Serve) -> None:
    server, channel = serve("0.2")
    replies = stub_of(channel).Fetch(pb.FetchRequest())
    await replies.read()
    server.process.terminate()
    assert type(errors.from_rpc(await failure(replies.read()), "fetch")) is errors.Unavailable
    assert await asyncio.to_thread(server.wait) == 0
    assert "drained" in server.log


@pytest.mark.parametrize(("sent", "seconds"), [("1500", 1.5), ("-1", None), ("9" * 400, None)])
def test_a_retry_delay_that_makes_no_sense_is_none(sent: str, seconds: float | None) -> None:
    refused = grpc.StatusCode.RESOURCE_EXHAUSTED
    error = grpc.aio.AioRpcError(refused, grpc.aio.Metadata(), grpc.aio.Metadata(("retry-after-ms", sent)))
    assert errors.from_rpc(error, "look up").retry_after == seconds


async def test_who_is_cancelled_gets_no_error_that_could_be_tried_again() -> None:
    """grpc.aio may tell a cancelled task by a status; whoever took that for a server's would go on for ever."""
    none = grpc.aio.Metadata()
    dropped = grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, none, none)
    assert type(errors.from_rpc(dropped, "fetch")) is errors.Unavailable
    assert type(await asyncio.to_thread(errors.from_rpc, dropped, "fetch")) is errors.Unavailable

    async def calling() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            with pytest.raises(asyncio.CancelledError):
                errors.from_rpc(dropped, "fetch")
            raise

    task = asyncio.create_task(calling())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_deadline_is_the_callers() -> None:
    for given, seconds in ((20.0, pytest.approx(20.0, abs=1.0)), (1e7, None), (None, None)):
        call: Any = SimpleNamespace(time_remaining=lambda given=given: given)
        assert rpc.deadline(call).timeout() == seconds
    assert rpc.deadline(None) == NO_DEADLINE


async def test_a_socket_in_a_folder_of_any_name_is_reached() -> None:
    folder = tempfile.mkdtemp(
        suffix="a b; c%2F é 100%"
    )  # shorter than tmp_path: a socket's path has at most 107 bytes
    address = f"unix:{folder}/s"
    server = grpc.aio.server()
    assert rpc._bind(server, address, None) == address
    await server.start()
    async with rpc.dial(address, traced=False) as channel:
        await asyncio.wait_for(channel.channel_ready(), 5)
    with rpc.dial_sync(address) as blocking:
        await asyncio.to_thread(grpc.channel_ready_future(blocking).result, 5)
    assert os.listdir(folder) == ["s"]
    await server.stop(0)
    shutil.rmtree(folder)


async def test_calls_between_services_use_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    server = grpc.aio.server()
    address = rpc._bind(server, "127.0.0.1:0", None)
    await server.start()
    async with rpc.dial(address, traced=False) as channel:
        await asyncio.wait_for(channel.channel_ready(), 5)
    await server.stop(0)


LONG = "unix:/" + "é" * 53 + "s"


@pytest.mark.parametrize(("address", "said"), [("unix:/a,b/s", "can't have a comma"), (LONG, "107 bytes, not 108")])
async def test_a_socket_whose_path_can_be_none_is_refused(address: str, said: str) -> None:
    for dial in (rpc.dial, rpc.dial_sync):
        with pytest.raises(errors.InvalidArgument, match=said):
            dial(address)
    with pytest.raises(errors.InvalidArgument, match=said):
        rpc._bind(grpc.aio.server(), address, None)
    for setting, kind in (({"workers": (address,)}, GatewayConfig), ({"cache": address}, WorkerConfig)):
        with pytest.raises(ValueError, match=said):
            kind(**setting)
    with pytest.raises(ValueError, match=said):
        Client(address)
    process.check_sockets([address.removesuffix("s").replace(",", ""), "dns:a:1", "127.0.0.1:1"])
