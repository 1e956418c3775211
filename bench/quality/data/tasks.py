"""The reference models' own tasks: stories of several pages, made when they are needed."""

import random
from functools import lru_cache

from fusionkv.bench.quality.data.samples import Sample, Task
from fusionkv.models import tasks as stories
from fusionkv.models.tasks import PROMPT, SYSTEM, TASKS, Question

# Stories whose pages are looked through for similar ones, as in a folder of documents.
_GROUP = 4
_SEED = 30_000_001  # far from the seeds of training


def reference(name: str, count: int) -> Task:
    """`count` held-out samples of a task of the reference models, in the form that they were trained on.

    All tasks ask about the same contexts, so that one encoding serves them all.

    Raises:
        ValueError: there is no such task.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; known: {', '.join(TASKS)}")
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
    """The stories, and of each the question that is asked."""
    rng = random.Random(f"{_SEED} {name}")
    return [(made, rng.choice([q for q in made.questions if q.task == name])) for made in _stories(count)]


@lru_cache(maxsize=1)
def _stories(count: int) -> list[stories.Sample]:
    rng = random.Random(_SEED)
    return [stories.sample(rng, "heldout", PROMPT) for _ in range(count)]
