"""Which spans torch's fused operator computes, and that it computes what the reference does."""

import pytest
import torch

from fusionkv.kernels import reference
from fusionkv.kernels.gpu import causal_attention
from fusionkv.kernels.gpu.causal_attention import LEAST_ROWS, is_causal
from fusionkv.kernels.segments import AttentionSpec, KVSegment, QuerySpan, Spans
from tests.kernels.inputs import DEVICE, rotary

ROWS = LEAST_ROWS
SYSTEM = KVSegment(7, 20, 0)
MOVED = KVSegment(310, 2, 0, shift=9, hidden=torch.tensor([False, True]))


def span(*segments: KVSegment, rows: int = ROWS, start: int = 0) -> QuerySpan:
    """The last rows of the keys."""
    end = segments[-1].last + 1
    return QuerySpan(start, start + rows, torch.arange(end - rows, end), segments)


@pytest.mark.parametrize(
    ("found", "causal"),
    [
        (span(KVSegment(3, ROWS, 0)), True),
        (span(SYSTEM, KVSegment(90, ROWS, 20, shift=1)), True),
        (span(SYSTEM, KVSegment(90, ROWS - 1, 20), rows=ROWS - 1), False),
        (QuerySpan(0, ROWS, torch.arange(ROWS), (SYSTEM, KVSegment(90, ROWS, 20))), True),
        (QuerySpan(0, ROWS, 2 * torch.arange(ROWS) + 1, (KVSegment(90, 2 * ROWS, 0),)), False),
    ],
    ids=["alone", "after others", "few rows", "later keys", "holes"],
)
def test_which_spans(found: QuerySpan, causal: bool) -> None:
    assert is_causal(found, None) == causal
    end = int(found.positions[-1]) + 1
    assert is_causal(found, end) == causal
    assert not is_causal(found, end - 1)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_other_spans(heads: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, torch writes the mask that flash attention does not need."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(causal_attention, "usable", lambda q, k: True)
    made = [
        span(SYSTEM, KVSegment(90, ROWS, 20)),
        span(SYSTEM, KVSegment(90, 30, 20, shift=5), KVSegment(300, 3, 50), rows=3, start=ROWS),
        # Its first key is moved, and its second one computed anew, in the last slot.
        span(MOVED, KVSegment(310 + 2 * ROWS, 1, 1), KVSegment(312, 2 * ROWS - 2, 2), rows=ROWS + 3, start=ROWS + 3),
    ]
    torch.manual_seed(0)
    q = torch.randn(made[-1].stop, heads[0], 64, device=DEVICE, dtype=dtype)
    k, v = torch.randn(2, 311 + 2 * ROWS, heads[1], 64, device=DEVICE, dtype=dtype)
    others: list[Spans] = []

    def attend(*given: object) -> torch.Tensor:
        others.append(given[3])  # type: ignore[arg-type]
        return reference.sparse_attention(*given)  # type: ignore[arg-type]

    given = q, k, v, Spans(made), AttentionSpec(rotary(64), 64**-0.5)
    found = causal_attention.sparse_attention(*given, {}, attend)
    assert others == ([Spans(made[1:2])] if dtype != torch.float32 or DEVICE.type == "cpu" else [Spans(made)])
    expected = reference.sparse_attention(*(x.double() for x in (q, k, v)), *given[3:])
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
