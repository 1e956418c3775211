"""Prompts that an evaluation has a correction learned from."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from fusionkv.fusion_worker.correct.correction import Correction
from fusionkv.fusion_worker.correct.corrector import Corrector
from fusionkv.fusion_worker.prompt import Chunk, Prompt


async def learned(corrector: Corrector, name: str, passages: Sequence[Chunk], like: Prompt) -> Correction | None:
    """The correction of a task's passages; None where they are too few.

    From prompts of as many random passages as `like` has, so none is a prompt that is asked about.
    """
    chunks = tuple({chunk.digest: chunk for chunk in passages}.values())
    digest = blake2b(b"".join(chunk.digest for chunk in chunks), digest_size=8).hexdigest()
    corpus = f"{name} {digest}"
    await corrector.study(replace(like, chunks=chunks), corpus, len(like.chunks))
    return await corrector.find(like.tenant, corpus)
