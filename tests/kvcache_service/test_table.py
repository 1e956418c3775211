"""The table against a dictionary of sets, with digests that share shards, slots and all of their tag."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionkv.kvcache_service.index.rows import Table

# Few shards and few homes: long runs of taken slots that wrap around the end.
digests = st.tuples(st.sampled_from([0, 255]), st.sampled_from([0, 6, 7, 255, 2**32 - 1])).map(
    lambda parts: bytes([parts[0]]) + parts[1].to_bytes(4) + b"rest"
)


@given(st.lists(st.tuples(st.booleans(), digests, st.integers(0, 40)), max_size=150))
def test_table_agrees_with_a_dictionary(steps: list[tuple[bool, bytes, int]]) -> None:
    table, model = Table(), dict[bytes, set[int]]()
    for add, digest, row in steps:
        rows = model.setdefault(digest, set())
        if add and row not in rows:
            table.add(digest, row)
            rows.add(row)
        elif not add and row in rows:
            table.remove(digest, row)
            rows.remove(row)
        elif not add:
            with pytest.raises(KeyError):
                table.remove(digest, row)
        table.check_integrity()
        found = list(table.rows(digest))
        assert sorted(found) == sorted(rows)
    assert len(table) == sum(map(len, model.values()))
    assert all(sorted(table.rows(digest)) == sorted(rows) for digest, rows in model.items())


def test_many_rows_are_found_and_no_others() -> None:
    digests = [hashlib.sha256(str(i).encode()).digest() for i in range(30_000)]
    table = Table()
    for row, digest in enumerate(digests[:20_000]):
        table.add(digest, row)
    table.check_integrity()
    assert all(row in table.rows(digest) for row, digest in enumerate(digests[:20_000]))
    assert sum(len(list(table.rows(digest))) for digest in digests[20_000:]) <= 1
    for row, digest in enumerate(digests[:15_000]):
        table.remove(digest, row)
    table.check_integrity()
    assert len(table) == 5_000
    assert all(row in table.rows(digest) for row, digest in enumerate(digests[15_000:20_000], 15_000))
