"""Every RPC of every service, and the HTTP endpoint, with messages of any content and bytes of any kind.

A service answers, or refuses with the status of a caller's mistake, in time; it logs no traceback, and lives.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import strategies as st

from fusionkv.gateway.client.client import Client
from fusionkv.protos.fusion.v1 import fusion_pb2
from fusionkv.protos.gateway.v1 import gateway_pb2
from fusionkv.protos.kvcache.v1 import kvcache_pb2
from fusionkv.protos.runtime import rpc
from fusionkv.protos.runtime.checksum import checksum as checksum_of
from tests.fuzz import effort
from tests.fuzz.effort import fuzz
from tests.fuzz.wire import DIGESTS, JSON, messages
from tests.gateway.strangers import send
from tests.services import Launch, start_cache, start_gateway, start_worker

pytestmark = [pytest.mark.system, pytest.mark.hypothesis]
S = grpc.StatusCode
RIGHT = {S.OK, S.INVALID_ARGUMENT, S.NOT_FOUND, S.FAILED_PRECONDITION, S.RESOURCE_EXHAUSTED}
SECONDS = 60.0
# Of a stream that answers, so many messages tell enough.
_READ = 3
# Of each message; as many calls at once as a service with its usual limits takes, and as often as that.
_CHANGED = 16
_TIMES = 8 if effort.SECONDS else 1
SERVICES = {
    "kvcache": kvcache_pb2.DESCRIPTOR.services_by_name["KVCacheService"],
    "fusion": fusion_pb2.DESCRIPTOR.services_by_name["FusionService"],
    "gateway": gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"],
}
METHODS = [(name, method.name) for name, service in SERVICES.items() for method in service.methods]


class Running:
    """The three services, a channel to each, and an HTTP port."""

    def __init__(self, launch: Launch, folder: Path, model: Path) -> None:
        cache = start_cache(launch, folder)
        worker = start_worker(launch, model, "--pool-bytes", "32MiB", cache=cache)
        front = start_gateway(launch, folder, worker, "--http-listen", "127.0.0.1:0", services=2)
        self.services = {"kvcache": cache, "fusion": worker, "gateway": front}
        self.channels = {name: rpc.dial_sync(service.address) for name, service in self.services.items()}
        self._read = dict.fromkeys(self.services, 0)
        self.http = front.addresses["fusionkv-gateway-http"][0]
        with Client(front.address) as client:
            client.ingest("c", "a.txt", "The lake is blue. " * 40)

    def sound(self, name: str) -> None:
        service = self.services[name]
        assert service.process.poll() is None, service.log
        # Not all of the log each time: after 10,000 inputs that takes longer than a call.
        said = service.lines(self._read[name])
        self._read[name] += len(said)
        assert not any("unexpected error" in line for line in said), service.log[-5000:]


@pytest.fixture(scope="module")
def running(launch_module: Launch, reference_model: Path, tmp_path_factory: Any) -> Iterator[Running]:
    made = Running(launch_module, tmp_path_factory.mktemp("fuzz"), reference_model)
    yield made
    for channel in made.channels.values():
        channel.close()


def call(channel: grpc.Channel, method: MethodDescriptor, inputs: Sequence[Sequence[Any]], raw: bool) -> None:
    """Calls all at once, each with these messages, or with these bytes in their place; their statuses are right."""
    kind = f"{'stream' if method.client_streaming else 'unary'}_stream"
    to_bytes = None if raw else message_factory.GetMessageClass(method.input_type).SerializeToString
    called = getattr(channel, kind)(
        f"/{method.containing_service.full_name}/{method.name}", request_serializer=to_bytes
    )
    begun = [called(iter(sent) if method.client_streaming else sent[0], timeout=SECONDS) for sent in inputs]
    for sent, replies in zip(inputs, begun, strict=True):
        try:
            for _ in zip(range(_READ), replies, strict=False):
                pass
        except grpc.RpcError as error:
            status: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
            # A Put whose bytes are not those of its checksum says so.
            if status not in RIGHT and (method.name, status) != ("Put", S.DATA_LOSS):
                raise AssertionError(f"{status.name}: {error.details()} to {sent}") from None  # type: ignore[attr-defined]
        replies.cancel()


def changed(message: bytes, dice: random.Random) -> bytes:
    """With one to four places changed: a bit, a byte, some bytes less, or some twice."""
    made = bytearray(message)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(made) + 1)
        stretch = made[at : at + dice.randint(1, 8)]
        how = dice.randrange(4)
        if how == 0 and stretch:
            made[at] ^= 1 << dice.randrange(8)
        elif how == 1:
            made[at : at + 1] = bytes([dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))])
        elif how == 2:
            made[at : at + len(stretch)] = b""
        else:
            made[at:at] = stretch
    return bytes(made)


@st.composite
def puts(draw: st.DrawFn) -> list[Any]:
    """Headers and data in any order; half of them as they should be."""
    if draw(st.booleans()):
        return draw(st.lists(messages(kvcache_pb2.PutRequest.DESCRIPTOR), min_size=1, max_size=4))
    data = draw(st.binary(max_size=2000))
    header = kvcache_pb2.PutHeader(
        namespace=draw(st.sampled_from(DIGESTS)),
        path=draw(st.lists(st.sampled_from(DIGESTS), min_size=1, max_size=3)),
        size_bytes=len(data) + draw(st.sampled_from([0, 0, 0, 1])),
        tokens=1,
        checksum=checksum_of(data),
    )
    cut = draw(st.integers(0, len(data)))
    parts = [kvcache_pb2.PutRequest(data=part) for part in (data[:cut], data[cut:]) if part]
    return [kvcache_pb2.PutRequest(header=header), *parts]


def sent_to(method: MethodDescriptor) -> st.SearchStrategy[list[Any]]:
    return puts() if method.name == "Put" else messages(method.input_type).map(lambda message: [message])


@pytest.mark.parametrize(("service", "name"), METHODS)
def test_messages(running: Running, service: str, name: str) -> None:
    method, channel = SERVICES[service].methods_by_name[name], running.channels[service]

    def message_of_any_content(sent: list[Any]) -> None:
        call(channel, method, [sent], raw=False)
        running.sound(service)

    def message_with_changed_bytes(given: tuple[list[Any], int]) -> None:
        """Many of each, since changing some bytes takes no time beside making a message up; all at once."""
        sent, seed = given
        parts, dice = [message.SerializeToString() for message in sent], random.Random(seed)
        for _ in range(_TIMES):
            inputs = [[changed(part, dice) for part in parts] for _ in range(_CHANGED)]
            call(channel, method, inputs, raw=True)
            running.sound(service)

    def bytes_for_a_message(sent: list[bytes]) -> None:
        call(channel, method, [sent], raw=True)
        running.sound(service)

    fuzz(message_of_any_content, sent_to(method), 8)
    given = st.tuples(sent_to(method), st.integers(0, 2**32))
    fuzz(message_with_changed_bytes, given, 1, each=_TIMES * _CHANGED)
    fuzz(bytes_for_a_message, st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=3), 4)


FIELDS = [
    "model", "messages", "stream", "max_tokens", "temperature", "top_p", "seed", "stop", "n", "fusionkv", "user",
]  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": st.one_of(st.sampled_from(["user", "system", "assistant"]), JSON), "content": JSON}
)
OWNS = st.sampled_from(["corpus", "recipe", "ratio", "top_k", "order", "query", "x"])
GOOD = {"model": "c", "messages": [{"role": "user", "content": "Which lake?"}], "max_tokens": 2}


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    if draw(st.integers(0, 4)) == 0:
        return draw(st.one_of(st.binary(max_size=60), st.integers(1, 50_000).map(lambda n: b"[" * n)))
    body: dict[str, Any] = dict(GOOD)
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=3)):
        inside = {"messages": st.lists(MESSAGE, max_size=3), "fusionkv": st.dictionaries(OWNS, JSON, max_size=3)}.get(
            name, JSON
        )
        body[name] = draw(st.one_of(inside, JSON))
    return json.dumps(body).encode(errors="replace")


def request(running: Running, method: str, path: bytes, body: bytes, headers: dict[str, bytes]) -> int:
    """The status of a request whose bytes are sent as they are."""
    lines = [b"%s %s HTTP/1.1" % (method.encode(), path), b"Host: localhost", b"Connection: close"]
    lines += [name.encode() + b": " + value for name, value in headers.items()]
    lines.append(b"Content-Length: %d" % len(body))
    return int(send(running.http, b"\r\n".join((*lines, b"", body)), SECONDS).split()[1])


def test_bodies_of_the_http_endpoint(running: Running) -> None:
    def http_body(body: bytes) -> None:
        status = request(running, "POST", b"/v1/chat/completions", body, {"Content-Type": b"application/json"})
        assert status in (200, 400, 404, 413, 429), (status, body)
        running.sound("gateway")

    fuzz(http_body, bodies(), 25)


def test_paths_and_headers_of_the_http_endpoint(running: Running) -> None:
    """Printable bytes and beyond; what ends a line or a word would be another request."""
    allowed = [byte for byte in range(0x21, 0x100) if byte != 0x7F]
    word = st.lists(st.sampled_from(allowed), max_size=20).map(bytes)
    names = st.sampled_from(["Authorization", "Content-Type", "Accept", "traceparent", "X-Any", "Expect"])

    def http_head(given: tuple[str, bytes, dict[str, bytes]]) -> None:
        method, path, headers = given
        if (method, path) != ("GET", b"v1/models"):
            headers.pop("Expect", None)  # aiohttp answers 500 itself to one that is no text, for what is not there
        status = request(running, method, b"/" + path, b"{}", headers)
        assert status < 500 or status == 501, (status, given)
        running.sound("gateway")

    paths = st.one_of(word, word.map(lambda w: b"v1/models/" + w), st.just(b"v1/models"))
    fuzz(http_head, st.tuples(st.sampled_from(["GET", "POST", "PUT"]), paths, st.dictionaries(names, word)), 25)


def test_a_service_answers_as_before(running: Running) -> None:
    with Client(running.services["gateway"].address) as client:
        client.ingest("after", f"{random.random()}.txt", "The hill is green. " * 20)
        assert client.ask("after", "Which hill?", max_tokens=2).summary.tokens_generated
