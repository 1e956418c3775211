"""Shrinks a context for decoding: copies the kept tokens' KV, by layer and head, and frees the rest."""

import asyncio
from functools import partial

import torch

from fusionkv.fusion_worker.compute.engine import TPGroup
from fusionkv.fusion_worker.compute.plan import PrefillPlan
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.pool.kv_pool import KVPool
from fusionkv.fusion_worker.pool.slots import behind, slots_of, stretches
from fusionkv.kernels.segments import QuerySpan
from fusionkv.protos.contract.selectors import SnapKV
from fusionkv.protos.runtime.cancellation import to_the_end

# Votes are averaged over neighbouring tokens, so that a fact is kept with the words around it (SnapKV 4.1).
_POOL = 5


async def evict(
    plan: PrefillPlan, keep: SnapKV, votes: torch.Tensor, pool: KVPool, model: Model, tp: TPGroup
) -> PrefillPlan:
    """Evicts all context but `keep.tokens` tokens by layer and head; returns the plan to decode with.

    A kept slot holds a different token in each layer and head, with its key rotated to that token's position. The
    slots are taken from the end of the request's fresh ones. If cancelled, returns only once copying has stopped.

    plan: after its prefill. votes: float32 [layers, kv_heads, positions], attention of the question's rows.
    """
    fresh, low = plan.layout.fresh, len(plan.stale) - plan.context_tokens
    kept = behind(fresh, sum(run.length for run in fresh) - keep.tokens)
    span, to = QuerySpan(0, 1, plan.positions[-1:], plan.visible()), slots_of(kept)

    def copy() -> None:
        tokens = most_voted(votes[..., low : len(plan.stale) + plan.links], keep.tokens) + low
        tp.copy(partial(copy_kept, span, tokens, to, pool.kv, model))

    await to_the_end(asyncio.to_thread(copy))
    context = stretches(kept, keep.tokens, low, shift=0)
    plan.layout.let_go()
    return plan.evict((*(segment for segment in plan.keys if segment.first < low), *context))


def most_voted(votes: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [layers, kv_heads, count]: indices of the context tokens to keep, ascending.

    votes: float32 [layers, kv_heads, context tokens], attention of the question's rows, summed.
    """
    smooth = torch.nn.functional.avg_pool1d(votes, _POOL, stride=1, padding=_POOL // 2)
    return smooth.topk(count, -1).indices.sort(-1).values


def copy_kept(span: QuerySpan, tokens: torch.Tensor, to: torch.Tensor, kv: torch.Tensor, model: Model) -> None:
    """Copies the KV of chosen tokens to other slots of the pool, on one rank.

    span: a row that sees all tokens. tokens: int64 [layers, kv_heads of all ranks, kept], positions.
    to: int64 [kept], pool slots.
    """
    device, ranks = kv.device, model.ranks
    heads = torch.arange(kv.shape[3], device=device)
    rank_tokens = tokens.chunk(ranks.count, dim=1)[ranks.rank].transpose(1, 2).to(device)
    for pool, at, rotation in zip(kv, rank_tokens, model.rotations, strict=True):
        order = span.in_order(rotation, device)
        slots = order.slots[at]
        turned = rotation.apply(pool[0][slots, heads], order.cos[at], order.sin[at])
        pool[0].index_copy_(0, to.to(device), turned)
        for values in pool[1:]:
            values.index_copy_(0, to.to(device), values[slots, heads])
