"""Signatures are the callers': kept as they were put, in every place that an entry goes to, and of bounded size."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionkv.kvcache_service.index import record
from fusionkv.kvcache_service.index.record import EntryRecord
from fusionkv.kvcache_service.index.rows import Rows
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.kvcache_service.tools import Caller, payload, serving

NAMESPACE, PATH = b"n" * 32, [b"s" * 32, b"c" * 32]
SIGNATURES = [b"", b"\0", b"signed", b"\xff" * 36, bytes(63)]
# What a service from before signatures wrote: version 1, 2 elements, flags, 100 bytes, 7 tokens, base 3, at 8192.
OLD_HEAD = "0102000{}64000000000000000700000003000000787878787878787878787878787878780020000000000000"
OLD = {b"": ("2", "633b52763628adb8"), b"v" * 32: ("3", "654f192982e33bc8")}


def made(signature: bytes = b"", variant: bytes = b"", last: bytes = b"c" * 32) -> EntryRecord:
    path = [PATH[0], last]
    return record.make(NAMESPACE, path, variant, 100, 7, 3, b"x" * 16, offered=True, signature=signature)


@pytest.mark.parametrize("variant", OLD)
def test_records_without_a_signature_are_as_ever(variant: bytes) -> None:
    """A newer service reads what an older one wrote, and an older one what was put to a newer without signatures."""
    flags, end = OLD[variant]
    old = bytes.fromhex(OLD_HEAD.format(flags)) + b"".join((NAMESPACE, variant, *reversed(PATH))) + bytes.fromhex(end)
    expected = made(variant=variant)
    assert record.decode(expected.key, old) == (expected, 8192)
    assert record.decode_place(expected.key, old) == (8192, 100)
    assert record.encode(expected, 8192) == old


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("variant", OLD)
def test_a_record_comes_back_with_its_signature(signature: bytes, variant: bytes) -> None:
    one = made(signature, variant)
    value = record.encode(one, 8192)
    assert record.decode(one.key, value) == (one, 8192)
    assert record.decode_place(one.key, value) == (8192, 100)
    longer = record.encode(made(bytes(64), variant), 8192)
    assert record.decode_place(one.key, longer) is None
    with pytest.raises(ValueError, match="of version 2 that is invalid in versions 1 to 2"):
        record.decode(one.key, longer)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(SIGNATURES)), max_size=30))
def test_rows_know_whose_signature_is_whose(changes: list[tuple[int, bytes]]) -> None:
    rows, known = Rows(0), dict[int, tuple[int, EntryRecord]]()
    for number, signature in changes:
        if number in known:
            rows.remove(known.pop(number)[0])
        else:
            one = made(signature, last=bytes([number]) * 32)
            known[number] = rows.add(one, 0.0), one
        rows.check_integrity()
        assert all(rows.record(row) == one for row, one in known.values())


async def put(caller: Caller, signature: bytes, name: str = "S") -> bool:
    return (await caller.put([name], payload(name, 5000), signature=signature))[1]


async def test_signatures_outlive_a_restart(tmp_path: Path) -> None:
    for restarted in (False, True):
        async with serving(tmp_path) as service:
            for signature in SIGNATURES:
                name = signature.hex()
                assert restarted or await put(service, signature, name)
                assert (await service.entry(name)).signature == signature


async def test_a_signature_is_of_bounded_size(service: Any) -> None:
    with pytest.raises(InvalidArgument, match="the signature has 64 bytes; at most 63 are allowed"):
        await put(service, bytes(64))
    assert await service.entry("S") is None
