"""The reference models of a clone, and their tasks: generated stories of several pages."""

import random
from functools import lru_cache
from pathlib import Path

from fusionkv.fusion_worker.evaluate.data import stories
from fusionkv.fusion_worker.evaluate.data.samples import Sample, Task
from fusionkv.fusion_worker.evaluate.data.stories import SYSTEM, Question

# Stories among whose pages neighbours are found, as in a folder of documents.
_GROUP = 4
_SEED = 30_000_001  # different from all training seeds


def shipped() -> list[Path]:
    """Directories of the reference models; none outside of a clone."""
    return sorted(file.parent for file in (Path(__file__).parents[3] / "models").glob("*/model.safetensors"))


def reference(name: str, count: int) -> Task:
    """`count` held-out samples of a task of the reference models, in the format of their training.

    All tasks have the same contexts, so these are encoded once.
    """
    samples = tuple(
        Sample(
            SYSTEM,
            tuple(page.text + "\n" for page in made.pages),
            f"Question: {question.text}\nAnswer:",
            (" " + question.answer,),
        )
        for made, question in asked(name, count)
    )
    return Task(name, samples, group=_GROUP, contexts="reference")


def asked(name: str, count: int) -> list[tuple[stories.Sample, Question]]:
    """The stories, each with its question."""
    rng = random.Random(f"{_SEED} {name}")
    return [(made, rng.choice([q for q in made.questions if q.task == name])) for made in _stories(count)]


@lru_cache(maxsize=1)
def _stories(count: int) -> list[stories.Sample]:
    rng = random.Random(_SEED)
    return [stories.sample(rng) for _ in range(count)]
