"""The CPU path where the plain cases don't lead: a key far above the others, its dtype, and more than one thread."""

from collections.abc import Iterator

import pytest
import torch

from fusionkv.kernels import reference
from fusionkv.kernels.attention import attention_scores, sparse_attention
from fusionkv.kernels.cpu import compute_dtype as module
from fusionkv.kernels.cpu.compute_dtype import compute_dtype
from fusionkv.kernels.segments import AttentionSpec, KVSegment, QuerySpan, Spans
from tests.kernels.inputs import rotary

CONTEXT, SHIFT, DIM = 480, 77, 64
ROTATION = rotary(DIM)
SCALE = DIM**-0.5
SPEC = AttentionSpec(ROTATION, SCALE)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Spans]:
    """A third of two chunks as rows: queries, keys, values, spans."""
    torch.manual_seed(0)
    rows = torch.arange(5, CONTEXT, 3)
    hidden = torch.zeros(CONTEXT, dtype=torch.bool).index_fill_(0, rows, True)
    segments = (
        KVSegment(0, 200, 0, hidden=hidden[:200]),
        KVSegment(200, CONTEXT - 200, 200, SHIFT, hidden=hidden[200:]),
        KVSegment(CONTEXT, len(rows), 5, positions=rows),
    )
    k, v = torch.randn(2, CONTEXT + len(rows), 2, DIM)
    return torch.randn(len(rows), 8, DIM), k, v, Spans([QuerySpan(0, len(rows), rows, segments)])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("score", [12, 120])
def test_a_key_far_above_the_others(score: int, dtype: torch.dtype, tolerance: float) -> None:
    """A late key draws all attention of a row, and nothing before it told of that."""
    q, k, v, spans = problem()
    row, head = -1, 5
    wanted = q[row, head] * score / SCALE / q[row, head].square().sum()
    k[349, head // 4] = ROTATION.turn(wanted[None], -SHIFT)[0]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    doubles = q.double(), k.double(), v.double()
    expected = reference.sparse_attention(*doubles, spans, SPEC)
    assert bool(spans[0].segments[1].hidden[149]) is False
    assert float((expected[row, head] - v[349, head // 4]).norm()) < 0.2
    found = sparse_attention(q, k, v, spans, SPEC)
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    rows = len(q) * q.shape[1]
    total = reference.attention_scores(*doubles[:2], spans[0], SPEC)
    scores = attention_scores(q, k, spans[0], SPEC)
    torch.testing.assert_close(scores / rows, total / rows, atol=tolerance, rtol=tolerance)


def test_threads_change_nothing() -> None:
    """Under the engine's mode: each thread has a mode and a number of threads of its own."""
    q, k, v, spans = problem()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.zeros(int(spans[0].positions[-1]) + 1)
        return sparse_attention(q, k, v, spans, SPEC, {spans[0]: scores}), scores

    alone = run()
    torch.set_num_threads(2)
    with torch.inference_mode():
        together = run()
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("faster", [torch.bfloat16, torch.float32])
def test_bfloat16_is_computed_in_the_faster_dtype(faster: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 would overflow, and float32 is not rounded."""
    monkeypatch.setattr(module, "_seconds", lambda dtype: 1.0 if dtype == faster else 2.0)
    assert compute_dtype.__wrapped__(torch.bfloat16) == faster
    assert compute_dtype(torch.float16) == compute_dtype(torch.float32) == torch.float32
