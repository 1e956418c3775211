"""Limits on requests before protobuf parses them: it blocks, and turns 64 MiB of empty passages into 4 GB."""

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf import message_factory

from fusionkv.gateway.servicer import SERVICE

# Holds the longest passages, with their metadata, and the longest conversation. Only Ingest carries a document.
_MAX_BYTES = 8 << 20
# Passages, messages and pairs of metadata; other limits allow far fewer.
_MAX_FIELDS = 1 << 16
_VARINT_BYTES = 10


def readers() -> Mapping[str, Callable[[bytes], Any]]:
    """The parsers of requests, by method. They raise ValueError over a limit, and DecodeError as protobuf."""
    return {method.name: _reader(method) for method in SERVICE.methods}


def _reader(method: Any) -> Callable[[bytes], Any]:
    parse = message_factory.GetMessageClass(method.input_type).FromString

    def read(data: bytes) -> Any:
        if len(data) > _MAX_BYTES and method.name != "Ingest":
            raise ValueError(f"it has {len(data)} bytes; the maximum is {_MAX_BYTES}")
        if not _few_fields(data):
            raise ValueError(f"it has more than {_MAX_FIELDS} fields")
        return parse(data)

    return read


def _few_fields(data: bytes) -> bool:
    """Whether a message has at most _MAX_FIELDS fields. What protobuf will refuse is not counted to its end."""
    at = 0
    for _ in range(_MAX_FIELDS):
        if at >= len(data):
            return True
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind in (0, 2):
            value, at = _varint(data, at)
            at += value if kind == 2 else 0
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        # Groups (3, 4) have no length: their fields are counted as the message's.
    return at >= len(data)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and the position behind it; behind the end if there is none."""
    value = 0
    for shift, byte in enumerate(data[at : at + _VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    return 0, len(data)
