"""Shrinks a context for decoding: what is kept of it, by layer and head, is copied together; the rest is let go."""

import asyncio

import torch

from fusionkv.fusion_worker.engine.fused import Fused
from fusionkv.fusion_worker.engine.kv_pool import KVPool
from fusionkv.fusion_worker.engine.work import behind, lay_out, slots_of
from fusionkv.fusion_worker.methods.keep import SnapKV
from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segments import Segment, Span


async def evict(fused: Fused, keep: SnapKV, votes: torch.Tensor, pool: KVPool, rotation: Rotation) -> None:
    """Leaves the system prompt, `keep.tokens` slots of context and the question. After the prefill, before decoding.

    votes: float32 [layers, kv_heads, positions]. Each kept slot holds another token in every layer and head, its key
    turned to its own place in the prompt; the slots come from the end of the request's fresh ones. When the caller is
    cancelled, returns only once nothing is copied any more.
    """
    fresh, low = fused.placement.fresh, len(fused.stale) - fused.context_tokens
    kept = behind(fresh, sum(run.length for run in fresh) - keep.tokens)
    tokens = keep.choose(votes[..., low : len(fused.stale) + fused.links]) + low
    copying = asyncio.ensure_future(asyncio.to_thread(_copy, fused, tokens, slots_of(kept), pool.kv, rotation))
    try:
        await asyncio.shield(copying)
    except asyncio.CancelledError:
        await asyncio.wait([copying])
        raise
    context, first = list[Segment](), low
    for run in kept:
        context.append(Segment(run.start, run.length, first))
        first += run.length
    fused.evict((*(segment for segment in fused.seen if segment.first < low), *context))
    fused.placement.let_go()


def _copy(fused: Fused, tokens: torch.Tensor, to: torch.Tensor, kv: torch.Tensor, rotation: Rotation) -> None:
    """Copies tokens [layers, kv_heads, kept], by position, to pool slots [kept]."""
    device = kv.device
    positions = fused.positions.to(device)
    own = lay_out(positions, fused.placement.fresh)
    slots, cos, sin = Span(0, 1, positions[-1:], (*fused.seen, *own)).in_order(rotation)
    heads = torch.arange(kv.shape[3], device=device)
    for pool, at in zip(kv, tokens.transpose(1, 2).to(device), strict=True):
        pool[0].index_copy_(0, to.to(device), rotation.apply(pool[0][slots[at], heads], cos[at], sin[at]))
        pool[1].index_copy_(0, to.to(device), pool[1][slots[at], heads])
