"""Recomputes more when the next token of an answer is in doubt, wherever it stands, and before it is said."""

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
    """The token behind `answer`, and the context that it came from: another one if more had to be recomputed.

    answer: the tokens so far, of which the last has not been computed. logits, votes: as for `ForwardJob`.
    """

    def work(sampler: Sampler | None, logits: int) -> ForwardJob:
        return fused.next(answer[-1:], sampler, logits) if answer else fused.prefill(sampler, logits, votes)

    if fused.doubt is None:
        return fused, await engine.run(work(sampler, logits))
    result = await engine.run(work(None, 1))
    assert result.logits is not None
    if doubtful(fused.doubt, result.logits).any():
        fused = (await fused.doubt.more()).behind(answer)
        result = await engine.run(fused.prefill(None, 1, votes))
    assert result.logits is not None
    return fused, replace(result, token=sampler.draw(result.logits[0]))


async def fed(engine: Engine, fused: PrefillPlan, answer: Sequence[int]) -> tuple[PrefillPlan, torch.Tensor]:
    """Logits of an answer's tokens and of what follows, float32 [len(answer) + 1, vocabulary], as `step` finds them
    one by one as long as the answer is what it says; and the context that the last came from.
    """
    logits = (await engine.run(fused.behind(answer).prefill(logits=len(answer) + 1))).logits
    assert logits is not None
    if fused.doubt is None:
        return fused, logits
    said = logits[:-1].argmax(-1).cpu() == torch.tensor(answer, dtype=torch.int64)
    right = 1 + int(said.long().cumprod(0).sum())
    (doubts,) = doubtful(fused.doubt, logits[:right]).nonzero(as_tuple=True)
    if not len(doubts):
        return fused, logits
    fused, first = await fused.doubt.more(), int(doubts[0])
    more = (await engine.run(fused.behind(answer).prefill(logits=len(answer) + 1))).logits
    assert more is not None
    return fused, torch.cat([logits[:first], more[first:]])


def doubtful(doubt: AdaptiveRatio, logits: torch.Tensor) -> torch.Tensor:
    """bool [rows]: whether no token is likely enough. logits: float32 [rows, vocabulary]."""
    return logits.softmax(-1).amax(-1) < doubt.certain
