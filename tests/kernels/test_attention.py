"""Sparse attention and attention scores against matrices built token by token from the definition."""

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusionkv.kernels import attention, reference
from fusionkv.kernels.cpu import sparse_attention_cpu
from fusionkv.kernels.cpu.sparse_attention_cpu import MOST_ROWS
from fusionkv.kernels.segments import AttentionSpec, KVSegment, QuerySpan, Rotation, Spans
from tests.examples import examples
from tests.kernels.inputs import DEVICE, HAS_KERNEL, rotary, rotation_matrix, there

torch.set_num_threads(1)  # tiny shapes: a second thread costs more in waiting than it saves
# Outputs are means of values of about 1. float16 and bfloat16 round the turned query, the weights and the result.
TOLERANCES = [(torch.float32, 2e-5, 2e-5), (torch.float16, 4e-3, 4e-3), (torch.bfloat16, 3e-2, 2e-2)]
DIMS = [32, 64, 80, 96, 128, 256]
OPERATIONS: dict[str, Any] = {"kernel": attention.sparse_attention, "reference": reference.sparse_attention}
SCORES: dict[str, Any] = {"kernel": attention.attention_scores, "reference": reference.attention_scores}
if HAS_KERNEL:
    from fusionkv.kernels.gpu import sparse_attention_triton

    OPERATIONS["triton"] = lambda q, k, v, spans, spec, *scores: sparse_attention_triton.sparse_attention(
        there(q), there(k), there(v), spans, spec._replace(sinks=there(spec.sinks)), *scores
    ).cpu()
    SCORES["triton"] = lambda q, k, span, spec: sparse_attention_triton.attention_scores(
        there(q), there(k), span, spec._replace(sinks=there(spec.sinks))
    ).cpu()
PARTS = [(20, 0), (1, 7), (61, -13), (30, 900)]


@dataclass
class Case:
    """A ragged batch with what the definition says of it."""

    heads: tuple[int, int]
    dim: int
    rotation: Rotation
    window: int | None
    seed: int
    rows: list["Request"] = field(default_factory=list)
    sinks: torch.Tensor | None = None

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.rotation, self.dim**-0.5, self.window, self.sinks)

    def tensors(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Spans]:
        """Queries, pools, spans. Slots that no segment names hold NaN; stale slots that are hidden hold 100s."""
        random = torch.Generator().manual_seed(self.seed)
        slots = sum(r.slots for r in self.rows) + 3
        k, v = (torch.randn(slots, self.heads[1], self.dim, generator=random) for _ in range(2))
        used = torch.zeros(slots, dtype=torch.bool)
        spans, at, slot = [], 0, 1
        for request in self.rows:
            segments = request.segments(slot)
            for s in segments:
                used[s.start : s.stop] = True
                if s.hidden is not None and not request.shared:
                    k[s.start : s.stop][s.hidden] = 100.0
                    v[s.start : s.stop][s.hidden] = 100.0
            positions = torch.tensor(request.positions)
            spans.append(QuerySpan(at, at + len(positions), positions, segments))
            at, slot = at + len(positions), slot + request.slots
        k[~used] = v[~used] = float("nan")
        q = torch.randn(at, self.heads[0], self.dim, generator=random) * 2
        return q.to(dtype), k.to(dtype), v.to(dtype), Spans(spans)

    def expected(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Output float64 [rows, heads, dim] and each span's scores float64 [last position + 1], token by token."""
        out = torch.zeros(q.shape, dtype=torch.float64)
        totals = []
        groups = self.heads[0] // self.heads[1]
        for span in spans:
            keys, values = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
            for s in span.segments:
                matrix = rotation_matrix(self.rotation.inv_freq, s.shift, self.dim, self.rotation.interleaved)
                for i in range(s.length):
                    if s.hidden is not None and s.hidden[i]:
                        continue
                    position = s.first + i if s.positions is None else int(s.positions[i])
                    assert position not in keys, "two visible tokens at one position"
                    keys[position] = k[s.start + i].double() @ matrix.T
                    values[position] = v[s.start + i].double()
            total = torch.zeros(int(span.positions[-1]) + 1, dtype=torch.float64)
            ks, vs = (
                torch.stack([of[p] for p in range(len(total))]).repeat_interleave(groups, 1) for of in (keys, values)
            )
            for row, p in zip(range(span.start, span.stop), span.positions.tolist(), strict=True):
                low = 0 if self.window is None else max(0, p - self.window + 1)
                logits = torch.einsum("hd,nhd->hn", q[row].double(), ks[low : p + 1]) * self.dim**-0.5
                if self.sinks is not None:
                    logits = torch.cat([logits, self.sinks.double()[:, None]], -1)
                weights = logits.softmax(-1)[:, : p + 1 - low]
                out[row] = torch.einsum("hn,nhd->hd", weights, vs[low : p + 1])
                total[low : p + 1] += weights.sum(0)
            totals.append(total)
        return out, totals


@dataclass
class Request:
    """A prompt: parts (length, shift), which tokens are computed now, and how fresh slots are laid out."""

    parts: list[tuple[int, int]]
    positions: list[int]
    cuts: list[int]
    shared: bool = False

    @property
    def context(self) -> int:
        return sum(length for length, _ in self.parts)

    @property
    def slots(self) -> int:
        return self.context + len(self.positions) + len(self.cuts) + 2

    def segments(self, slot: int) -> tuple[KVSegment, ...]:
        fresh = set(self.positions)
        found, at, first_slot = [], 0, slot
        for i, (length, shift) in enumerate(self.parts):
            hidden = torch.tensor([p in fresh for p in range(at, at + length)])
            start = first_slot if self.shared and i else slot
            found.append(KVSegment(start, length, at, shift, hidden=hidden if hidden.any() else None))
            first_slot = start if i == 0 else first_slot
            at, slot = at + length, slot + length
        edges = [0, *sorted(c for c in self.cuts if c < len(self.positions)), len(self.positions)]
        for low, high in itertools.pairwise(edges):
            run = self.positions[low:high]
            if not run:
                continue
            slot += 1  # a gap: runs of the pool don't touch
            gapless = run[-1] - run[0] + 1 == len(run)
            uneven = None if gapless else torch.tensor(run)
            found.append(KVSegment(slot, len(run), run[0], positions=uneven, continues=low > 0))
            slot += len(run)
        return tuple(found)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    parts = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(-300, 5000)), max_size=5))
    parts = [(length, 0 if i == 0 else shift) for i, (length, shift) in enumerate(parts)]
    context = sum(length for length, _ in parts)
    choice = draw(st.sampled_from(["none", "all", "some", "one"]))
    share = {"none": 0.0, "all": 1.0, "one": 0.0, "some": draw(st.floats(0.05, 0.95))}[choice]
    dice = draw(st.randoms(use_true_random=False))
    fresh = [p for p in range(context) if dice.random() < share]
    if choice == "one" and context:
        fresh = [dice.randrange(context)]
    question = draw(st.sampled_from([1, 1, 3, 17, MOST_ROWS, MOST_ROWS + 1, 150]))
    positions = [*fresh, *range(context, context + question)]
    cuts = draw(st.lists(st.integers(1, max(1, len(positions) - 1)), max_size=3, unique=True))
    return Request(parts, positions, cuts)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads, groups, dim = draw(st.sampled_from([1, 2])), draw(st.integers(1, 7)), draw(st.sampled_from(DIMS))
    rotation = rotary(dim, draw(st.booleans()), draw(st.booleans()))
    window = draw(st.sampled_from([None, None, 1, 8, 50, 10_000]))
    found = Case((kv_heads * groups, kv_heads), dim, rotation, window, draw(st.integers(0, 2**31)))
    found.rows = draw(st.lists(requests(), min_size=1, max_size=3))
    # Far below, among and far above the logits.
    found.sinks = draw(
        st.sampled_from([None, torch.linspace(-50, 8, found.heads[0]), torch.linspace(90, 1, found.heads[0])])
    )
    return found


def check(case: Case, dtype: torch.dtype, atol: float, rtol: float) -> None:
    q, k, v, spans = case.tensors(dtype)
    expected, totals = case.expected(q, k, v, spans)
    for name, operation in OPERATIONS.items():
        found = operation(q, k, v, spans, case.spec)
        assert found.dtype == dtype, name
        torch.testing.assert_close(found.double(), expected, atol=atol, rtol=rtol, msg=lambda m, n=name: f"{n}: {m}")
    for name, scores in SCORES.items():
        for span, total in zip(spans, totals, strict=True):
            found = scores(q, k, span, case.spec)
            assert found.dtype == torch.float32
            # Sums over rows x heads, so the error grows with both.
            scale = span.rows * q.shape[1]
            torch.testing.assert_close(
                found.double() / scale, total / scale, atol=atol, rtol=rtol, msg=lambda m, n=name: f"{n}: {m}"
            )
            assert case.sinks is not None or float(found.sum()) == pytest.approx(scale, rel=1e-3)
    # Scores of the first and the last span in passing, on top of what is there already.
    for name, operation in OPERATIONS.items():
        device = DEVICE if name == "triton" else q.device
        ends = ((spans[0], totals[0]), (spans[-1], totals[-1]))
        sums = {span: torch.ones(len(total), device=device) for span, total in ends}
        found = operation(q, k, v, spans, case.spec, sums)
        torch.testing.assert_close(found.double(), expected, atol=atol, rtol=rtol)
        for span, into in sums.items():
            torch.testing.assert_close(into.cpu() - 1, SCORES[name](q, k, span, case.spec), atol=1e-4, rtol=1e-4)


@given(case=cases(), row=st.sampled_from(TOLERANCES))
@settings(
    max_examples=examples(40 if len(OPERATIONS) == 2 else 12), deadline=None, suppress_health_check=list(HealthCheck)
)
def test_ragged_batches(case: Case, row: tuple[torch.dtype, float, float]) -> None:
    check(case, *row)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES, ids=str)
@pytest.mark.parametrize("rows", [1, MOST_ROWS, MOST_ROWS + 1, 3 * MOST_ROWS + 5])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("kind", ["only itself", "gapless", "nothing selected", "everything selected", "scattered"])
def test_every_path(kind: str, window: int | None, rows: int, dtype: torch.dtype, atol: float, rtol: float) -> None:
    parts = {"only itself": [], "gapless": [(50, 0)]}.get(kind, PARTS)
    context = sum(length for length, _ in parts)
    fresh = {"everything selected": list(range(context)), "scattered": list(range(3, context, 5))}.get(kind, [])
    request = Request(parts, [*fresh, *range(context, context + rows)], [])
    for sinks in (None, torch.tensor([-3.0, 0.0, 2.0, 9.0])):
        check(Case((4, 2), 64, rotary(64), window, rows, [request, Request([], [0], [])], sinks), dtype, atol, rtol)


@pytest.mark.parametrize("computed_in", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [MOST_ROWS + 1, 400])
def test_bfloat16_in_either_dtype(rows: int, computed_in: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is faster on this CPU."""
    monkeypatch.setattr(sparse_attention_cpu, "compute_dtype", lambda _: computed_in)
    request = Request(PARTS, [*range(3, 112, 5), *range(112, 112 + rows)], [])
    check(Case((4, 2), 64, rotary(64), None, rows, [request]), *TOLERANCES[2])


@pytest.mark.parametrize("rows", [2, MOST_ROWS + 10])
def test_a_chunk_twice_in_one_prompt(rows: int) -> None:
    """The same slots at two places: two shifts, each with its own hidden tokens."""
    parts = [(10, 0), (12, 0), (12, 12), (12, 24)]
    fresh = [11, 25, 26, 40]
    request = Request(parts, [*fresh, *range(46, 46 + rows)], [2], shared=True)
    segments = request.segments(1)
    assert segments[1].start == segments[2].start == segments[3].start
    assert len({s.shift for s in segments[1:4]}) == 3
    check(Case((6, 2), 32, rotary(32), None, 0, [request]), *TOLERANCES[0])


SMALL = Case((4, 2), 64, rotary(64), None, 3, [Request([(20, 0), (33, 41)], [5, 21, 22, *range(53, 60)], [])])


@pytest.mark.parametrize("rows", [3, MOST_ROWS + 3])
def test_rows_of_other_spans_are_not_touched_by_a_span(rows: int) -> None:
    """Each request alone gives what it gives in a batch, bit for bit."""
    long, short = Request([(9, 0), (30, 55)], [12, *range(39, 39 + rows)], []), Request([(4, 0)], [*range(4, 9)], [])
    case = Case((4, 1), 80, rotary(80, True, True), None, 5, [long, short])
    q, k, v, spans = case.tensors(torch.float32)
    both = attention.sparse_attention(q, k, v, spans, case.spec)
    for span in spans:
        alone = attention.sparse_attention(q, k, v, Spans([span]), case.spec)
        assert torch.equal(alone[span.start : span.stop], both[span.start : span.stop])


def test_a_batch_without_spans() -> None:
    """All rows of a batch may be tempered: a request by `ape` that is computed alone."""
    triton = pytest.importorskip("fusionkv.kernels.gpu.sparse_attention_triton")
    q, k, v, _ = (there(x) for x in SMALL.tensors(torch.float32))
    for found in (
        attention.sparse_attention(q, k, v, Spans(), SMALL.spec),
        triton.sparse_attention(q, k, v, Spans(), SMALL.spec),
    ):
        assert found.shape == q.shape


@pytest.mark.skipif(not HAS_KERNEL, reason="needs a GPU, or TRITON_INTERPRET=1 as test_interpreter.py sets it")
def test_channels_of_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs merge the parts of a row: here of 16 channels each, and the last one of fewer."""
    monkeypatch.setattr(sparse_attention_triton, "_MERGED", 32)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 9.0])
    case = Case((4, 1), 72, rotary(72), None, 4, [Request([(300, 0), (212, 41)], [512], [])], sinks)
    assert sparse_attention_triton.Grid(4, 1, 32, 4).parts(1, 513) == 2
    check(case, *TOLERANCES[0])


@pytest.mark.skipif(not HAS_KERNEL, reason="needs a GPU, or TRITON_INTERPRET=1 as test_interpreter.py sets it")
def test_the_tables_of_scores_go_with_their_span() -> None:
    q, k, _, (span,) = (there(x) for x in SMALL.tensors(torch.float32))
    sparse_attention_triton.attention_scores(q, k, span, SMALL.spec)
    gone = weakref.ref(span)
    del span
    assert gone() is None
