"""The client's RPC stubs, in which KV bytes bypass protobuf (frames.py)."""

from collections.abc import Callable
from typing import Any

import grpc

from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime import frames

_SERVICE = "/kvcache.v1.KVCacheService/"


def bind(channel: grpc.aio.Channel, put_channel: grpc.aio.Channel) -> dict[str, Callable[..., Any]]:
    """Stubs by name of RPC; Put uses a channel of its own."""
    stubs: dict[str, Callable[..., Any]] = {
        name: channel.unary_unary(
            _SERVICE + name,
            request_serializer=getattr(pb, f"{name}Request").SerializeToString,
            response_deserializer=getattr(pb, f"{name}Response").FromString,
        )
        for name in ("Lookup", "Prefetch", "Release", "Delete", "Stats")
    }
    stubs["Fetch"] = channel.unary_stream(
        _SERVICE + "Fetch", request_serializer=pb.FetchRequest.SerializeToString, response_deserializer=None
    )
    stubs["Put"] = put_channel.stream_unary(
        _SERVICE + "Put", request_serializer=_put_message, response_deserializer=pb.PutResponse.FromString
    )
    return stubs


def _put_message(part: pb.PutRequest | memoryview) -> bytes:
    return frames.encode_frame(part) if isinstance(part, memoryview) else part.SerializeToString()
