"""Requests that protobuf would take seconds and gigabytes to parse are refused before it does."""

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.message import DecodeError

from fusionkv.gateway.servicer import SERVICE
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime import rpc
from tests.gateway.conftest import Serve, Start
from tests.gateway.strangers import call
from tests.stopwatch import Stopwatch

READ = {method.name: rpc.bounded(message_factory.GetMessageClass(method.input_type)) for method in SERVICE.methods}
PASSAGE, GROUP, GROUP_END = b"\x52\x00", b"\xa3\x06", b"\xa4\x06"  # field 10, and a group that is unknown
METADATA = b"".join(b"\x2a\x05\x0a\x03%03d" % (i % 1000) for i in range(70_000))


def test_all_methods_have_limits() -> None:
    request = pb.GenerateRequest(question="q", passages=[pb.Passage(text="x" * 1000, score=0.5)] * 128, ratio=0.1)
    assert READ["Generate"](request.SerializeToString()) == request
    document = pb.IngestRequest(corpus="c", content=bytes(60 << 20), first_line=7, metadata={"a": "b"})
    assert READ["Ingest"](document.SerializeToString()) == document
    for read in READ.values():
        with pytest.raises(ValueError, match="more than 65536 fields"):
            read(PASSAGE * (1 << 17))


@pytest.mark.parametrize("data", [
    pytest.param(PASSAGE * 40_000_000, id="passages"),
    pytest.param(GROUP + GROUP_END + PASSAGE * (1 << 17), id="behind a group"),
    pytest.param(b"\xff" * (60 << 20), id="no number"),
    pytest.param(b"\x52\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", id="a size beyond all"),
    pytest.param(b"\x07" + PASSAGE * 9, id="no kind"),
    pytest.param(METADATA, id="metadata"),
])  # fmt: skip
def test_what_protobuf_need_not_read(data: bytes) -> None:
    watch = Stopwatch()
    with pytest.raises((ValueError, DecodeError)):
        READ["Ingest"](data)
    assert watch.seconds() < 0.5


@pytest.mark.system
def test_a_gateway_refuses_them_and_goes_on(start: Start, serve: Serve) -> None:
    client, gateway = serve(start())
    with rpc.dial_sync(gateway.address) as channel:
        for method, data in (("Generate", PASSAGE * (1 << 17)), ("Ingest", METADATA)):
            status, said = call(channel, f"/gateway.v1.GatewayService/{method}", [data])
            assert (status, said[:26]) == (grpc.StatusCode.INVALID_ARGUMENT, "the request is malformed: ")
        for method in ("List", "Ingest"):  # a larger document comes in pieces
            status, said = call(channel, f"/gateway.v1.GatewayService/{method}", [bytes(rpc.MAX_REQUEST_BYTES + 1)])
            assert (status, "message larger than max" in said) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    assert client.list() == []
