"""Shrinks a context for decoding: what is kept of it, by layer and head, is copied together; the rest is let go."""

import asyncio
from functools import partial

import torch

from fusionkv.fusion_worker.compute.forward_job import behind, slots_of
from fusionkv.fusion_worker.compute.kv_pool import KVPool
from fusionkv.fusion_worker.compute.prefill_plan import PrefillPlan
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.recipes.keep import SnapKV
from fusionkv.fusion_worker.tensor_parallel.group import TPGroup
from fusionkv.kernels.segments import KVSegment, QuerySpan


async def evict(
    fused: PrefillPlan, keep: SnapKV, votes: torch.Tensor, pool: KVPool, model: Model, tp: TPGroup
) -> None:
    """Leaves the system prompt, `keep.tokens` slots of context and the question. After the prefill, before decoding.

    votes: float32 [layers, kv_heads, positions]. Each kept slot holds another token in every layer and head, its key
    turned to its own place in the prompt; the slots come from the end of the request's fresh ones. When the caller is
    cancelled, returns only once nothing is copied any more.
    """
    fresh, low = fused.placement.fresh, len(fused.stale) - fused.context_tokens
    kept = behind(fresh, sum(run.length for run in fresh) - keep.tokens)
    tokens = keep.choose(votes[..., low : len(fused.stale) + fused.links]) + low
    span, to = QuerySpan(0, 1, fused.positions[-1:].to(pool.kv.device), fused.visible()), slots_of(kept)
    work = partial(copy_kept, span, tokens, to, pool.kv, model)
    copying = asyncio.ensure_future(asyncio.to_thread(tp.copy, work))
    try:
        await asyncio.shield(copying)
    except asyncio.CancelledError:
        await asyncio.wait([copying])
        raise
    context, first = list[KVSegment](), low
    for run in kept:
        context.append(KVSegment(run.start, run.length, first))
        first += run.length
    fused.evict((*(segment for segment in fused.seen if segment.first < low), *context))
    fused.placement.let_go()


def copy_kept(span: QuerySpan, tokens: torch.Tensor, to: torch.Tensor, kv: torch.Tensor, model: Model) -> None:
    """Copies tokens [layers, kv_heads of all ranks, kept], by position of what a row sees, to pool slots [kept]."""
    device, ranks = kv.device, model.ranks
    heads = torch.arange(kv.shape[3], device=device)
    mine = tokens.chunk(ranks.count, dim=1)[ranks.rank].transpose(1, 2).to(device)
    for pool, at, rotation in zip(kv, mine, model.rotations, strict=True):
        slots, cos, sin = span.in_order(rotation)
        turned = rotation.apply(pool[0][slots[at], heads], cos[at], sin[at])
        pool[0].index_copy_(0, to.to(device), turned)
        pool[1].index_copy_(0, to.to(device), pool[1][slots[at], heads])
