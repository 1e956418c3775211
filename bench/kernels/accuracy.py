"""Checks the kernels against the float64 reference on ragged batches, with poisoned values in invisible slots."""

from dataclasses import dataclass

import torch

from fusionkv.bench.gpu.setup import Setup
from fusionkv.bench.gpu.workload import Part, Problem, Shape, choose, lay_out, rotary
from fusionkv.kernels import reference
from fusionkv.kernels.segments import Spans

# Absolute and relative tolerance of an element, as in tests/kernels/test_attention.py, and of the norm.
TOLERANCES = {
    torch.float32: (2e-5, 2e-5, 2e-5),
    torch.float16: (4e-3, 4e-3, 4e-3),
    torch.bfloat16: (3e-2, 2e-2, 2e-2),
}
_ALL = tuple(TOLERANCES)
_BF16 = (torch.bfloat16,)
_POISON = 100.0  # value of hidden slots, which would attract all attention if they were visible


@dataclass(frozen=True)
class Request:
    """A request with chunks, of which a random share is recomputed, and a question.

    chunks: lengths. question: length. repeated: whether all chunks are the same one.
    """

    chunks: tuple[int, ...]
    ratio: float
    question: int
    repeated: bool = False


@dataclass(frozen=True)
class Case:
    """A batch of requests. heads: numbers of query heads and of KV heads."""

    name: str
    requests: tuple[Request, ...]
    dtypes: tuple[torch.dtype, ...] = _BF16
    heads: tuple[int, int] = (8, 2)
    dim: int = 128
    partial: bool = False
    interleaved: bool = False
    window: int | None = None


_SCATTERED = (Request((100, 512, 300), 0.15, 32),)
CASES = (
    Case("one query", (Request((512, 333, 90), 0.15, 1),), _ALL, (28, 4)),
    Case("nothing selected", (Request((512, 300), 0.0, 32),), heads=(28, 4)),
    Case("everything selected", (Request((400, 200), 1.0, 32),)),
    Case("scattered", _SCATTERED, _ALL),
    Case("chunk repeated", (Request((256, 256, 256), 0.1, 20, repeated=True),)),
    Case(
        "three lengths",
        (Request((40,), 0.2, 1), Request((512, 128), 0.15, 17), Request((512,) * 6, 0.15, 1)),
        _ALL,
        (32, 8),
    ),
    Case("dim 64", _SCATTERED, dim=64),
    Case("dim 96", _SCATTERED, _ALL, dim=96),
    Case("dim 256", _SCATTERED, _ALL, dim=256),
    Case("partial rotary", _SCATTERED, partial=True),
    Case("interleaved rotary", _SCATTERED, interleaved=True),
    Case("partial interleaved rotary", _SCATTERED, partial=True, interleaved=True),
    Case("window", _SCATTERED, window=200),
    Case("window, one query", (Request((512, 300), 0.15, 1),), window=200),
)


def measure(setup: Setup) -> None:
    """Checks every case in its dtypes. Errors are shares of the tolerance, so the limit is 1."""
    lines = []
    for case in CASES:
        for dtype in case.dtypes:
            name = f"{case.name}, {str(dtype)[6:]}"
            if not setup.allows(f"the check of {name}", 10):
                continue
            try:
                outputs, scores = _errors(_problem(case, setup.sizes.cut, dtype, setup.device), dtype)
            except Exception as error:  # if a kernel can't be compiled for a shape, the others are still checked
                setup.report.fail(f"check of {name}: {type(error).__name__}: {error}".splitlines()[0])
                continue
            lines.append((name, outputs, scores))
            # Not `> 1`: an error that is NaN must not pass.
            if not (outputs <= 1 and scores <= 1):
                setup.report.fail(f"check of {name}: {outputs:.3g} (outputs), {scores:.3g} (scores) of the tolerance")
    setup.report.table("Error against float64, as a share of the tolerance", ("case", "outputs", "scores"), lines)


def _problem(case: Case, cut: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """Makes the problem of a case. Slots of no request hold NaN; hidden ones hold 100."""
    spans, row, slot = [], 0, 1
    for request in case.requests:
        lengths = [max(2, length // cut) for length in request.chunks]
        parts: list[Part] = []
        for length in lengths:
            parts.append(Part(parts[0].slot if request.repeated and parts else slot, length, 3 * slot))
            slot += length
        context = sum(lengths)
        computed = torch.cat([choose(0, context, request.ratio), torch.arange(context, context + request.question)])
        slot += 1  # a gap, since runs of slots need not be adjacent
        spans.append(lay_out(parts, computed, slot, row, len(computed), device))
        row, slot = row + len(computed), slot + len(computed)
    shape = Shape(case.name, *case.heads, case.dim)
    made = Problem.random(shape, slot + 3, Spans(spans), torch.float32)
    used = torch.zeros(len(made.k), dtype=torch.bool, device=device)
    for request, span in zip(case.requests, spans, strict=True):
        for s in span.segments:
            used[s.start : s.stop] = True
            # A repeated chunk's slots may be hidden at one position and visible at another.
            if s.hidden is not None and not request.repeated:
                made.k[s.start : s.stop][s.hidden] = _POISON
                made.v[s.start : s.stop][s.hidden] = _POISON
    made.k[~used] = made.v[~used] = float("nan")
    rotation = rotary(case.dim, case.partial, case.interleaved)
    window = None if case.window is None else max(2, case.window // cut)
    return Problem((made.q * 2).to(dtype), made.k.to(dtype), made.v.to(dtype), made.spans, rotation, window)


def _errors(problem: Problem, dtype: torch.dtype) -> tuple[float, float]:
    """Errors of the outputs and of all spans' scores, as shares of the tolerance; infinite for non-finite results."""
    q, k, v = problem.q.double(), problem.k.double(), problem.v.double()
    rest = problem.rotation, problem.scale, problem.window
    expected = reference.sparse_attention(q, k, v, problem.spans, *rest)
    outputs, scores = _error(problem.attend(), expected, dtype), 0.0
    for span in problem.spans:
        total = reference.attention_scores(q, k, span, *rest)
        # Relative to the mean over rows, heads and keys, so that the tolerance does not depend on the length.
        mean = span.rows * q.shape[1] / len(total)
        scores = max(scores, _error(problem.scores(span) / mean, total / mean, dtype))
    return outputs, scores


def _error(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    absolute, relative, norm = TOLERANCES[dtype]
    if found.shape != expected.shape or not found.isfinite().all():
        return float("inf")
    difference = found.double() - expected
    worst = (difference.abs() / (absolute + relative * expected.abs())).max()
    return max(float(worst), float(difference.norm() / expected.norm()) / norm)
