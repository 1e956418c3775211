"""Decoding requests that share chunks: every row sees what it sees alone."""

from collections.abc import Sequence

import pytest
import torch

from fusionkv.kernels import reference
from fusionkv.kernels.attention import sparse_attention
from fusionkv.kernels.segments import AttentionSpec, KVSegment, QuerySpan, Spans
from tests.kernels.inputs import HAS_KERNEL, rotary, there

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


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("hidden", [0.0, 0.2])
def test_over_the_same_slots(hidden: float, window: int | None) -> None:
    """Three requests over the same slots: another place, other recomputed tokens, a chunk that another lacks."""
    torch.manual_seed(1)
    spans, slots = batch([[0, 2, 4], [4, 0], [2, 4, 0]], [1, 3, 2], hidden)
    tensors = *torch.randn(1, spans[-1].stop, 8, DIM), *torch.randn(2, slots, 2, DIM)
    spec = AttentionSpec(rotary(DIM), DIM**-0.5, window)
    expected = reference.sparse_attention(*(x.double() for x in tensors), spans, spec)
    operations = [sparse_attention]
    if HAS_KERNEL:
        from fusionkv.kernels.gpu import sparse_attention_triton

        operations.append(sparse_attention_triton.sparse_attention)
    for operation in operations:
        found = operation(*map(there, tensors), spans, spec)
        torch.testing.assert_close(found.double().cpu(), expected, atol=2e-5, rtol=2e-5)
