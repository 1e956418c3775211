"""The reference models' own tasks: stories of several pages, made when they are needed."""

from fusionkv.fusion_worker.evaluation.samples import Sample, Task
from fusionkv.models.tasks import SYSTEM, TASKS, held_out

# Stories whose pages are looked through for similar ones, as in a folder of documents.
_GROUP = 4


def reference(name: str, count: int) -> Task:
    """`count` held-out samples of a task of the reference models, in the form that they were trained on.

    Raises:
        ValueError: there is no such task.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; known: {', '.join(TASKS)}")
    samples = tuple(
        Sample(
            SYSTEM,
            tuple(page.text + "\n" for page in made.pages),
            f"Question: {made.questions[0].text}\nAnswer:",
            (" " + made.questions[0].answer,),
        )
        for made in held_out(name, count)
    )
    return Task(name, samples, group=_GROUP)
