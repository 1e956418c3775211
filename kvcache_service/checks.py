"""Requests checked, before anything is done with them."""

from collections.abc import Iterable, Sequence

from fusionkv.kvcache_service.index import record as records
from fusionkv.kvcache_service.keys import DIGEST_BYTES
from fusionkv.protos.kvcache.v1 import kvcache_pb2 as pb
from fusionkv.protos.runtime.errors import InvalidArgument


def digests(found: Iterable[bytes], what: str) -> None:
    for digest in found:
        if len(digest) != DIGEST_BYTES:
            raise InvalidArgument(f"{what} has {len(digest)} bytes, a digest has {DIGEST_BYTES}")


def path(namespace: bytes, elements: Sequence[bytes], most: int) -> None:
    digests([namespace], "the namespace")
    if not 1 <= len(elements) <= most:
        raise InvalidArgument(f"a path of {len(elements)} elements; 1 to {most} are allowed")
    digests(elements, "a digest of the path")


def header(first: pb.PutRequest | memoryview | None) -> pb.PutHeader:
    """A Put's first message."""
    if first is None or isinstance(first, memoryview) or not first.HasField("header"):
        raise InvalidArgument("the first message must be the header")
    return first.header


def record(said: pb.PutHeader, max_path: int) -> records.Record:
    """The record that a Put's header describes."""
    path(said.namespace, said.path, max_path)
    if said.variant:
        digests([said.variant], "the variant")
        if len(said.path) == 1:
            raise InvalidArgument("a system prompt is found by its exact path only: it has no variants")
    if len(said.checksum) != records.CHECKSUM_BYTES:
        raise InvalidArgument(f"the checksum has {len(said.checksum)} bytes, it has to have 16")
    if len(said.signature) > records.MOST_SIGNATURE_BYTES:
        most = records.MOST_SIGNATURE_BYTES
        raise InvalidArgument(f"the signature has {len(said.signature)} bytes; at most {most} are kept")
    if not said.size_bytes or not said.tokens:
        raise InvalidArgument("an entry has at least one token and one byte")
    return records.make(
        said.namespace,
        list(said.path),
        said.variant,
        said.size_bytes,
        said.tokens,
        said.base,
        said.checksum,
        offered=said.offered,
        signature=said.signature,
    )
