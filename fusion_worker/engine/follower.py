"""Selection that follows references: forward by the attention of tokens as they are recomputed, backward by words."""

import asyncio

import torch

from fusionkv.fusion_worker.engine.engine import Engine
from fusionkv.fusion_worker.engine.placement import Placement
from fusionkv.fusion_worker.engine.prompt import Prompt
from fusionkv.fusion_worker.engine.work import Work, behind, lay_out
from fusionkv.fusion_worker.methods.choose import in_turn, top_k
from fusionkv.fusion_worker.methods.lexical import near_and_back
from fusionkv.fusion_worker.methods.scoring import Trace
from fusionkv.fusion_worker.models import Model
from fusionkv.kernels.segments import Segment

# The question's attention breaks ties among words: 0.2 lets a rare word count more than a much attended one.
_TILT = 0.2
# Rows of a round: the attention of each is held until the last layer.
_MOST_ROWS = 256


class Follower:
    """Scores tokens in rounds; each computes a few tokens more over what is chosen so far."""

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
        words = asyncio.to_thread(_words, prompt)
        near, back = (torch.cat([torch.zeros(len(prompt.system)), scores]) for scores in await words)
        followed = torch.zeros(len(stale))
        have = torch.zeros_like(stale)
        own: tuple[Segment, ...] = ()
        step = min(max(trace.least, round(trace.share * count)), _MOST_ROWS)
        for number in range(trace.rounds):
            order = in_turn([(asked, 1.0), (followed, 1.0)], have, stale)
            chosen = top_k(order, stale, min(step * (number + 1), count))
            new = chosen[~have[chosen]]
            if not len(new):
                break
            used = int(have.sum())
            have[new] = True
            weights = await self._compute(placement, prompt, new, have, own, used)
            own += lay_out(new.to(self._model.device), behind(placement.fresh, used))
            # Up to the last of them: no row sees what stands behind it.
            seen = weights.shape[1]
            elsewhere = weights.masked_fill(chunk[new][:, None] == chunk[:seen], 0.0)
            followed[:seen] = torch.maximum(followed[:seen], elsewhere.amax(0))
        lists = (asked, followed, back * asked**_TILT, near)
        return in_turn([*zip(lists, trace.weights, strict=True)], have, stale), int(have.sum())

    async def _compute(
        self,
        placement: Placement,
        prompt: Prompt,
        new: torch.Tensor,
        have: torch.Tensor,
        own: tuple[Segment, ...],
        used: int,
    ) -> torch.Tensor:
        """float32 [rows, last of them + 1]: attention of the tokens at `new`, computed over what is there."""
        device = self._model.device
        seen = own
        for part in placement.parts:
            start = part.wanted.position
            seen += part.segments(have[start : start + len(part.wanted.chunk)].to(device))
        work = Work(
            ids=prompt.ids()[new].to(device),
            positions=new.to(device),
            # Written again by the prefill proper, whose rows are all that was chosen.
            runs=behind(placement.fresh, used),
            seen=seen,
            follow=True,
        )
        weights = (await self._engine.run(work)).followed
        assert weights is not None
        return weights.cpu()


def _words(prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
    ids = [i for part in prompt.chunks for i in part.ids]
    chunks = [number for number, part in enumerate(prompt.chunks) for _ in part.ids]
    return near_and_back(ids, chunks, prompt.question)
