"""Attention of one layer on a CPU: blocks of rows against one call of the operator, rotated rows against keys."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from fusionkv.bench.gpu.workload import QUESTION, SYSTEM, Problem, Shape, cached, decode, lay_out, prefill
from fusionkv.bench.kernels.baselines import Dense
from fusionkv.bench.kernels.pairs import Pairs, Way
from fusionkv.kernels import reference
from fusionkv.kernels.cpu import sparse_attention_cpu
from fusionkv.kernels.segments import KVSegment, QuerySpan, Spans

_CPU = torch.device("cpu")
_SPREAD = 3.0  # standard deviation of the logits
_CHECKED = 64  # number of rows to compute errors of
_REQUESTS = 8


def measure(pairs: Pairs, shape: Shape, context: int, chunk: int) -> None:
    """Measures all rows of a prompt, scattered rows, and single rows, in bfloat16.

    All times include laying out the keys in order.
    """
    tokens = SYSTEM + context + QUESTION
    plain = Spans([QuerySpan(0, tokens, torch.arange(tokens), (KVSegment(0, tokens, 0),))])
    whole = _sharp(Problem.random(shape, tokens, plain, torch.bfloat16))
    pairs.add(
        f"attention, all {len(whole.q)} rows",
        Way("fused operator, causal", lambda: _rows(_causal(Dense(whole)))),
        Way("the same, in the faster dtype", lambda: _attend(sparse_attention_cpu.prefill_attention, whole)),
        lambda found: _error(whole, found),
    )
    scattered = _sharp(prefill(shape, context, chunk, 0.15, _CPU, torch.bfloat16))
    positions = scattered.spans[0].positions
    unseen = torch.arange(int(positions[-1]) + 1) > positions[:, None]
    mask = torch.zeros(unseen.shape, dtype=torch.bfloat16).masked_fill_(unseen, float("-inf"))
    pairs.add(
        f"attention, {len(scattered.q)} rows scattered",
        Way("fused operator, one call", lambda: _rows(_masked(Dense(scattered), mask))),
        Way("blocks of rows", lambda: _attend(sparse_attention_cpu.prefill_attention, scattered)),
        lambda found: _error(scattered, found),
    )
    start = SYSTEM + context
    span = lay_out(cached(context, chunk), torch.tensor([start]), start, 0, 1, _CPU)
    one = _sharp(Problem.random(shape, start + 1, Spans([span]), torch.bfloat16))
    pairs.add(
        f"attention, 1 row, {len(span.segments)} segments",
        Way("keys put in order", lambda: _attend(sparse_attention_cpu.prefill_attention, one)),
        Way("tiles of the segments", lambda: _decode(one, [one.spans])),
        lambda found: _error(one, found),
    )
    for shared in (False, True):
        many = _sharp(decode(shape, context // 2, _REQUESTS, shared, _CPU, torch.bfloat16))
        pairs.add(
            f"attention, {_REQUESTS} requests decoding, {'the same chunks' if shared else 'chunks of their own'}",
            Way("one after another", partial(_decode, many, [Spans([span]) for span in many.spans])),
            Way("together", partial(_decode, many, [many.spans])),
            partial(_error, many),
        )


def _sharp(problem: Problem) -> Problem:
    return replace(problem, q=problem.q * _SPREAD)


def _attend(path: Callable[..., torch.Tensor], problem: Problem) -> torch.Tensor:
    return path(problem.q, problem.k, problem.v, problem.spans[0], problem.rotation, problem.scale, None)


def _decode(problem: Problem, batches: list[Spans]) -> torch.Tensor:
    """Runs the batches one after another. Their spans keep cached data, as between layers."""
    out, rest = torch.empty_like(problem.q), (problem.rotation, problem.scale, None)
    for spans in batches:
        sparse_attention_cpu.decode_attention(problem.q, problem.k, problem.v, spans, spans, *rest, out)
    return out


def _causal(dense: Dense) -> torch.Tensor:
    return F.scaled_dot_product_attention(dense.q, dense.k, dense.v, is_causal=True, enable_gqa=True)


def _masked(dense: Dense, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(dense.q, dense.k, dense.v, attn_mask=mask, enable_gqa=True)


def _rows(out: torch.Tensor) -> torch.Tensor:
    """[1, heads, rows, dim] as [rows, heads, dim]."""
    return out[0].transpose(0, 1)


def _error(problem: Problem, found: torch.Tensor) -> float:
    """Relative norm of the difference to float64, over some rows of every request."""
    exact, seen = [], []
    for span in problem.spans:
        some = torch.linspace(0, span.rows - 1, min(_CHECKED, span.rows)).long()
        q, k, v = (x.double() for x in (problem.q[span.start + some], problem.k, problem.v))
        alone = [QuerySpan(0, len(some), span.positions[some], span.segments)]
        exact.append(reference.sparse_attention(q, k, v, alone, problem.rotation, problem.scale))
        seen.append(found[span.start + some].double())
    return float((torch.cat(seen) - torch.cat(exact)).norm() / torch.cat(exact).norm())
