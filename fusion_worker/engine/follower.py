"""Selection that follows references: forward by the attention of a few recomputed tokens, backward by words."""

import asyncio
from functools import lru_cache

import torch

from fusionkv.fusion_worker.engine.engine import Engine
from fusionkv.fusion_worker.engine.placement import Placement, masked
from fusionkv.fusion_worker.engine.prompt import Prompt
from fusionkv.fusion_worker.engine.work import Work
from fusionkv.fusion_worker.methods.choose import in_turn, spread, top_k
from fusionkv.fusion_worker.methods.lexical import near_and_back
from fusionkv.fusion_worker.methods.scoring import Trace
from fusionkv.fusion_worker.models import Model

# The question's attention breaks ties among words: 0.07 lets a rare word count more than a much attended one.
_TILT = 0.07
# Attention falls on one token of a name; the token on either side counts 0.8 of it.
_BESIDE = (1, 0.8)
# Rows of a round. References do not grow in number with the context; on a CPU so many cost little more than one.
_MOST_ROWS = 16


class Follower:
    """Scores tokens by rounds; each computes a few rows to see what they look at."""

    def __init__(self, model: Model, engine: Engine) -> None:
        self._model = model
        self._engine = engine

    async def scores(
        self, placement: Placement, prompt: Prompt, trace: Trace, asked: torch.Tensor, stale: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, int]:
        """float32 [question_start], higher is to be recomputed first; and how many rows were computed for it.

        asked: float32 [question_start], the question's attention over the stale cache. stale: bool, the same. count:
        tokens that will be chosen.
        """
        chunk = torch.zeros(len(stale), dtype=torch.int64)
        for number, (start, part) in enumerate(zip(prompt.starts[1:], prompt.chunks, strict=True), 1):
            chunk[start : start + len(part)] = number
        words = asyncio.create_task(asyncio.to_thread(_words, prompt))
        question = spread(asked, chunk, *_BESIDE)
        looked_at, followed = torch.zeros(len(stale)), torch.zeros(len(stale))
        have = torch.zeros_like(stale)
        step = min(max(trace.least, round(trace.share * count)), _MOST_ROWS)
        for number in range(trace.rounds):
            order = in_turn([(question, 1.0), (followed, 1.0)], have, stale)
            chosen = top_k(order, stale, min(step * (number + 1), count))
            new = chosen[~have[chosen]]
            if not len(new):
                break
            have[new] = True
            weights = await self._compute(placement, prompt, new)
            # Up to the last of them: no row sees what stands behind it.
            seen = weights.shape[1]
            elsewhere = weights.masked_fill(chunk[new][:, None] == chunk[:seen], 0.0)
            looked_at[:seen] = torch.maximum(looked_at[:seen], elsewhere.amax(0))
            followed = spread(looked_at, chunk, *_BESIDE)
        near, back = (torch.cat([torch.zeros(len(prompt.system)), scores]) for scores in await words)
        tilt = asked**_TILT
        lists = (question, followed, back * tilt, near * tilt)
        return in_turn([*zip(lists, trace.weights, strict=True)], have, stale), int(have.sum())

    async def _compute(self, placement: Placement, prompt: Prompt, new: torch.Tensor) -> torch.Tensor:
        """float32 [rows, last of them + 1]: attention of the tokens at `new`, computed over the stale cache."""
        device = self._model.device
        computed = torch.zeros(prompt.question_start, dtype=torch.bool)
        computed[new] = True
        parts = masked(placement.parts, computed, device)
        seen = tuple(segment for part, hidden in parts for segment in part.segments(hidden))
        # The same slots in every round, and again in the prefill proper, whose rows are all that was chosen.
        ids = prompt.ids[new].to(device)
        work = Work(ids, positions=new.to(device), runs=placement.fresh, seen=seen, follow=True)
        weights = (await self._engine.run(work)).followed
        assert weights is not None
        return weights.cpu()


# Again for the larger ratio when an answer is in doubt, and for every ratio of an evaluation.
@lru_cache(maxsize=32)
def _words(prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
    ids = [i for part in prompt.chunks for i in part.ids]
    chunks = [number for number, part in enumerate(prompt.chunks) for _ in part.ids]
    return near_and_back(ids, chunks, prompt.question)
