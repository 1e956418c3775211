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
DIGEST = bytes(32)
MANY = [DIGEST] * 100_000
MANY_TOKENS = fusion.Tokens(ids=[1] * 100_000)
TOKENS = fusion.Tokens(ids=[1])
CHUNK = fusion.Chunk(ids=[1])
USER = gateway.ROLE_USER


def ask(**given: Any) -> gateway.GenerateRequest:
    return gateway.GenerateRequest(**{"corpus": "c", "question": "?", **given})


def own(*passages: gateway.Passage) -> gateway.GenerateRequest:
    return ask(corpus="", passages=passages)


def generate(**given: Any) -> fusion.GenerateRequest:
    return fusion.GenerateRequest(**{"recipe": "full_reuse", "question": TOKENS, **given})


def encode(**given: Any) -> fusion.EncodeRequest:
    return fusion.EncodeRequest(**{"chunk": TOKENS, "mode": fusion.EncodeRequest.MODE_EXACT, **given})


def header(**given: Any) -> kvcache.PutRequest:
    good = {"namespace": DIGEST, "path": [DIGEST], "size_bytes": 1, "tokens": 1, "checksum": bytes(16)}
    return kvcache.PutRequest(header=kvcache.PutHeader(**{**good, **given}))


def lookup(**given: Any) -> kvcache.LookupRequest:
    return kvcache.LookupRequest(**{"namespace": DIGEST, "path": [kvcache.PathElement(digest=DIGEST)], **given})


FILE: dict[str, Any] = {"corpus": "c", "name": "a.txt", "content": b"a"}
SEARCH: dict[str, Any] = {"corpus": "c", "question": "?"}
# A request with one field too long, by the field's place in the request.
TOO_LONG: dict[str, Any] = {
    "gateway.Ingest corpus": gateway.IngestRequest(corpus=LONG, name="a.txt", content=b"a"),
    "gateway.Ingest name": gateway.IngestRequest(corpus="c", name=LONG, content=b"a"),
    "gateway.Ingest media_type": gateway.IngestRequest(corpus="c", name="a.txt", media_type=LONG, content=b"a"),
    "gateway.Ingest content": gateway.IngestRequest(corpus="c", name="a.txt", content=bytes(33 << 20)),
    "gateway.Ingest metadata": gateway.IngestRequest(**FILE, metadata={str(i): "" for i in range(10**4)}),
    "gateway.Ingest metadata.key": gateway.IngestRequest(**FILE, metadata={LONG: "x"}),
    "gateway.Ingest metadata.value": gateway.IngestRequest(**FILE, metadata={"x": LONG}),
    "gateway.Ingest source": gateway.IngestRequest(**FILE, source=LONG),
    "gateway.Ingest prefix": gateway.IngestRequest(**FILE, prefix=LONG),
    "gateway.Move corpus": gateway.MoveRequest(corpus=LONG),
    "gateway.Precompute corpus": gateway.PrecomputeRequest(corpus=LONG),
    "gateway.Precompute name": gateway.PrecomputeRequest(corpus="c", name=LONG),
    "gateway.Precompute recipe": gateway.PrecomputeRequest(corpus="c", recipe=LONG),
    "gateway.PlanPrecompute corpus": gateway.PlanPrecomputeRequest(corpus=LONG),
    "gateway.PlanPrecompute recipe": gateway.PlanPrecomputeRequest(corpus="c", recipe=LONG),
    "gateway.Delete corpus": gateway.DeleteRequest(corpus=LONG),
    "gateway.Delete name": gateway.DeleteRequest(corpus="c", name=LONG),
    "gateway.List corpus": gateway.ListRequest(corpus=LONG),
    "gateway.List page_token": gateway.ListRequest(page_token="61" * 100_000),
    "gateway.Retrieve corpus": gateway.RetrieveRequest(corpus=LONG, question="?"),
    "gateway.Retrieve question": gateway.RetrieveRequest(corpus="c", question=LONG),
    "gateway.Retrieve filter": gateway.RetrieveRequest(**SEARCH, filter={str(i): "" for i in range(10**4)}),
    "gateway.Retrieve filter.key": gateway.RetrieveRequest(**SEARCH, filter={LONG: "x"}),
    "gateway.Retrieve filter.value": gateway.RetrieveRequest(**SEARCH, filter={"x": LONG}),
    "gateway.Generate filter": ask(filter={str(i): "" for i in range(10**4)}),
    "gateway.Generate filter.key": ask(filter={LONG: "x"}),
    "gateway.Generate filter.value": ask(filter={"x": LONG}),
    "gateway.Generate corpus": ask(corpus=LONG),
    "gateway.Generate question": ask(question=LONG),
    "gateway.Generate query": ask(query=LONG),
    "gateway.Generate system": ask(system=LONG),
    "gateway.Generate messages": ask(question="", messages=[gateway.Message()] * 10_000),
    "gateway.Generate messages.text": ask(question="", messages=[gateway.Message(role=USER, text=LONG)]),
    "gateway.Generate passages": own(*[gateway.Passage(text="x")] * 10_000),
    "gateway.Generate passages.document": own(gateway.Passage(text="x", document=LONG)),
    "gateway.Generate passages.text": own(gateway.Passage(text=LONG)),
    "gateway.Generate passages.id": own(gateway.Passage(text="x", id=LONG)),
    "gateway.Generate passages.metadata": own(gateway.Passage(text="x", metadata={str(i): "" for i in range(10**4)})),
    "gateway.Generate passages.metadata.key": own(gateway.Passage(text="x", metadata={LONG: "x"})),
    "gateway.Generate passages.metadata.value": own(gateway.Passage(text="x", metadata={"x": LONG})),
    "gateway.Generate passages.title": own(gateway.Passage(text="x", title=LONG)),
    "gateway.Generate recipe": ask(recipe="full_reuse" + "+isolated" * 10_000),
    "gateway.Generate sampling.stop": ask(sampling=gateway.Sampling(stop=["x"] * 10_000)),
    "gateway.Generate sampling.stop[]": ask(sampling=gateway.Sampling(stop=[LONG])),
    "fusion.Generate recipe": generate(recipe="full_reuse" + "+isolated" * 10_000),
    "fusion.Generate system.ids": generate(system=MANY_TOKENS),
    "fusion.Generate chunks": generate(chunks=[CHUNK] * 100_000),
    "fusion.Generate chunks.ids": generate(chunks=[fusion.Chunk(ids=MANY_TOKENS.ids)]),
    "fusion.Generate chunks.variants": generate(chunks=[fusion.Chunk(ids=[1], variants=MANY)]),
    "fusion.Generate chunks.variants[]": generate(chunks=[fusion.Chunk(ids=[1], variants=[bytes(100_000)])]),
    "fusion.Generate question.ids": generate(question=MANY_TOKENS),
    "fusion.Generate sampling.stop": generate(sampling=fusion.Sampling(stop=["x"] * 10_000)),
    "fusion.Generate sampling.stop[]": generate(sampling=fusion.Sampling(stop=[LONG])),
    "fusion.Generate model_fingerprint": generate(model_fingerprint=bytes(100_000)),
    "fusion.Generate tenant": generate(tenant=LONG),
    "fusion.Generate corpus": generate(corpus=LONG),
    "fusion.HoldPrefill handle": fusion.HoldPrefillRequest(handle=bytes(100_000)),
    "fusion.FetchPrefill handle": fusion.FetchPrefillRequest(handle=bytes(100_000)),
    "fusion.ReleasePrefill handle": fusion.ReleasePrefillRequest(handle=bytes(100_000)),
    "fusion.ReleasePrefill error": fusion.ReleasePrefillRequest(handle=bytes(16), error=LONG),
    "fusion.Encode system.ids": encode(system=MANY_TOKENS),
    "fusion.Encode before": encode(before=[TOKENS] * 100_000),
    "fusion.Encode before.ids": encode(before=[MANY_TOKENS]),
    "fusion.Encode chunk.ids": encode(chunk=MANY_TOKENS),
    "fusion.Encode model_fingerprint": encode(model_fingerprint=bytes(100_000)),
    "fusion.Encode tenant": encode(tenant=LONG),
    "fusion.Encode corpus": encode(before=[TOKENS], mode=fusion.EncodeRequest.MODE_CORRECTION, corpus=LONG),
    "kvcache.Lookup namespace": lookup(namespace=bytes(100_000)),
    "kvcache.Lookup path": lookup(path=[kvcache.PathElement(digest=DIGEST)] * 10_000),
    "kvcache.Lookup path.digest": lookup(path=[kvcache.PathElement(digest=bytes(100_000))]),
    "kvcache.Lookup path.variants": lookup(path=[kvcache.PathElement(digest=DIGEST, variants=MANY)]),
    "kvcache.Lookup path.variants[]": lookup(path=[kvcache.PathElement(digest=DIGEST, variants=[bytes(100_000)])]),
    "kvcache.Fetch key": kvcache.FetchRequest(key=bytes(100_000)),
    "kvcache.Prefetch keys": kvcache.PrefetchRequest(keys=MANY),
    "kvcache.Prefetch keys[]": kvcache.PrefetchRequest(keys=[bytes(100_000)]),
    "kvcache.Put data": [header(), kvcache.PutRequest(data=bytes(100_000))],
    "kvcache.Put header.namespace": [header(namespace=bytes(100_000))],
    "kvcache.Put header.path": [header(path=MANY)],
    "kvcache.Put header.path[]": [header(path=[bytes(100_000)])],
    "kvcache.Put header.variant": [header(path=[DIGEST] * 2, variant=bytes(100_000))],
    "kvcache.Put header.checksum": [header(checksum=bytes(100_000))],
    "kvcache.Put header.signature": [header(signature=bytes(100_000))],
    "kvcache.Delete keys": kvcache.DeleteRequest(keys=MANY),
    "kvcache.Delete keys[]": kvcache.DeleteRequest(keys=[bytes(100_000)]),
    "kvcache.Delete namespace": kvcache.DeleteRequest(namespace=bytes(100_000)),
}
TOO_LONG |= {
    name.replace("fusion.Generate ", "fusion.Prefill prompt."): fusion.PrefillRequest(prompt=request)
    for name, request in TOO_LONG.items()
    if name.startswith("fusion.Generate ")
}
# Numbers that could cost time or memory of their own: the rest of the audit.
TOO_MUCH: dict[str, Any] = {
    "gateway.Precompute neighbours": gateway.PrecomputeRequest(corpus="c", recipe="fusionrag", neighbours=1 << 31),
    "gateway.Retrieve top_k": gateway.RetrieveRequest(corpus="c", question="?", top_k=1 << 31),
    "gateway.Generate top_k": ask(top_k=1 << 31),
    "gateway.Generate sampling.max_tokens": ask(sampling=gateway.Sampling(max_tokens=1 << 31)),
    "fusion.Generate sampling.max_tokens": generate(sampling=fusion.Sampling(max_tokens=1 << 31)),
    "kvcache.Put header.size_bytes": [header(size_bytes=1 << 62)],
}
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


def test_every_field_of_variable_length_is_here() -> None:
    """A new field fails until its limit is tested."""
    expected = {
        f"{name}.{method.name} {place}"
        for name, service in SERVICES.items()
        for method in service.methods
        for place in places(method.input_type)
    }
    assert expected == set(TOO_LONG)


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
    assert call(made["gateway"], "gateway.Ingest", document) is None
    yield made
    for channel in made.values():
        channel.close()


def call(channel: grpc.Channel, name: str, request: Any) -> grpc.RpcError | None:
    """The error of a call, of whatever kind the method is."""
    service, _, method = name.partition(".")
    described = SERVICES[service].methods_by_name[method]
    kind = "stream" if described.client_streaming else "unary"
    multi = getattr(channel, f"{kind}_stream")(
        f"/{described.containing_service.full_name}/{method}",
        request_serializer=message_factory.GetMessageClass(described.input_type).SerializeToString,
    )
    try:
        list(multi(iter(request) if described.client_streaming else request, timeout=60))
    except grpc.RpcError as error:
        return error
    return None


@pytest.mark.parametrize("place", [*TOO_LONG, *TOO_MUCH])
def test_what_is_too_long_is_refused(channels: dict[str, grpc.Channel], place: str) -> None:
    name, _, _ = place.partition(" ")
    error: Any = call(channels[name.partition(".")[0]], name, {**TOO_LONG, **TOO_MUCH}[place])
    assert error is not None
    assert error.code() in REFUSALS, error.details()
    assert len(error.details().encode()) <= 2100


def test_a_long_message_is_cut_where_a_character_ends() -> None:
    for text in ("a" * 5000, "ü" * 5000, "a" + "\U0001f600" * 5000, "\ud800" * 5000):
        said = errors.details(errors.InvalidArgument(text))
        assert len(said.encode()) <= 2003
        assert said.endswith("...")
    assert errors.details(errors.InvalidArgument("short")) == "short"
