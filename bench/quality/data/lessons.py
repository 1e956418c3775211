"""Learns the correction of an evaluation's passages."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from fusionkv.fusion_worker.correct.correction import Correction
from fusionkv.fusion_worker.correct.corrector import Corrector
from fusionkv.fusion_worker.prompt import Chunk, Prompt


async def learned(corrector: Corrector, name: str, passages: Sequence[Chunk], like: Prompt) -> Correction | None:
    """Learns the correction of a task's passages; None if they are too few.

    It is learned from prompts of random passages, as many as `like` has, and not from the evaluated prompts.
    """
    chunks = tuple({chunk.digest: chunk for chunk in passages}.values())
    digest = blake2b(b"".join(chunk.digest for chunk in chunks), digest_size=8).hexdigest()
    corpus = f"{name} {digest}"
    await corrector.study(replace(like, chunks=chunks), corpus, len(like.chunks))
    return await corrector.find(like.tenant, corpus)
