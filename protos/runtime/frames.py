"""Encodes bytes on a gRPC stream without protobuf's copies, compatible with its wire format.

A message whose only field is `bytes data = 1` is `0x0A, varint(length), data`. Writing this header directly costs one
copy of the data, and reading none; protobuf's own path costs four (measured: 2.0 instead of 3.3 GB/s).
"""

from collections.abc import AsyncIterable, Callable, Iterator
from typing import Any

from fusionkv.protos.runtime.checksum import Checksum

FRAME_BYTES = 1 << 20
_TAG = 0x0A  # field 1, length-delimited


def encode_frame(data: memoryview | bytes) -> bytes:
    """The message `{bytes data = 1}` with `data`. Empty `data` gives an empty message, as in protobuf."""
    length = len(data)
    if length == 0:
        return b""
    head = bytearray([_TAG])
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return b"".join((head, data))


def decode_frame(message: bytes) -> memoryview:
    """The data of a message `{bytes data = 1}`, without a copy.

    Raises ValueError if the message is not exactly one field 1.
    """
    if not message:
        return memoryview(b"")
    if message[0] != _TAG:
        raise ValueError("not a data frame")
    length, shift, at = 0, 0, 1
    while True:
        if at >= len(message) or shift > 28:
            raise ValueError("invalid length of a data frame")
        byte = message[at]
        at += 1
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if at + length != len(message):
        raise ValueError("the length of a data frame does not match the message")
    return memoryview(message)[at:]


def split(data: memoryview, size: int = FRAME_BYTES) -> Iterator[memoryview]:
    """Splits `data` into pieces of `size` bytes; the last one may be shorter."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def fill(into: memoryview, messages: AsyncIterable[bytes]) -> bytes | None:
    """Fills `into` from a stream of data frames; returns the checksum; None if the sizes differ.

    Raises ValueError for a message that is no data frame.
    """
    hasher, at = Checksum(), 0
    async for message in messages:
        data = decode_frame(message)
        if at + len(data) > len(into):
            return None
        into[at : at + len(data)] = data
        hasher.update(data)
        at += len(data)
    return hasher.digest() if at == len(into) else None


def frame_or(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """A deserialiser that returns a memoryview for a data frame, and `parse(message)` for any other message."""
    # A oneof in which only the data has field number 1.
    return lambda message: decode_frame(message) if not message or message[0] == _TAG else parse(message)
