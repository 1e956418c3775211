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

CONTEXT, SHIFT, DIM = 900, 77, 64
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
        KVSegment(0, 400, 0, hidden=hidden[:400]),
        KVSegment(400, CONTEXT - 400, 400, SHIFT, hidden=hidden[400:]),
        KVSegment(CONTEXT, len(rows), 5, positions=rows),
    )
    k, v = torch.randn(2, CONTEXT + len(rows), 2, DIM)
    return torch.randn(len(rows), 8, DIM), k, v, Spans([QuerySpan(0, len(rows), rows, segments)])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("score", [12, 40, 120])
def test_a_key_far_above_the_others(score: int, dtype: torch.dtype, tolerance: float) -> None:
    """A late key draws all attention of a row, and nothing before it told of that."""
    q, k, v, spans = problem()
    row, head = -1, 5
    wanted = q[row, head] * score / SCALE / q[row, head].square().sum()
    k[700, head // 4] = ROTATION.turn(wanted[None], -SHIFT)[0]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    doubles = q.double(), k.double(), v.double()
    expected = reference.sparse_attention(*doubles, spans, SPEC)
    assert bool(spans[0].segments[1].hidden[300]) is False
    assert float((expected[row, head] - v[700, head // 4]).norm()) < 0.2
    found = sparse_attention(q, k, v, spans, SPEC)
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
    rows = len(q) * q.shape[1]
    total = reference.attention_scores(*doubles[:2], spans[0], SPEC)
    scores = attention_scores(q, k, spans[0], SPEC)
    torch.testing.assert_close(scores / rows, total / rows, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("threads", [2, 9])
def test_threads_change_nothing(threads: int) -> None:
    """Under the engine's mode: each thread has a mode and a number of threads of its own."""
    q, k, v, spans = problem()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.zeros(int(spans[0].positions[-1]) + 1)
        return sparse_attention(q, k, v, spans, SPEC, {spans[0]: scores}), scores

    alone = run()
    torch.set_num_threads(threads)
    with torch.inference_mode():
        together = run()
    assert torch.get_num_threads() == threads
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_tensors_of_the_engine_outside_its_mode(threads: int) -> None:
    """Tensors made in inference mode can't be written to outside it."""
    with torch.inference_mode():
        q, k, v, spans = problem()
    torch.set_num_threads(threads)
    total = attention_scores(q, k, spans[0], SPEC)
    assert float(total.sum()) == pytest.approx(len(q) * q.shape[1], rel=1e-4)
    assert sparse_attention(q, k, v, spans, SPEC).isfinite().all()


def test_float16_would_overflow_and_float32_is_not_rounded() -> None:
    assert compute_dtype(torch.float16) == compute_dtype(torch.float32) == torch.float32


@pytest.mark.parametrize("faster", [torch.bfloat16, torch.float32])
def test_bfloat16_is_computed_in_the_faster_dtype(faster: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_seconds", lambda dtype: 1.0 if dtype == faster else 2.0)
    assert compute_dtype.__wrapped__(torch.bfloat16) == faster
