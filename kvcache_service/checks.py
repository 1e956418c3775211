"""Validation of requests."""

from collections.abc import Iterable, Sequence

from fusionkv.kvcache_service.index import record as records
from fusionkv.kvcache_service.keys import DIGEST_BYTES
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime.errors import InvalidArgument


def digests(values: Iterable[bytes], what: str) -> None:
    for digest in values:
        if len(digest) != DIGEST_BYTES:
            raise InvalidArgument(f"{what} has {len(digest)} bytes, a digest has {DIGEST_BYTES}")


def path(namespace: bytes, elements: Sequence[bytes], limit: int) -> None:
    digests([namespace], "the namespace")
    if not 1 <= len(elements) <= limit:
        raise InvalidArgument(f"a path of {len(elements)} elements; 1 to {limit} are allowed")
    digests(elements, "a digest of the path")


def header(first: pb.PutRequest | memoryview | None) -> pb.PutHeader:
    """Header in a Put's first message."""
    if first is None or isinstance(first, memoryview) or not first.HasField("header"):
        raise InvalidArgument("the first message must be the header")
    return first.header


def record(header: pb.PutHeader, max_path: int) -> records.Record:
    """Record of a Put's header."""
    path(header.namespace, header.path, max_path)
    if header.variant:
        digests([header.variant], "the variant")
        if len(header.path) == 1:
            raise InvalidArgument("a system prompt is found by its exact path only: it has no variants")
    if len(header.checksum) != records.CHECKSUM_BYTES:
        raise InvalidArgument(f"the checksum has {len(header.checksum)} bytes, 16 are required")
    if len(header.signature) > records.MAX_SIGNATURE_BYTES:
        limit = records.MAX_SIGNATURE_BYTES
        raise InvalidArgument(f"the signature has {len(header.signature)} bytes; at most {limit} are allowed")
    if not header.size_bytes or not header.tokens:
        raise InvalidArgument("an entry has at least one token and one byte")
    return records.make(
        header.namespace,
        list(header.path),
        header.variant,
        header.size_bytes,
        header.tokens,
        header.base,
        header.checksum,
        offered=header.offered,
        signature=header.signature,
    )
