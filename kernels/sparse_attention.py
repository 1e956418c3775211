"""Position-indexed sparse attention over the KV pool: few rows anywhere, most keys reused (FusionRAG 4.3).

*Rotate the query, not the cache.* A cached chunk's keys stay as their prefill wrote them; a few rows are turned back
by the chunk's shift instead, once a segment. When the rows outnumber what that saves, the keys of the request are
laid out once in prompt order (turned on the way) and the rows walk them in slices, each over its own prefix.
"""

import logging
from collections.abc import Callable
from functools import cache

import torch

from fusionkv.kernels import reference
from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segment_table import Spans
from fusionkv.kernels.segments import Segment, Span

log = logging.getLogger(__name__)

# Turning the query costs rows x q_heads x segments; laying keys out costs keys x kv_heads. Counted, not timed:
# with 8k keys in 16 segments and 14/2 heads the two meet at 73 rows.
FEW_ROWS = 64
# Rows of one slice: a wide one computes more of its diagonal for nothing, a narrow one has more overhead.
SLICE = 128

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def sparse_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    spans: Spans,
    rotation: Rotation,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of a ragged batch of rows over one layer of the pool.

    q: [rows, q_heads, head_dim], carrying RoPE for the rows' positions.
    k_pool, v_pool: [slots, kv_heads, head_dim]; the rows' own keys are in there already.
    window: a row at p sees positions above p - window only; None sees all.
    Returns [rows, q_heads, head_dim], of q's dtype. Rows that no span names are left undefined.
    """
    if q.device.type != "cpu":
        return _gpu_kernel()(q, k_pool, v_pool, spans, rotation, scale, window)
    out = torch.empty_like(q)
    for span in spans:
        rows = q[span.start : span.stop]
        attend = _by_segment if span.rows <= FEW_ROWS else _by_prefix
        out[span.start : span.stop] = attend(rows, k_pool, v_pool, span, rotation, scale, window)
    return out


@cache
def _gpu_kernel() -> Callable[..., torch.Tensor]:
    """The Triton kernel, or the dense reference where Triton can't be had; decided, and said, once."""
    try:
        from fusionkv.kernels import sparse_attention_triton
    except (ImportError, AttributeError) as error:
        log.warning("attention runs dense and slow: no Triton of version 3.6 or later (%s)", error)
        return reference.sparse_attention
    return sparse_attention_triton.sparse_attention


def _by_segment(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    span: Span,
    rotation: Rotation,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Few rows: no key is copied or turned. Each segment gives a partial softmax; they merge by log-sum-exp."""
    first, last = int(span.positions[0]), int(span.positions[-1])
    kv_heads = k_pool.shape[1]
    partial: list[tuple[torch.Tensor, torch.Tensor]] = []
    turned: dict[int, torch.Tensor] = {}
    for segment in span.segments:
        if segment.first > last or (window is not None and segment.last <= first - window):
            continue
        if segment.shift not in turned:
            turned[segment.shift] = _fold(rotation.turn(q, -segment.shift), kv_heads)
        k, v = _heads(k_pool[segment.start : segment.stop]), _heads(v_pool[segment.start : segment.stop])
        unseen = _unseen(segment, span.positions, window)
        if unseen is None:
            partial.append(_flash(turned[segment.shift], k, v, 0.0, False, scale=scale))
        else:
            partial.append(_masked(turned[segment.shift], k, v, unseen, scale))
    return _unfold(_merge(partial), q)


def _unseen(segment: Segment, positions: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """bool [rows, length], or None where every row sees the whole segment."""
    future = segment.last > int(positions[0])
    past = window is not None and segment.first <= int(positions[-1]) - window
    if segment.hidden is None and not future and not past:
        return None
    unseen = torch.zeros(len(positions), segment.length, dtype=torch.bool)
    if segment.hidden is not None:
        unseen |= segment.hidden
    if future or past:
        keys = segment.key_positions(positions.device)
        unseen |= keys > positions[:, None]
        if window is not None:
            unseen |= keys <= positions[:, None] - window
    return unseen


def _merge(partial: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Joins softmax results over disjoint keys. Pairs of out [1, heads, rows, dim] and lse [1, heads, rows]."""
    if len(partial) == 1:
        return partial[0][0]
    weights = torch.stack([lse.float() for _, lse in partial]).softmax(0)[..., None]
    total = torch.zeros_like(partial[0][0], dtype=torch.float32)
    for weight, (out, _) in zip(weights, partial, strict=True):
        total += out.float() * weight
    return total.to(partial[0][0].dtype)


def _by_prefix(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    span: Span,
    rotation: Rotation,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Many rows: keys in prompt order, so that 'causal' is a prefix and 'stale' is overwritten; no wide mask."""
    k, v = _in_order(k_pool, v_pool, span, rotation)
    positions = span.positions
    first, last = int(positions[0]), int(positions[-1])
    if window is None and last - first + 1 == span.rows:
        own = _flash(_heads(q), k[:, :, first:], v[:, :, first:], 0.0, True, scale=scale)
        before = [_flash(_heads(q), k[:, :, :first], v[:, :, :first], 0.0, False, scale=scale)] if first else []
        return _merge([own, *before])[0].transpose(0, 1)
    out = torch.empty_like(q)
    for start in range(0, span.rows, SLICE):
        rows = slice(start, start + SLICE)
        out[rows] = _slice(q[rows], k, v, positions[rows], scale, window)
    return out


def _slice(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """A few neighbouring rows over keys in prompt order: unmasked where all of them see, masked where they differ.

    Splitting at the first row's position keeps the mask to the slice's own stretch of the prompt: on one thread 1.3
    times faster than one masked pass at 8k keys, 15% of the rows, 14/2 heads, bfloat16.
    """
    low, middle, high = 0, int(positions[0]) + 1, int(positions[-1]) + 1
    if window is not None:
        low = max(0, middle - window)
        middle = low
    partial = []
    if middle > low:
        partial.append(_flash(_heads(q), k[:, :, low:middle], v[:, :, low:middle], 0.0, False, scale=scale))
    if high > middle:
        keys = torch.arange(middle, high)
        unseen = keys > positions[:, None]
        if window is not None:
            unseen |= keys <= positions[:, None] - window
        partial.append(_masked(_heads(q), k[:, :, middle:high], v[:, :, middle:high], unseen, scale))
    return _merge(partial)[0].transpose(0, 1)


def _masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, unseen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and log-sum-exp where `unseen` [rows, keys] is not set; q's rows repeat it when they are folded."""
    bias = torch.zeros(unseen.shape, dtype=q.dtype).masked_fill_(unseen, float("-inf"))
    blind = unseen.all(-1)
    if q.shape[2] != len(unseen):
        groups = q.shape[2] // len(unseen)
        bias, blind = bias.repeat(groups, 1), blind.repeat(groups)
    out, lse = _flash(q, k, v, 0.0, False, attn_mask=bias[None, None], scale=scale)
    # For a row that sees nothing of these keys the operator answers lse 0 where it is -inf.
    return out, lse.masked_fill(blind, float("-inf"))


def _in_order(
    k_pool: torch.Tensor, v_pool: torch.Tensor, span: Span, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [1, kv_heads, positions, head_dim] in prompt order; views when they already lie so."""
    length = int(span.positions[-1]) + 1
    if len(span.segments) == 1 and span.segments[0].positions is None and span.segments[0].shift == 0:
        lone = span.segments[0]
        return _heads(k_pool[lone.start : lone.start + length]), _heads(v_pool[lone.start : lone.start + length])
    shape = (length, *k_pool.shape[1:])
    k, v = k_pool.new_empty(shape), v_pool.new_empty(shape)
    # Segments with explicit positions hold fresh keys and come last: they overwrite the stale ones below them.
    for segment in sorted(span.segments, key=lambda s: s.positions is not None):
        if segment.first >= length:
            continue
        if segment.positions is None:
            stop = min(segment.first + segment.length, length)
            slots = slice(segment.start, segment.start + stop - segment.first)
            k[segment.first : stop] = rotation.turn(k_pool[slots], segment.shift)
            v[segment.first : stop] = v_pool[slots]
        else:
            count = int(torch.searchsorted(segment.positions, length))
            slots = slice(segment.start, segment.start + count)
            k.index_copy_(0, segment.positions[:count], rotation.turn(k_pool[slots], segment.shift))
            v.index_copy_(0, segment.positions[:count], v_pool[slots])
    return _heads(k), _heads(v)


def _heads(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim] as [1, heads, tokens, dim], a view."""
    return x.transpose(0, 1)[None]


def _fold(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[rows, q_heads, dim] as [1, kv_heads, groups * rows, dim], so that a group's heads share one pass over keys."""
    rows, heads, dim = q.shape
    return q.transpose(0, 1).reshape(1, kv_heads, heads // kv_heads * rows, dim)


def _unfold(out: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    rows, heads, dim = q.shape
    return out.reshape(heads, rows, dim).transpose(0, 1)
