"""Sparse attention on a CPU: keys gathered in prompt order, explicit weights, computed in blocks of rows and keys.

With a request's keys in prompt order, the causal mask is a prefix, and stale keys are omitted. With many rows,
gathering the keys costs less than rotating the rows once per chunk. A bfloat16 matrix product is faster alone than
inside the fused attention operator, so the weights of a block are materialised (1 MB, which fits the CPU's cache).
Each thread computes its own blocks.

A weight is 2^(score - guess), where the guess of a row's largest score is taken from a sample of the keys. The guess
cancels out in the division by the sum of the weights, so blocks are independent.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from fusionkv.kernels.cpu.compute_dtype import compute_dtype
from fusionkv.kernels.cpu.threads import side_by_side
from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segments import QuerySpan

WEIGHTS = 1 << 19  # number of weights of a block and a KV head
# Rows of a block times the heads of a group, and its keys: with fewer, the matrix unit idles; more exceed the cache.
ROWS, KEYS = {torch.bfloat16: (256, 512), torch.float32: (128, 256)}, (256, 4096)
SPREAD = 256  # range of positions of a block's rows; within it, a row computes up to twice the keys that it sees
TOGETHER = 1 << 21  # weights of a block over all heads; below it, launching operations takes longer than computing
_SAMPLE = 64  # keys from which a row's largest score is guessed
_FAR = 2.0**20  # largest sum of weights: above it, the guess is so far off that bfloat16 rounds the largest by 4%


class _Mask(NamedTuple):
    """The mask of some rows over the keys from `start` on. bias: 0 or -inf [rows, keys]."""

    start: int
    bias: torch.Tensor


class _Block(NamedTuple):
    """Consecutive rows, and the keys `[low, high)` that any of the rows sees.

    shared: keys that all rows see. step: number of keys to compute at a time.
    """

    rows: slice
    low: int
    high: int
    step: int
    shared: range
    masks: tuple[_Mask, ...]


def attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    span: QuerySpan,
    rotation: Rotation,
    scale: float,
    window: int | None,
    scores: torch.Tensor | None = None,
) -> torch.Tensor:
    """`sparse_attention` of one span: q and the result are [rows, q_heads, head_dim].

    scores: float32 [last position + 1]; the attention of all rows to each position is added to it.
    """
    out = torch.empty_like(q)
    k = _keys(k_pool, span, rotation)
    v = v_pool.index_select(0, span.in_order(rotation).slots).transpose(0, 1).to(k.dtype).contiguous()
    _walk(q, k, v, _blocks(span, q.shape[1] // len(k), window, k.dtype), scale, out, scores)
    return out


def attention_scores(
    q: torch.Tensor, k_pool: torch.Tensor, span: QuerySpan, rotation: Rotation, scale: float, window: int | None
) -> torch.Tensor:
    """`attention_scores.attention_scores` of one span; q holds only the span's rows."""
    scores = torch.zeros(int(span.positions[-1]) + 1)
    k = _keys(k_pool, span, rotation)
    v, out = k.new_empty(len(k), k.shape[2], 0), k.new_empty(*q.shape[:2], 0)
    _walk(q, k, v, _blocks(span, q.shape[1] // len(k), window, k.dtype), scale, out, scores)
    return scores


def _walk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: list[_Block],
    scale: float,
    out: torch.Tensor,
    scores: torch.Tensor | None,
) -> None:
    """Computes blocks and KV heads in parallel: writes means of v [kv_heads, positions, size], adds to `scores`."""
    groups = q.shape[1] // len(k)

    def attend(piece: tuple[_Block, slice]) -> torch.Tensor | None:
        block, heads = piece
        columns = slice(heads.start * groups, heads.stop * groups)
        rows = _fold(q[block.rows, columns], groups, k.dtype)
        mean, found = _attend(rows, k[heads], v[heads], block, scale, scores is not None)
        out[block.rows, columns] = mean.unflatten(1, (groups, -1)).flatten(0, 1).transpose(0, 1)
        return found

    # The last rows see the most keys, so they start first; otherwise one thread would finish long after the others.
    pieces = [(block, heads) for block in reversed(blocks) for heads in _heads(block, q.shape[1], len(k))]
    for (block, _), found in zip(pieces, side_by_side(attend, pieces), strict=True):
        if scores is not None and found is not None:
            scores[block.low : block.high] += found


def _heads(block: _Block, q_heads: int, kv_heads: int) -> list[slice]:
    """Slices of KV heads, each computed in one piece."""
    weights = q_heads * (block.rows.stop - block.rows.start) * (block.high - block.low)
    size = kv_heads if weights <= TOGETHER else 1
    return [slice(head, head + size) for head in range(0, kv_heads, size)]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: _Block, scale: float, scored: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """For some KV heads, float32: means of values [heads, groups * rows, size]; weight sums [keys] if `scored`."""
    everything = range(block.low, block.high)
    if q.dtype == torch.float32 and len(everything) <= block.step:
        return _at_once(q, k, v, block, scale, scored)
    # The first keys are a good sample: in most models they receive the most attention (EPIC).
    sampled = block.shared[:_SAMPLE] if len(block.shared) >= _SAMPLE else range(block.low, block.high)
    for sample in (sampled, everything):
        _guess(q, k, block, sample, scale)
        total, mean = torch.zeros(q.shape[:2]), torch.zeros(*q.shape[:2], v.shape[2])
        parts: list[torch.Tensor] = []
        for keys in _steps(everything, block.step):
            weights = _exponents(q, k, block, keys, scale).exp2_()
            mean += torch.bmm(weights, v[:, keys.start : keys.stop])
            total += (weights.float() if scored else weights).sum(-1)
            if scored:
                parts.append(weights)
        if float(total.max()) < _FAR:
            break
    shares = total.reciprocal_()
    return mean.mul_(shares[..., None]), _sums(parts, shares) if parts else None


def _at_once(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: _Block, scale: float, scored: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`_attend` for keys of at most one step. float32 is exact enough at any score, so nothing is guessed."""
    q[..., -1] = 0
    keys = range(block.low, block.high)
    scores = _exponents(q, k, block, keys, scale)
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp2_()
    shares = weights.sum(-1).reciprocal_()
    mean = torch.bmm(weights, v[:, keys.start : keys.stop]).mul_(shares[..., None])
    return mean, _sums([weights], shares) if scored else None


def _sums(parts: list[torch.Tensor], shares: torch.Tensor) -> torch.Tensor:
    """[keys]: weights [heads, groups * rows, keys] times the shares of their rows, summed over all but keys."""
    # The weights keep their dtype: as float32 they would exceed the cache.
    return torch.cat([torch.bmm(shares[:, None], part.float())[:, 0].sum(0) for part in parts])


def _steps(keys: range, step: int) -> Iterator[range]:
    return (keys[i : i + step] for i in range(0, len(keys), step))


def _guess(q: torch.Tensor, k: torch.Tensor, block: _Block, sample: range, scale: float) -> None:
    """Sets the rows' last channel to minus their largest product with a key of the sample.

    The matrix product then subtracts it before rounding, so that large scores lie near 0, where bfloat16 is fine.
    """
    q[..., -1] = 0
    parts = [_exponents(q, k, block, keys, scale).amax(-1) for keys in _steps(sample, block.step)]
    largest = torch.stack(parts).amax(0)
    q[..., -1] = largest.div_(-scale * math.log2(math.e))


def _exponents(q: torch.Tensor, k: torch.Tensor, block: _Block, keys: range, scale: float) -> torch.Tensor:
    """Scores to base 2 minus the guess [heads, groups * rows, keys]; -inf for keys that a row does not see."""
    out = q.new_empty(*q.shape[:2], len(keys))
    base2 = scale * math.log2(math.e)
    out.baddbmm_(q, k[..., keys.start : keys.stop], beta=0, alpha=base2)
    for start, bias in block.masks:
        low, high = max(keys.start, start), min(keys.stop, start + bias.shape[1])
        if low < high:
            part = out[..., low - keys.start : high - keys.start].unflatten(1, (-1, len(bias)))
            part += bias[:, low - start : high - start]
    return out


def _blocks(span: QuerySpan, groups: int, window: int | None, dtype: torch.dtype) -> list[_Block]:
    """The blocks of the span's rows, computed once for all layers."""
    key = ("blocks", groups, window, dtype)
    if key not in span.views:
        span.views[key] = list(_cut(span.positions, groups, window, dtype))
    blocks: list[_Block] = span.views[key]
    return blocks


def _cut(positions: torch.Tensor, groups: int, window: int | None, dtype: torch.dtype) -> Iterator[_Block]:
    least, most = (max(1, rows // groups) for rows in ROWS[dtype])
    start = 0
    while start < len(positions):
        first = int(positions[start])
        near = int(torch.searchsorted(positions, first + max(SPREAD, first // 16)))
        stop = min(max(near, start + least), start + most, len(positions))
        rows, last = positions[start:stop, None], int(positions[stop - 1])
        low, shared = 0, range(first + 1)
        ahead = torch.arange(first + 1, last + 1)
        masks = [_Mask(first + 1, _bias(ahead > rows, dtype))]
        if window is not None:
            low, shared = max(0, first - window + 1), range(max(0, last - window + 1), first + 1)
            behind = torch.arange(low, min(shared.start, last + 1))
            masks.append(_Mask(low, _bias(behind <= rows - window, dtype)))
        step = max(KEYS[0], min(WEIGHTS // (groups * len(rows)) // 128 * 128, KEYS[1]))
        yield _Block(slice(start, stop), low, last + 1, step, shared, tuple(masks))
        start = stop


def _bias(unseen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, float("-inf"))


def _keys(k_pool: torch.Tensor, span: QuerySpan, rotation: Rotation) -> torch.Tensor:
    """Keys in prompt order, with a channel of ones [kv_heads, head_dim + 1, positions].

    This is the layout that the matrix product reads; with another one, it would transpose them for every block.
    """
    slots, cos, sin = span.in_order(rotation)
    heads, dim = k_pool.shape[1:]
    written = k_pool.index_select(0, slots).flatten(1).t().contiguous().unflatten(0, (heads, dim))
    k = torch.ones(heads, dim + 1, len(slots), dtype=compute_dtype(k_pool.dtype))
    rotation.apply(written.transpose(1, 2), cos, sin, out=k[:, :dim].transpose(1, 2))
    return k


def _fold(q: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [rows, heads * groups, head_dim] as [heads, groups * rows, head_dim + 1]; the last channel is not set."""
    rows, heads, dim = q.shape[0], q.shape[1] // groups, q.shape[2]
    folded = q.new_empty(heads, groups * rows, dim + 1, dtype=dtype)
    folded[..., :dim].unflatten(1, (groups, rows)).copy_(q.unflatten(1, (heads, groups)).permute(1, 2, 0, 3))
    return folded
