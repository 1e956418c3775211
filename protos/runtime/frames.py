"""Encodes bytes on a gRPC stream without protobuf's copies, compatible with its wire format.

A message whose only field is `bytes data = 1` is `0x0A, varint(length), data`. Writing this header directly costs one
copy of the data, and reading none; protobuf's own path costs four (measured: 2.0 instead of 3.3 GB/s).
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

FRAME_BYTES = 1 << 20
_TAG = 0x0A  # field 1, length-delimited
# Constants of mallopt from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


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

    Raises:
        ValueError: the message is not exactly one field 1.
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


def is_frame(message: bytes) -> bool:
    """Whether a message begins with field 1 of a oneof whose other fields have other numbers."""
    return not message or message[0] == _TAG


def split(data: memoryview, size: int = FRAME_BYTES) -> Iterator[memoryview]:
    """Splits `data` into pieces of `size` bytes; the last one may be shorter."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


def frame_or(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """A deserialiser that returns a memoryview for a data frame, and `parse(message)` for any other message."""
    return lambda message: decode_frame(message) if is_frame(message) else parse(message)


@functools.cache
def keep_freed_memory() -> None:
    """Makes glibc keep up to 64 MiB of freed memory per arena, and not return it to the kernel; once per process.

    By default, every frame of 1 MiB is mapped, faulted in page by page and unmapped: for 64 MiB, that takes 55 to 75
    ms of processor time on each side of a stream, against 16 to 28 ms with reused memory. Does nothing with another
    malloc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
