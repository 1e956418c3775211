"""Prompts laid out in a pool as in the engine: a system prompt, chunks cached at other positions, and a question."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusionkv.kernels.attention import attention_scores, sparse_attention
from fusionkv.kernels.segments import AttentionSpec, KVSegment, QuerySpan, Rotation, Spans

SYSTEM, QUESTION = 32, 32  # tokens
DECODE_CHUNKS = 64
DECODE_HIDDEN = 0.15  # share of hidden tokens of a context during decoding: those recomputed in the prefill


@dataclass(frozen=True)
class Shape:
    """The attention of one layer of a model."""

    name: str
    heads: int
    kv_heads: int
    dim: int

    def operations(self, pairs: int) -> int:
        """Floating-point operations of QK^T and PV over pairs of a row and a visible key."""
        return 4 * self.heads * self.dim * pairs


@dataclass(frozen=True)
class Part:
    """Cached pool slots `[slot, slot + length)`, with keys rotated for positions from `base`."""

    slot: int
    length: int
    base: int


@dataclass(frozen=True)
class Problem:
    """The attention of one layer. q: [rows, heads, dim]. k, v: [slots, kv_heads, dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    spans: Spans
    spec: AttentionSpec

    @classmethod
    def random(cls, shape: Shape, slots: int, spans: Spans, device: torch.device, dtype: torch.dtype) -> "Problem":
        """Random normal queries, keys and values for these spans."""
        q = torch.randn(spans[-1].stop, shape.heads, shape.dim, dtype=dtype, device=device)
        k, v = (torch.randn(slots, shape.kv_heads, shape.dim, dtype=dtype, device=device) for _ in range(2))
        return cls(q, k, v, spans, AttentionSpec(rotary(shape.dim), shape.dim**-0.5))

    @property
    def pairs(self) -> int:
        """Number of pairs of a row and a visible key."""
        return sum(int((span.positions + 1).sum()) for span in self.spans)

    @property
    def keys(self) -> int:
        """Number of visible keys, summed over requests."""
        return sum(int(span.positions[-1]) + 1 for span in self.spans)

    def attend(self) -> torch.Tensor:
        return sparse_attention(self.q, self.k, self.v, self.spans, self.spec)

    def scores(self, span: QuerySpan) -> torch.Tensor:
        return attention_scores(self.q, self.k, span, self.spec)


def rotary(dim: int) -> Rotation:
    """RoPE with base 1e6, of all channels."""
    half = dim // 2
    return Rotation(1e6 ** (-torch.arange(half, dtype=torch.float64) / half), interleaved=False)


def choose(first: int, tokens: int, share: float) -> torch.Tensor:
    """int64, ascending, on the CPU: a random share of the positions `[first, first + tokens)`."""
    return first + torch.randperm(tokens)[: round(share * tokens)].sort().values


def lay_out(parts: Sequence[Part], computed: torch.Tensor, fresh: int, row: int, rows: int) -> QuerySpan:
    """The span of the last `rows` computed tokens, and all keys that they see.

    Args:
        parts: cached parts, in prompt order.
        computed: int64 [tokens], ascending, on the CPU. Their cached keys are hidden.
        fresh: slot of the first computed token's fresh key; the others follow.
        row: first query row.
        rows: number of query rows.
    """
    stale = torch.zeros(sum(part.length for part in parts), dtype=torch.bool)
    stale[computed[computed < len(stale)]] = True
    segments, at = [], 0
    for part in parts:
        stop = at + part.length
        unseen = stale[at:stop] if stale[at:stop].any() else None
        segments.append(KVSegment(part.slot, part.length, at, at - part.base, hidden=unseen))
        at = stop
    first = int(computed[0])
    gapless = int(computed[-1]) - first + 1 == len(computed)
    segments.append(KVSegment(fresh, len(computed), first, positions=None if gapless else computed))
    return QuerySpan(row, row + rows, computed[len(computed) - rows :], tuple(segments))


def cached(context: int, chunk: int) -> list[Part]:
    """A system prompt and chunks in random order, in slots `[0, SYSTEM + context)`.

    All chunks were rotated for position 0, so that none is at its own position.
    """
    places = torch.randperm(context // chunk).tolist()
    return [Part(0, SYSTEM, 0), *(Part(SYSTEM + place * chunk, chunk, 0) for place in places)]


def prefill(
    shape: Shape, context: int, chunk: int, ratio: float, device: torch.device, dtype: torch.dtype
) -> Problem:
    """The problem with a random share of the context and a question as rows over cached chunks."""
    start = SYSTEM + context
    computed = torch.cat([choose(SYSTEM, context, ratio), torch.arange(start, start + QUESTION)])
    span = lay_out(cached(context, chunk), computed, start, 0, len(computed))
    return Problem.random(shape, start + len(computed), Spans([span]), device, dtype)


def decode(shape: Shape, context: int, batch: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """The problem with one row per request over 64 chunks of its own, with recomputed tokens."""
    chunk, spans, slot = context // DECODE_CHUNKS, [], 0
    for row in range(batch):
        computed = torch.cat([choose(0, context, DECODE_HIDDEN), torch.tensor([context])])
        parts = [Part(slot + place * chunk, chunk, 7) for place in torch.randperm(DECODE_CHUNKS).tolist()]
        spans.append(lay_out(parts, computed, slot + context, row, 1))
        slot += context + len(computed)
    return Problem.random(shape, slot, Spans(spans), device, dtype)
