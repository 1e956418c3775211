"""Input that is refused costs little time and memory, for each method of each service and each HTTP route."""

import contextlib
import gzip
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusionkv.gateway.client.client import Client
from fusionkv.protos.runtime import rpc
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.http2 import Connection, message_head
from tests.services import Launch, start_cache, start_gateway, start_worker, token_entry, token_flags
from tests.system.test_telemetry import scrape

pytestmark = pytest.mark.system
MIB = 1 << 20
APP = secrets.token_urlsafe(32)
HTTP = "fusionkv-gateway-http"
# All methods are served by the same code: of each service one that takes a message, and one that takes a stream.
EVERYWHERE = ("/grpc.health.v1.Health/Check", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
METHODS = {
    "gateway": ("/gateway.v1.GatewayService/Generate", "/gateway.v1.GatewayService/Upload", *EVERYWHERE),
    "worker": ("/fusion.v1.FusionService/Generate", *EVERYWHERE),
    "cache": ("/kvcache.v1.KVCacheService/Lookup", "/kvcache.v1.KVCacheService/Put", *EVERYWHERE),
}
# What a caller of the gateway shows. Nobody else asks for anything.
CREDENTIALS: dict[str, list[tuple[str, str]]] = {
    "none": [],
    "wrong": [("authorization", "Bearer wrong")],
    "app": [("authorization", f"Bearer {APP}")],
}
# Limits of one method's share: seconds of a processor for a MiB that was sent, and in all; and MiB of memory. Callers
# that were let in may have 16 messages of 8 MiB arrive; to a stranger, two.
SECONDS_PER_MIB, SECONDS = 0.1, 0.5
STRANGERS, CALLERS = 48, 16 * 8 + 64
BOMB = gzip.compress(bytes(64 * MIB))
FIELDS = b"".join(bytes([number << 3 | 2, 0]) for number in range(1, 16))


class Cost:
    """What a process has spent and holds since this was made."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seconds, self._bytes = self._now()

    def _now(self) -> tuple[float, int]:
        stat = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        held = next(line for line in Path(f"/proc/{self._pid}/status").read_text().splitlines() if "VmRSS" in line)
        return (int(stat[11]) + int(stat[12])) / 100, int(held.split()[1]) << 10

    def check(self, what: str, sent: int, most: int) -> None:
        seconds, held = self._now()
        seconds, grown = seconds - self._seconds, (held - self._bytes) / MIB
        assert seconds <= SECONDS + SECONDS_PER_MIB * sent / MIB, f"{what}: {seconds:.2f} s for {sent / MIB:.1f} MiB"
        assert grown <= most, f"{what}: {grown:.0f} MiB for {sent / MIB:.1f} MiB"


def unfinished(connection: Connection, method: str, shown: list[tuple[str, str]]) -> int:
    """Many messages, each as long as may be, of which the end never comes."""
    sent, size = 0, rpc.MAX_REQUEST_BYTES
    for _ in range(40):
        stream = connection.open(method, *shown)
        took = connection.send(stream, message_head(size) + bytes(size - 1), patience=0.02)
        sent += took
    return sent


def endless(connection: Connection, method: str, shown: list[tuple[str, str]]) -> int:
    """Messages that say to be far too long."""
    streams = [connection.open(method, *shown) for _ in range(6)]
    return sum(connection.send(s, message_head(64 * MIB) + bytes(32 * MIB), patience=0.05) for s in streams)


def compressed(connection: Connection, method: str, shown: list[tuple[str, str]]) -> int:
    streams = [connection.open(method, ("grpc-encoding", "gzip"), *shown) for _ in range(10)]
    body = message_head(len(BOMB), compressed=True) + BOMB
    sent = sum(connection.send(stream, body, patience=0.05, end=True) for stream in streams)
    connection.finish(5)
    return sent


def crowded(connection: Connection, method: str, shown: list[tuple[str, str]]) -> int:
    """Messages of nothing but fields, which take far more memory than their bytes once they are parsed."""
    body = FIELDS * (7 * MIB // len(FIELDS))
    sent = 0
    for _ in range(2):
        stream = connection.open(method, *shown)
        sent += connection.send(stream, message_head(len(body)) + body, patience=0.5, end=True)
    connection.finish(10)
    return sent


def reset(connection: Connection, method: str, shown: list[tuple[str, str]]) -> int:
    """Calls that are dropped as soon as they have begun."""
    calls = b"".join(
        connection.head(stream, method, *shown) + connection.reset(stream) for stream in range(1, 801, 2)
    )
    connection.write(calls)
    connection.receive(0.2)
    return len(calls)


ATTACKS: list[Callable[[Connection, str, list[tuple[str, str]]], int]] = [
    unfinished, endless, compressed, crowded, reset,
]  # fmt: skip


@pytest.fixture(scope="module")
def services(
    launch_module: Launch, reference_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("admission")
    cache = start_cache(launch_module, folder)
    metrics = ("--metrics-listen", "127.0.0.1:0")
    worker = start_worker(launch_module, reference_model, *metrics, cache=cache)
    tokens = token_flags(folder, token_entry(APP, "app"))
    flags = (*tokens, *metrics, "--http-listen", "127.0.0.1:0")
    gateway = start_gateway(launch_module, folder, worker, *flags, services=2)
    with Client(gateway.address, token=APP, timeout=60) as client:
        client.ingest("c", "a.txt", "A page about a lake.")
        assert client.ask("c", "Which lake?", max_tokens=1).text
    return {"cache": cache, "worker": worker, "gateway": gateway}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("name", METHODS)
def test_a_message_that_is_refused_costs_little(services: dict[str, Any], name: str, attack: Any) -> None:
    process = services[name]
    pid = process.process.pid
    for method in METHODS[name]:
        for who, shown in CREDENTIALS.items() if name == "gateway" else [("anybody", [])]:
            known = who in ("app", "anybody") and "Health" not in method
            cost = Cost(pid)
            with Connection(process.address) as connection:
                sent = attack(connection, method, shown)
                cost.check(f"{attack.__name__} {method} {who}", sent, CALLERS if known else STRANGERS)


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *lines, "", "")).encode()


ROUTES = [("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/nothing")]
LISTS = b"[" + b"[]," * (MIB * 5 // 4) + b"0]"
WIDE = b'{"model":"c","messages":[' + b'{"role":"user","content":"x"},' * 100_000 + b"0]}"
BODIES = {
    "compressed": (("Content-Encoding: gzip",), gzip.compress(bytes(3 * MIB)), 40),
    "brotli": (("Content-Encoding: br",), b"\xff" * 4096, 40),
    "lists": ((), LISTS, 3),
    "wide": ((), WIDE, 3),
    "numbers": ((), b'{"seed":' + b"9" * (3 * MIB) + b"}", 3),
    "too large": ((), bytes(5 * MIB), 3),
    "text": (("Content-Type: text/plain",), LISTS, 3),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_that_is_refused_costs_little(services: dict[str, Any], kind: str) -> None:
    gateway = services["gateway"]
    lines, body, times = BODIES[kind]
    typed = lines if any("Type" in line for line in lines) else ("Content-Type: application/json", *lines)
    for method, path in ROUTES:
        for who, shown in CREDENTIALS.items():
            cost, sent = Cost(gateway.process.pid), 0
            own = tuple(f"{key}: {value}" for key, value in shown)
            for _ in range(times):
                request = head(method, path, *typed, *own, f"Content-Length: {len(body)}", "Connection: close")
                with opened(gateway.addresses[HTTP][0]) as connection:
                    sent += offer(connection, request + body)
                    with contextlib.suppress(OSError):
                        said = connection.recv(100)
                        assert method == "GET" or said.split()[1].startswith(b"4"), said
            cost.check(f"{kind} {method} {path} {who}", sent, STRANGERS)


def test_bodies_that_never_end_cost_little(services: dict[str, Any]) -> None:
    gateway = services["gateway"]
    for method, path in ROUTES:
        for who, shown in CREDENTIALS.items():
            cost, sent = Cost(gateway.process.pid), 0
            own = tuple(f"{key}: {value}" for key, value in shown)
            request = head(method, path, "Content-Type: application/json", *own, f"Content-Length: {4 * MIB}")
            with contextlib.ExitStack() as stack:
                for _ in range(40):
                    connection = stack.enter_context(opened(gateway.addresses[HTTP][0]))
                    connection.settimeout(0.02)
                    sent += offer(connection, request + bytes(4 * MIB - 1))
                cost.check(f"unfinished {method} {path} {who}", sent, 16 * 4 + 48 if who == "app" else STRANGERS)


@contextlib.contextmanager
def opened(address: str) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        yield connection


def offer(connection: socket.socket, data: bytes) -> int:
    """Sends as much as the server takes; returns how much that was."""
    sent = 0
    with contextlib.suppress(OSError):
        while sent < len(data):
            sent += connection.send(data[sent : sent + (1 << 16)])
    return sent


def test_a_large_document_comes_in_pieces(services: dict[str, Any]) -> None:
    """With gRPC's own limit on a message, which is far less."""
    page = b"<p>The lake is blue.</p><!--" + b"x" * (24 * MIB) + b"--><p>The hill is green.</p>"
    with Client(services["gateway"].address, token=APP, timeout=60) as client:
        assert client.ingest("large", "a.html", page).documents == 1
        (found,) = client.retrieve("large", "hill")
        assert "The hill is green." in found.text
        assert client.ingest("large", "a.html", b"<p>Replaced.</p>").replaced == 1


def test_callers_make_no_labels(services: dict[str, Any]) -> None:
    with Client(services["gateway"].address, token=APP, timeout=60) as client:
        for number in range(1, 9):
            for more in ("", "+snapkv(80)", "+isolated+snapkv(80)"):
                client.ask("c", "Which lake?", max_tokens=2, recipe=f"cacheblend+window({number},1){more}")
            with pytest.raises(InvalidArgument):
                client.ask("c", "Which lake?", recipe=f"unknown{number}")
    for name in ("gateway", "worker"):
        labels = {
            sample.labels["fusionkv_recipe"]
            for family in scrape(services[name]).values()
            for sample in family.samples
            if "fusionkv_recipe" in sample.labels
        }
        assert labels - {"default", "deeplayer+primed"} <= {
            "cacheblend+window",
            "cacheblend+several",
            "prefix_cache",
        }, name
        assert "cacheblend+several" in labels, name


def test_answers_go_on(services: dict[str, Any]) -> None:
    """After all of it, and beside it."""
    gateway = services["gateway"]
    with Client(gateway.address, token=APP, timeout=60) as client, Connection(gateway.address) as connection:
        for _ in range(20):
            stream = connection.open("/gateway.v1.GatewayService/List", *CREDENTIALS["app"])
            connection.send(stream, message_head(MIB) + bytes(MIB - 1), patience=0.02)
        assert client.ask("c", "Which lake?", max_tokens=1).text
        assert "c" in [item.name for item in client.list()]
