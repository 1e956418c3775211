"""Weights row by row against the column sums that the selectors use, and against those found with the attention."""

import pytest
import torch

from fusionkv.kernels import reference
from fusionkv.kernels.attention_weights import attention_weights
from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segment_table import Spans
from fusionkv.kernels.segments import Segment, Span
from fusionkv.kernels.sparse_attention import sparse_attention


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("rows", [1, 5, 21])
def test_rows_of_a_placed_context(rows: int, window: int | None) -> None:
    random = torch.Generator().manual_seed(rows)
    rotation = Rotation(10000.0 ** (-torch.arange(0, 16, 2) / 16), interleaved=False)
    k = torch.randn(60, 2, 16, generator=random)
    q = torch.randn(3 + rows, 6, 16, generator=random)
    # Two chunks that lie elsewhere than they stand, one token of them hidden, and the rows' own keys.
    hidden = torch.zeros(12, dtype=torch.bool)
    hidden[4] = True
    positions = torch.cat([torch.tensor([9]), torch.arange(20, 19 + rows)])
    segments = (
        Segment(30, 5, 0),
        Segment(2, 12, 5, shift=3, hidden=hidden),
        Segment(40, 3, 17, shift=-2),
        Segment(50, 1, 9),
        *((Segment(22, rows - 1, 20),) if rows > 1 else ()),
    )
    span = Span(3, 3 + rows, positions, segments)
    found = attention_weights(q, k, span, rotation, 0.25, window)
    assert found.shape == (rows, int(positions[-1]) + 1)
    assert torch.allclose(found.sum(1), torch.full((rows,), 6.0), atol=1e-5)
    for row, position in enumerate(positions.tolist()):
        assert not found[row, position + 1 :].any()
    columns = reference.attention_scores(q, k, span, rotation, 0.25, window)
    assert torch.allclose(found.sum(0), columns, atol=1e-5)
    # On a CPU the attention finds them on its way, and is what it is without.
    v, onto = torch.randn(60, 2, 16, generator=random), torch.ones_like(found)
    spans = Spans([span])
    out = sparse_attention(q, k, v, spans, rotation, 0.25, window, {span: onto})
    assert torch.allclose(onto, found + 1, atol=1e-5)
    plain = reference.sparse_attention(q, k, v, spans, rotation, 0.25, window)
    assert torch.allclose(out[3:], plain[3:], atol=1e-5)
