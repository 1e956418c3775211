"""Selection that follows references: forward by the attention of a few recomputed tokens, backward by words."""

import asyncio
from functools import lru_cache

import torch

from fusionkv.fusion_worker.engine.engine import Engine
from fusionkv.fusion_worker.engine.placement import Placement, masked
from fusionkv.fusion_worker.engine.prompt import Prompt
from fusionkv.fusion_worker.engine.work import Work, behind, lay_out
from fusionkv.fusion_worker.methods.choose import in_turn, spread, top_k
from fusionkv.fusion_worker.methods.lexical import ends_sentence, references
from fusionkv.fusion_worker.methods.scoring import PeakAttention, Trace
from fusionkv.fusion_worker.models import Model
from fusionkv.kernels.segments import Segment

# The question's attention breaks ties among words: 0.07 lets a rare word count more than a much attended one.
_TILT = 0.07
# Attention falls on one token of a name; the token on either side counts 0.8 of it.
_BESIDE = (1, 0.8)


class Follower:
    """Scores tokens by where attention leads: the question's, then that of a few rows which it leads to."""

    def __init__(self, model: Model, engine: Engine) -> None:
        self._model = model
        self._engine = engine
        # Again for the larger ratio when an answer is in doubt, and for every ratio of an evaluation.
        self._words = lru_cache(maxsize=32)(self._read)

    async def peaks(self, placement: Placement, prompt: Prompt, peaks: PeakAttention) -> tuple[torch.Tensor, int]:
        """float32 [question_start]: the score, over the stale cache; and how many rows were computed for it."""
        question = torch.arange(prompt.question_start, prompt.tokens)
        before, last = question[: -peaks.most], question[-peaks.most :]
        seen = placement.segments
        if len(before):
            await self._engine.run(self._work(placement, prompt, before, seen))
            seen = (*seen, *lay_out(before.to(self._model.device), placement.fresh))
        work = self._work(placement, prompt, last, seen, len(before), follow=True)
        weights = (await self._engine.run(work)).followed
        assert weights is not None
        return weights[:, : prompt.question_start].square().sum(0).sqrt().cpu(), len(question)

    async def scores(
        self, placement: Placement, prompt: Prompt, trace: Trace, asked: torch.Tensor, stale: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, int]:
        """float32 [question_start], higher is to be recomputed first; and how many rows were computed for it.

        asked: float32 [question_start], as `peaks` gives it. stale: bool, the same. count: tokens to be chosen.
        """
        chunk = torch.zeros(len(stale), dtype=torch.int64)
        for number, (start, part) in enumerate(zip(prompt.starts[1:], prompt.chunks, strict=True), 1):
            chunk[start : start + len(part)] = number
        words = asyncio.create_task(asyncio.to_thread(self._words, prompt))
        question = spread(asked, chunk, *_BESIDE)
        # No more than are chosen: their slots serve.
        rows = top_k(question, stale, min(max(trace.least, round(trace.share * count)), trace.most, count))
        weights = await self._compute(placement, prompt, rows)
        elsewhere = weights.masked_fill(chunk[rows][:, None] == chunk[: weights.shape[1]], 0.0)
        looked_at = torch.zeros(len(stale))
        # Up to the last of them: no row sees what stands behind it.
        looked_at[: weights.shape[1]] = elsewhere.amax(0)
        followed = spread(looked_at, chunk, *_BESIDE)
        linked = torch.cat([torch.zeros(len(prompt.system)), await words])
        lists = (question, followed, linked * asked**_TILT)
        return in_turn([*zip(lists, trace.weights, strict=True)], stale), len(rows)

    async def _compute(self, placement: Placement, prompt: Prompt, new: torch.Tensor) -> torch.Tensor:
        """float32 [rows, last of them + 1]: attention of the tokens at `new`, computed over the stale cache."""
        computed = torch.zeros(prompt.question_start, dtype=torch.bool)
        computed[new] = True
        parts = masked(placement.parts, computed, self._model.device)
        seen = tuple(segment for part, hidden in parts for segment in part.segments(hidden))
        weights = (await self._engine.run(self._work(placement, prompt, new, seen, follow=True))).followed
        assert weights is not None
        return weights.cpu()

    def _work(
        self,
        placement: Placement,
        prompt: Prompt,
        rows: torch.Tensor,
        seen: tuple[Segment, ...],
        used: int = 0,
        follow: bool = False,
    ) -> Work:
        """The prompt's tokens at `rows`, in fresh slots behind the `used` first, which the prefill takes again."""
        device, runs = self._model.device, behind(placement.fresh, used)
        return Work(prompt.ids[rows].to(device), rows.to(device), runs, seen, follow=follow)

    def _read(self, prompt: Prompt) -> torch.Tensor:
        """float32 [context tokens], `references` in the prompt's words."""
        ids = [i for part in prompt.chunks for i in part.ids]
        chunks = [number for number, part in enumerate(prompt.chunks) for _ in part.ids]
        ends = {i: ends_sentence(self._model.tokenizer.decode([i])) for i in set(ids)}
        return references(ids, chunks, [ends[i] for i in ids], prompt.question)
