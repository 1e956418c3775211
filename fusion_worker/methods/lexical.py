"""Links between passages by words alone: what stands near the question's words, and where it comes again.

A token that looks back at another passage (a name spoken of again, "the mayor chose ...") holds in its stale KV only
what its own passage says, and the question may not attend to it at all. Both ends of a reference often share a word.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from fusionkv.fusion_worker.methods.choose import spread

# Tokens to either side of a word that belong to it, each step counting a little less.
_REACH, _FADE = 3, 0.95


def near_and_back(
    ids: Sequence[int], chunks: Sequence[int], question: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two scores of every context token, float32 [tokens] each.

    near: closeness to a token that the question holds too; rare ones count more.
    back: closeness to a token that stands, in another chunk, near one of the question's; rare ones count more.
    ids: of the context; chunks: the number of each token's chunk.
    """
    counts, asked = Counter(ids), set(question)
    chunk = torch.tensor(chunks)
    rarity = torch.tensor([1 / counts[i] for i in ids])
    named = torch.where(torch.tensor([i in asked for i in ids]), rarity, 0.0)
    near = spread(named, chunk, _REACH, _FADE)
    # Not the question's own words: where those stand is what `near` says.
    linked = torch.tensor(_elsewhere(ids, chunks, torch.where(named > 0, 0.0, near).tolist()))
    return near, spread(linked * rarity, chunk, _REACH, _FADE) * rarity


def _elsewhere(ids: Sequence[int], chunks: Sequence[int], scores: Sequence[float]) -> list[float]:
    """For each token the best score of the same token in another chunk."""
    # The best by id, its chunk, and the best of any other chunk.
    best: dict[int, tuple[float, int, float]] = {}
    for i, chunk, score in zip(ids, chunks, scores, strict=True):
        first, of, second = best.get(i, (0.0, -1, 0.0))
        if chunk == of or of < 0:
            best[i] = (max(first, score), chunk, second)
        elif score > first:
            best[i] = (score, chunk, first)
        else:
            best[i] = (first, of, max(second, score))
    return [best[i][2] if best[i][1] == chunk else best[i][0] for i, chunk in zip(ids, chunks, strict=True)]
