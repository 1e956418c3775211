"""Explains a prompt token by token: whether its KV was reused or recomputed, and its score."""

from collections.abc import Iterator, Mapping

import torch
from tokenizers import Tokenizer

from fusionkv.fusion_worker.compute.plan import PrefillPlan
from fusionkv.fusion_worker.decode.text import Characters
from fusionkv.fusion_worker.prompt import Prompt
from fusionkv.protos.answer.v1.answer_pb2 import ExplainedChunk, Explanation


def explain(
    prompt: Prompt, plan: PrefillPlan, origins: Mapping[bytes, tuple[str, str]], tokenizer: Tokenizer
) -> Explanation:
    """origins: kind and tier of every chunk, by its key."""
    sources = [part.source for part in plan.layout.parts if not part.source.is_system]
    lossless = [source.lossless for source in sources] or [False] * len(prompt.chunks)
    kinds = [origins[source.key] for source in sources] or [("", "")] * len(prompt.chunks)
    chunks = zip(prompt.chunks, chosen(prompt, plan), kinds, lossless, strict=True)
    # The system prompt comes first, so its reused KV is lossless.
    reused = bool(plan.layout.parts)
    explained = [
        ExplainedChunk(
            texts=texts(tokenizer, chunk.ids), kind=kind, tier=tier, lossless=exact, recomputed=marks, scores=scores
        )
        for chunk, (marks, scores), (kind, tier), exact in chunks
    ]
    return Explanation(
        chunks=explained,
        system=_around(texts(tokenizer, prompt.system.ids), reused),
        question=_around(texts(tokenizer, prompt.question), False),
    )


def _around(texts: list[str], lossless: bool) -> ExplainedChunk:
    """A system prompt or question: either reused without loss, or computed."""
    return ExplainedChunk(texts=texts, lossless=lossless, recomputed=[] if lossless else range(len(texts)))


def chosen(prompt: Prompt, plan: PrefillPlan) -> Iterator[tuple[list[int], list[float]]]:
    """Yields for each chunk the indices of its recomputed tokens, and the scores of its tokens as ranks from 0 to 1.

    Scores are empty if there was no choice.
    """
    recomputed = torch.zeros(prompt.question_start, dtype=torch.bool)
    recomputed[plan.chosen] = True
    ranks = torch.zeros(prompt.question_start)
    if plan.scores is not None and (stale := plan.stale).any():
        order = plan.scores[stale].argsort().argsort().float()
        ranks[stale] = order / max(1, len(order) - 1)
    for start, chunk in zip(prompt.starts[1:], prompt.chunks, strict=True):
        inside = slice(start, start + len(chunk))
        scores = [round(s, 2) for s in ranks[inside].tolist()] if plan.scores is not None else []
        yield recomputed[inside].nonzero()[:, 0].tolist(), scores


def texts(tokenizer: Tokenizer, ids: tuple[int, ...]) -> list[str]:
    characters = Characters(tokenizer, skip_special_tokens=False)
    return [characters.step(i) or "" for i in ids]
