"""Decoding requests that share chunks: keys are read once for all of them, and every row sees what it sees alone."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusionkv.kernels import reference
from fusionkv.kernels.attention import sparse_attention
from fusionkv.kernels.gpu.segment_table import Grid, SegmentTable, share
from fusionkv.kernels.segments import KVSegment, QuerySpan, Spans
from tests.examples import examples
from tests.kernels.inputs import HAS_KERNEL, interpreted, rotary, there

torch.set_num_threads(1)
DIM = 32
CHUNKS = [70, 16, 300, 1, 64, 48]  # tokens of each


def batch(prompts: Sequence[Sequence[int]], rows: Sequence[int], hidden: float) -> tuple[Spans, int]:
    """Requests over chunks, given by their numbers, each with fresh keys of its own; and the slots of the pool."""
    dice = torch.Generator().manual_seed(0)
    starts = [1 + sum(CHUNKS[:i]) for i in range(len(CHUNKS))]
    spans, slot, row = [], 1 + sum(CHUNKS), 0
    for chunks, count in zip(prompts, rows, strict=True):
        segments, at, fresh = [], 0, []
        for chunk in chunks:
            length = CHUNKS[chunk]
            stale = torch.rand(length, generator=dice) < hidden
            fresh += (at + stale.nonzero().flatten()).tolist()
            shift = int(torch.randint(-50, 4000, (1,), generator=dice))
            segments.append(KVSegment(starts[chunk], length, at, shift, hidden=stale if stale.any() else None))
            at += length
        fresh += range(at, at + count)
        gapless = fresh[-1] - fresh[0] + 1 == len(fresh)
        segments.append(KVSegment(slot, len(fresh), fresh[0], positions=None if gapless else torch.tensor(fresh)))
        spans.append(QuerySpan(row, row + count, torch.arange(at, at + count), tuple(segments)))
        slot, row = slot + len(fresh) + 1, row + count
    return Spans(spans), slot


def check(spans: Spans, slots: int, heads: tuple[int, int], window: int | None, interleaved: bool) -> None:
    from fusionkv.kernels.gpu import sparse_attention_triton
    from fusionkv.kernels.gpu.tile_shapes import Tile

    dice = torch.Generator().manual_seed(1)
    q = torch.randn(spans[-1].stop, heads[0], DIM, generator=dice)
    k, v = (torch.randn(slots, heads[1], DIM, generator=dice) for _ in range(2))
    rest = rotary(DIM, interleaved=interleaved), DIM**-0.5, window
    expected = reference.sparse_attention(q, k, v, spans, *rest)
    moved = there(q), there(k), there(v), spans
    for shared in (None, Tile(32, 32, 4, 1)):
        found = sparse_attention_triton.attend(*moved, *rest, Tile(64, 32, 4, 1), shared).cpu()
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.skipif(not HAS_KERNEL, reason="needs a GPU, or TRITON_INTERPRET=1 as test_in_the_interpreter sets it")
class TestKernel:
    @given(
        prompts=st.lists(st.lists(st.integers(0, len(CHUNKS) - 1), max_size=5), min_size=1, max_size=6),
        some=st.lists(st.sampled_from([1, 1, 1, 2, 40]), min_size=6, max_size=6),
        hidden=st.sampled_from([0.0, 0.2, 1.0]),
        rest=st.tuples(
            st.sampled_from([(1, 1), (4, 2), (7, 1), (14, 2), (20, 1)]),
            st.sampled_from([None, None, 1, 90]),
            st.booleans(),
        ),
    )
    @settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
    def test_any_batch(self, prompts: list[list[int]], some: list[int], hidden: float, rest: tuple[Any, ...]) -> None:
        """rest: heads, window, whether the rotation is interleaved."""
        check(*batch(prompts, some[: len(prompts)], hidden), *rest)

    @pytest.mark.parametrize("requests", [2, 5, 23])
    def test_all_over_the_same_chunks(self, requests: int) -> None:
        """23 requests of 4 heads a group are more than a tile of 32 rows."""
        check(*batch([[0, 2, 4]] * requests, [1] * requests, 0.15), (8, 2), None, False)


@pytest.mark.compile
@pytest.mark.skipif(HAS_KERNEL, reason="this run has the kernel already")
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert "4 passed" in interpreted(__file__, "TestKernel")


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("hidden", [0.0, 0.2])
def test_on_a_cpu(hidden: float, window: int | None) -> None:
    """Three requests over the same slots: another place, other recomputed tokens, a chunk that another lacks."""
    torch.manual_seed(1)
    spans, slots = batch([[0, 2, 4], [4, 0], [2, 4, 0]], [1, 3, 2], hidden)
    tensors = *torch.randn(1, spans[-1].stop, 8, DIM), *torch.randn(2, slots, 2, DIM)
    expected = reference.sparse_attention(*(x.double() for x in tensors), spans, rotary(DIM), DIM**-0.5, window)
    found = sparse_attention(*tensors, spans, rotary(DIM), DIM**-0.5, window)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)


def test_what_is_shared() -> None:
    spans, _ = batch([[0, 1, 2, 1], [2, 0], [3, 2], [4]], [1, 1, 1, 1], 0.0)
    found, left = share(spans)
    by_who = {tuple(span.start for span in group.spans): group for group in found}
    assert set(by_who) == {(0, 1), (0, 1, 2)}
    assert [run[0].length for run in by_who[0, 1].runs] == [CHUNKS[0]]
    assert [segment.first for segment in by_who[0, 1, 2].runs[0]] == [86, 0, 1]
    assert by_who[0, 1, 2].keys == CHUNKS[2]
    assert [len(span.segments) for span in left] == [3, 1, 2, 2], "a chunk twice in one prompt stays its own"


@pytest.mark.parametrize(
    ("prompts", "keys"),
    [
        ([[1, 3], [3, 1]], []),
        ([[5], [5]], []),
        ([[4], [4]], [64]),
        ([[1, 5], [5, 1]], [64]),  # one partial result for both runs
        ([[1, 5], [5, 1], [5]], []),  # 48 by three of them, 16 by two
        ([[1, 2], [1, 2], [2]], [300]),
    ],
    ids=str,
)
def test_little_is_not_shared(prompts: list[list[int]], keys: list[int]) -> None:
    """A partial result costs more than reading up to 64 keys once more."""
    spans, _ = batch(prompts, [1] * len(prompts), 0.0)
    found, left = share(spans)
    assert [group.keys for group in found] == keys
    kept = sum(segment.length for span in left for segment in span.segments)
    everything = sum(segment.length for span in spans for segment in span.segments)
    assert kept + sum(group.keys * len(group.spans) for group in found) == everything


def test_prefill_is_not_grouped() -> None:
    spans, _ = batch([[0, 1], [0, 1]], [1, 2], 0.0)
    found, left = share(spans)
    assert not found
    assert [span.segments for span in left] == [span.segments for span in spans]


@pytest.mark.parametrize("requests", [2, 7, 40])
def test_shared_keys_are_read_once_a_tile(requests: int) -> None:
    """Of one table: slots that its programs walk, with requests together and each on its own."""
    spans, _ = batch([[0, 2, 4]] * requests, [1] * requests, 0.15)
    walked = {}
    for together in (True, False):
        grid = Grid.of(28, 4, 128, 100, 64 if together else 0)
        table = SegmentTable.of(spans, rotary(DIM), grid)
        lengths = table.segments[:, 1]
        (launch,) = table.launches
        own = sum(int(lengths[first : first + n].sum()) for _, _, first, n, _, _ in launch.items.tolist())
        shared = 0
        if launch.shared is not None:
            for _, members, first, pieces in launch.shared.items.tolist():
                shared += int(lengths[first : first + members * pieces : members].sum())
            partial = launch.shared.members[:, 1].tolist()
            assert len({*partial}) == len(partial), "no two partial results in one place"
            assert requests <= min(partial) <= max(partial) < launch.parts * requests
        walked[together] = own, shared
    context, fresh = sum(CHUNKS[i] for i in (0, 2, 4)), sum(s.segments[-1].length for s in spans)
    assert walked[False] == (requests * context + fresh, 0)
    assert walked[True] == (fresh, -(-requests // 9) * context), "64 rows, 7 a request"
