"""Every field of variable length of every request: what is too long is refused as such, and nothing dies of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from fusionkv.protos.fusion.v1 import fusion_pb2 as fusion
from fusionkv.protos.gateway.v1 import gateway_pb2 as gateway
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as kvcache
from fusionkv.protos.runtime import errors, rpc
from tests.services import Launch, start_cache, start_gateway, start_worker

pytestmark = pytest.mark.system
LONG = "x" * 100_000
DIGEST, CHECKSUM = bytes(32), bytes(16)
SERVICES = {
    "gateway": gateway.DESCRIPTOR.services_by_name["GatewayService"],
    "fusion": fusion.DESCRIPTOR.services_by_name["FusionService"],
    "kvcache": kvcache.DESCRIPTOR.services_by_name["KVCacheService"],
}
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,  # a fingerprint of any other length is another model's
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
TOKENS = {"ids": [1]}
GENERATE: dict[str, Any] = {"recipe": "full_reuse", "chunks": [TOKENS], "question": TOKENS}
EXACT = fusion.EncodeRequest.MODE_EXACT
HEADER: dict[str, Any] = {"namespace": DIGEST, "path": [DIGEST], "size_bytes": 1, "tokens": 1, "checksum": CHECKSUM}
# Requests that are as they should be, by method, and by place where a field needs others beside it.
GOOD: dict[str, dict[str, Any]] = {
    "gateway.Ingest": {"corpus": "c", "name": "a.txt", "content": b"a"},
    "gateway.Upload": {"document": {"corpus": "c", "name": "b.txt"}, "size_bytes": 1, "content": b"a"},
    "gateway.Move": {"corpus": "c"},
    "gateway.Precompute": {"corpus": "c"},
    "gateway.PlanPrecompute": {"corpus": "c"},
    "gateway.Delete": {"corpus": "c", "name": "none"},
    "gateway.List": {},
    "gateway.Retrieve": {"corpus": "c", "question": "?"},
    "gateway.Generate": {"corpus": "c", "question": "?"},
    "gateway.Generate messages": {"corpus": "c", "messages": [{"role": gateway.ROLE_USER, "text": "?"}]},
    "gateway.Generate passages": {"question": "?", "passages": [{"text": "x"}]},
    "fusion.Generate": GENERATE,
    "fusion.Prefill": {"prompt": {**GENERATE, "sampling": {"max_tokens": 1}}},
    "fusion.HoldPrefill": {"handle": bytes(16)},
    "fusion.FetchPrefill": {"handle": bytes(16), "ranks": 1},
    "fusion.ReleasePrefill": {"handle": bytes(16), "ranks": 1},
    "fusion.Encode": {"chunk": TOKENS, "before": [TOKENS], "mode": EXACT},
    "fusion.Encode corpus": {"chunk": TOKENS, "before": [{"ids": [2]}], "mode": fusion.EncodeRequest.MODE_PRIMED},
    "fusion.ForgetCorpus": {"corpus": "c"},
    "fusion.GetModel": {},
    "fusion.RenderTemplate": {},
    "kvcache.Lookup": {"namespace": DIGEST, "path": [{"digest": DIGEST}] * 2},
    "kvcache.Find": {"namespace": DIGEST, "digests": [DIGEST]},
    "kvcache.Fetch": {"key": DIGEST},
    "kvcache.Prefetch": {"keys": [DIGEST]},
    "kvcache.Put": {"header": HEADER},
    "kvcache.Put header.variant": {"header": {**HEADER, "path": [DIGEST] * 2}},
    "kvcache.Delete": {"keys": [DIGEST]},
    "kvcache.Delete namespace": {"namespace": DIGEST},
}
# Numbers that could cost time or memory of their own: the rest of the audit.
TOO_MUCH: dict[str, dict[str, Any]] = {
    "gateway.Precompute": {"corpus": "c", "recipe": "fusionrag", "neighbours": 1 << 31},
    "gateway.Upload": {"document": {"corpus": "c", "name": "b.txt"}, "size_bytes": 1 << 62},
    "gateway.Retrieve": {"corpus": "c", "question": "?", "top_k": 1 << 31},
    "gateway.Generate": {"corpus": "c", "question": "?", "top_k": 1 << 31},
    "gateway.Generate sampling": {"corpus": "c", "question": "?", "sampling": {"max_tokens": 1 << 31}},
    "fusion.Generate": {**GENERATE, "sampling": {"max_tokens": 1 << 31}},
    "kvcache.Put": {"header": {**HEADER, "size_bytes": 1 << 62}},
}


def made(name: str, fields: dict[str, Any]) -> Any:
    """A request of the method that a name begins with."""
    service, _, method = name.partition(" ")[0].partition(".")
    return message_factory.GetMessageClass(SERVICES[service].methods_by_name[method].input_type)(**fields)


def places(message: Descriptor, before: str = "") -> Iterator[str]:
    """Fields of variable length, those of messages within included; `[]` are the texts or bytes of a list."""
    for field in message.fields:
        place = before + field.name
        repeated = field.is_repeated
        if repeated:
            yield place
        if field.message_type:
            # A list of lists of numbers is as long as its numbers are many, so it needs no line of its own.
            yield from (p for p in places(field.message_type, f"{place}."))
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            yield f"{place}[]" if repeated else place


def long(field: FieldDescriptor) -> Any:
    special = {
        "recipe": "full_reuse" + "+isolated" * 10_000,
        "page_token": "61" * 100_000,
        "content": bytes(33 << 20),
    }
    return special.get(field.name, LONG if field.type == FieldDescriptor.TYPE_STRING else bytes(100_000))


def lengthen(message: Any, place: str) -> None:
    """Makes one field far too long."""
    name, _, rest = place.partition(".")
    field = message.DESCRIPTOR.fields_by_name[name.removesuffix("[]")]
    value = getattr(message, field.name)
    if field.message_type and field.message_type.GetOptions().map_entry:
        value.update({"": {str(i): "" for i in range(10**4)}, "key": {LONG: "x"}, "value": {"x": LONG}}[rest])
    elif rest:
        lengthen((value[-1] if value else value.add()) if field.is_repeated else value, rest)
    elif field.is_repeated and field.message_type:
        value.extend([value[0] if value else value.add()] * 10_000)
    elif name.endswith("[]"):
        value.append(long(field))
    elif field.is_repeated:
        value.extend(
            [{FieldDescriptor.TYPE_STRING: "x", FieldDescriptor.TYPE_BYTES: DIGEST}.get(field.type, 1)] * 100_000
        )
    else:
        setattr(message, field.name, long(field))


def too_long(place: str) -> Any:
    base = max((name for name in GOOD if place.startswith(name)), key=len)
    request, more = made(base, GOOD[base]), made(base, {})
    if place == "kvcache.Put data":
        lengthen(more, "data")
        return [request, more]
    lengthen(request, place.partition(" ")[2])
    return request


# A new field is tested as soon as it is there.
PLACES = [
    f"{name}.{method.name} {place}"
    for name, service in SERVICES.items()
    for method in service.methods
    for place in places(method.input_type)
]


@pytest.fixture(scope="module")
def channels(
    launch_module: Launch, reference_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, grpc.Channel]]:
    folder = tmp_path_factory.mktemp("limits")
    cache = start_cache(launch_module, folder)
    worker = start_worker(launch_module, reference_model, cache=cache)
    front = start_gateway(launch_module, folder, worker)
    made = {
        name: rpc.dial_sync(service.address)
        for name, service in (("kvcache", cache), ("fusion", worker), ("gateway", front))
    }
    document = gateway.IngestRequest(corpus="c", name="a.txt", content=b"A page.")
    assert call(made, "gateway.Ingest", document) is None
    yield made
    for channel in made.values():
        channel.close()


def call(channels: dict[str, grpc.Channel], name: str, request: Any) -> grpc.StatusCode | None:
    """The status of a call that fails, of whatever kind the method is; the message is of bounded size."""
    service, _, method = name.partition(" ")[0].partition(".")
    described = SERVICES[service].methods_by_name[method]
    kind = "stream" if described.client_streaming else "unary"
    multi = getattr(channels[service], f"{kind}_stream")(
        f"/{described.containing_service.full_name}/{method}",
        request_serializer=message_factory.GetMessageClass(described.input_type).SerializeToString,
    )
    requests = request if isinstance(request, list) else [request]
    failed: Any = None
    try:
        list(multi(iter(requests) if described.client_streaming else request, timeout=60))
    except grpc.RpcError as error:
        failed = error
    assert failed is None or len(failed.details().encode()) <= 2100
    return failed and failed.code()


@pytest.mark.parametrize("name", GOOD)
def test_what_is_as_it_should_be_is_not_refused(channels: dict[str, grpc.Channel], name: str) -> None:
    data = [kvcache.PutRequest(data=b"x")] if name.startswith("kvcache.Put") else []
    assert call(channels, name, [made(name, GOOD[name]), *data] if data else made(name, GOOD[name])) not in REFUSALS


@pytest.mark.parametrize("place", PLACES)
def test_what_is_too_long_is_refused(channels: dict[str, grpc.Channel], place: str) -> None:
    assert call(channels, place, too_long(place)) in REFUSALS


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_is_too_much_is_refused(channels: dict[str, grpc.Channel], name: str) -> None:
    assert call(channels, name, made(name, TOO_MUCH[name])) in REFUSALS


def test_a_long_message_is_cut_where_a_character_ends() -> None:
    for text in ("a" * 5000, "ü" * 5000, "a" + "\U0001f600" * 5000, "\ud800" * 5000):
        said = errors.details(errors.InvalidArgument(text))
        assert len(said.encode()) <= 2003
        assert said.endswith("...")
    assert errors.details(errors.InvalidArgument("short")) == "short"
