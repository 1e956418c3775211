"""Recomputes more of the context when the next token of an answer is uncertain, before that token is sampled."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from fusionkv.fusion_worker.compute.engine import Engine
from fusionkv.fusion_worker.compute.forward_job import ForwardJob, Result
from fusionkv.fusion_worker.compute.prefill_plan import AdaptiveRatio, PrefillPlan
from fusionkv.fusion_worker.decode.sampling import Sampler


async def step(
    engine: Engine, fused: PrefillPlan, answer: Sequence[int], sampler: Sampler, logits: int = 0, votes: int = 0
) -> tuple[PrefillPlan, Result]:
    """Computes the token after `answer`; recomputes more of the context first if that token is uncertain.

    answer: the tokens so far; the KV of the last one is not computed yet. logits, votes: as for `ForwardJob`. Returns
    the plan that the token was computed with, and the result.
    """

    def job(sampler: Sampler | None, logits: int) -> ForwardJob:
        return fused.next(answer[-1:], sampler, logits) if answer else fused.prefill(sampler, logits, votes)

    if fused.doubt is None:
        return fused, await engine.run(job(sampler, logits))
    result = await engine.run(job(None, 1))
    assert result.logits is not None
    if doubtful(fused.doubt, result.logits).any():
        fused = (await fused.doubt.more()).behind(answer)
        result = await engine.run(fused.prefill(None, 1, votes))
    assert result.logits is not None
    return fused, replace(result, token=sampler.draw(result.logits[0]))


async def fed(engine: Engine, fused: PrefillPlan, answer: Sequence[int]) -> tuple[PrefillPlan, torch.Tensor]:
    """Computes the logits of a given answer in one pass, like `step` would token by token.

    More of the context is recomputed at the first uncertain token, up to which the answer is the greedy one.

    Returns the plan that the last row was computed with, and float32 [len(answer) + 1, vocabulary]: logits of the
    answer's tokens and of the one after them.
    """
    logits = (await engine.run(fused.behind(answer).prefill(logits=len(answer) + 1))).logits
    assert logits is not None
    if fused.doubt is None:
        return fused, logits
    greedy = logits[:-1].argmax(-1).cpu() == torch.tensor(answer, dtype=torch.int64)
    count = 1 + int(greedy.long().cumprod(0).sum())
    (uncertain,) = doubtful(fused.doubt, logits[:count]).nonzero(as_tuple=True)
    if not len(uncertain):
        return fused, logits
    fused, first = await fused.doubt.more(), int(uncertain[0])
    more = (await engine.run(fused.behind(answer).prefill(logits=len(answer) + 1))).logits
    assert more is not None
    return fused, torch.cat([logits[:first], more[first:]])


def doubtful(doubt: AdaptiveRatio, logits: torch.Tensor) -> torch.Tensor:
    """bool [rows]: whether no token reaches the minimum probability. logits: float32 [rows, vocabulary]."""
    return logits.softmax(-1).amax(-1) < doubt.certain
