"""Decoders of bytes from a disk, a socket, Redis or a GGUF file, and what holds of each, whatever the bytes are.

Each is called with inputs that hypothesis makes up (test_decoders.py). What it raises is a bug.
"""

import importlib
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
import xxhash
from google.protobuf.message import DecodeError

from fusionkv.fusion_worker.library import gguf_file
from fusionkv.fusion_worker.load import primer
from fusionkv.fusion_worker.load.lookup import CacheFault
from fusionkv.fusion_worker.prompt import Chunk
from fusionkv.kvcache_service import client, servicer
from fusionkv.kvcache_service.data_plane import listener
from fusionkv.kvcache_service.index import record
from fusionkv.kvcache_service.index.index import HitRanker
from fusionkv.kvcache_service.keys import DIGEST_BYTES
from fusionkv.kvcache_service.remote import tier
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime import frames
from fusionkv.protos.runtime.errors import InvalidArgument

KEY = bytes(range(32))
GOOD = record.make(bytes([0]) * 32, [bytes([1]) * 32, bytes([2]) * 32], b"", 5, 1, 0, bytes(16))
_ARENA = memoryview(bytes(1000))
_FALLBACK = Chunk((1, 2, 3))
_put_message = frames.frame_or(pb.PutRequest.FromString)


def sealed(body: bytes) -> bytes:
    """An index record with the right checksum, so that what stands within is looked at."""
    return body + xxhash.xxh3_64_digest(KEY + body)


def index_record(body: bytes) -> None:
    """Of the disk tier, behind its checksum."""
    value = sealed(body)
    try:
        found, offset = record.decode(KEY, value)
    except ValueError:
        assert record.decode_place(KEY, value) is None
        return
    assert record.decode_place(KEY, value) == (offset, found.size)
    assert record.decode(KEY, record.encode(found, offset)) == (found, offset)


def torn_record(value: bytes) -> None:
    """Of the disk tier, with a checksum that is wrong."""
    if len(value) >= 8 and xxhash.xxh3_64_digest(KEY + value[:-8]) == value[-8:]:
        return
    assert record.decode_place(KEY, value) is None
    with pytest.raises(ValueError, match="damaged"):
        record.decode(KEY, value)


def frame(message: bytes) -> None:
    """KV bytes on a stream."""
    try:
        data = bytes(frames.decode_frame(message))
    except ValueError:
        return
    assert frames.decode_frame(frames.encode_frame(data)) == data


def put_message(message: bytes) -> None:
    """The first message of a Put."""
    try:
        made = servicer.record_of(servicer._header(_put_message(message)), 256)
    except (DecodeError, ValueError, InvalidArgument):
        return
    assert record.decode(made.key, record.encode(made, 0)) == (made, 0)


def data_request(message: bytes) -> None:
    """A call on the data plane."""
    try:
        request = listener._parse(message)
    except (DecodeError, ValueError):
        return
    assert listener._parse(request.SerializeToString()) == request


def answered_hit(message: bytes) -> None:
    """Of a cache service of any version: an entry, or a miss."""
    try:
        found = pb.Hit.FromString(message)
    except DecodeError:
        return
    hit = client.decode_hit(found, 7, _ARENA)
    if hit.entry is not None and hit.entry.shared is not None:
        assert len(hit.entry.shared) == hit.entry.size
    assert hit.kind in client.HitKind


def remote_records(found: Sequence[bytes]) -> None:
    """What stands in the index of the remote tier, to which a stranger may write."""
    path = [GOOD.system, GOOD.chunk]
    records = tier._decoded(found)
    assert all(len(one.key) == DIGEST_BYTES and one.size and one.tokens for one in records)
    best = HitRanker(GOOD.namespace, path, []).best(None, records)
    assert best is None or (best.key, best.namespace) == (GOOD.key, GOOD.namespace) or best.chunk == GOOD.chunk


def remote_record(data: bytes) -> None:
    """One of them, with the right checksum or with any."""
    remote_records([data, data + xxhash.xxh3_64_digest(data)])


def stored_primer(data: bytes) -> None:
    """Of a corpus, in a cache service to which a stranger may write: tokens that a model has, and not too many."""
    try:
        found = primer._unpacked(data, _FALLBACK, 1000)
    except CacheFault:
        return
    assert primer._LEAST <= len(found.chunk) <= primer.TOKENS
    assert max(found.chunk.ids) < 1000
    assert {len(held) for held in found.holds} <= {DIGEST_BYTES}
    assert primer._packed(found) == data


# Imported by the first file that names a tensor, whose memory would count as the file's.
importlib.import_module("gguf")


def gguf(data: bytes) -> None:
    """A GGUF file: what it holds lies within it, and reading it takes memory by its size."""
    tracemalloc.start()
    try:
        found = gguf_file.parse(np.frombuffer(data, np.uint8))
    except ValueError:
        return
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < (1 << 20) + 100 * len(data)
    assert sum(tensor.data.nbytes for tensor in found.tensors.values()) <= len(data)
