"""Prompts that an evaluation has a correction learned from."""

import random
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from fusionkv.fusion_worker.correct.correction import Correction
from fusionkv.fusion_worker.correct.corrector import Corrector
from fusionkv.fusion_worker.prompt import Chunk, Prompt

# At most: a corpus of short passages takes more than usual.
_LESSONS = 16


async def learned(corrector: Corrector, name: str, passages: Sequence[Chunk], like: Prompt) -> Correction | None:
    """The correction of a task's passages; None where they are too few.

    From prompts of as many random passages as `like` has, so none is a prompt that is asked about.
    """
    chunks = [*{chunk.digest: chunk for chunk in passages}.values()]
    digest = blake2b(b"".join(chunk.digest for chunk in chunks), digest_size=8).hexdigest()
    corpus, count = f"{name} {digest}", min(len(like.chunks), len(chunks))
    chance = random.Random(corpus)
    for _ in range(_LESSONS):
        drawn = tuple(chance.sample(chunks, count))
        await corrector.learn(replace(like, chunks=drawn, question=()), corpus)
    return await corrector.find(like.tenant, corpus)
