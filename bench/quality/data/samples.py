"""What is asked: samples of text, and the tasks that they belong to."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

# Of the figures of a sample: what was measured under another one is measured again.
_DEFINITION = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt and its expected answers.

    instruction: what stands before the context. passages: the context, one chunk each; a `whole` context is one text
    to be split. question: what stands after the context. opening: how the answer is begun for the model.
    """

    instruction: str
    passages: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    opening: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Library:
    """All samples of a file: their passages are what a chunk's neighbours are found among."""

    samples: tuple[Sample, ...]

    @cached_property
    def digest(self) -> str:
        """Names the passages."""
        return _digest([[sample.passages, sample.whole] for sample in self.samples])


@dataclass(frozen=True, slots=True)
class Task:
    """Samples that are scored together.

    metrics: names that metrics.text_score knows, of answers that are generated, at most `max_tokens` long. Without
    any the first expected answer is fed in and compared token by token.
    chat: whether the prompt goes into the model's chat template. first_line: only the answer's first line counts.
    library: where neighbours of a chunk are looked for; None: in the contexts of `group` samples together.
    classes: what answers choose from, where the metric is class_match.
    contexts: tasks of the same name here ask about the same contexts, sample by sample.
    graded: whether answers are held against the expected ones too, and not against full attention's alone.
    """

    name: str
    samples: tuple[Sample, ...]
    metrics: tuple[str, ...] = ()
    max_tokens: int = 0
    chat: bool = False
    first_line: bool = False
    group: int = 1
    classes: tuple[str, ...] = ()
    contexts: str = ""
    library: Library | None = None
    graded: bool = True

    def first(self, count: int) -> "Task":
        """The task with its first `count` samples alone."""
        return replace(self, samples=self.samples[:count])

    def shortened(self, shorten: Callable[[str], str]) -> "Task":
        """The task with every passage, or the context that is one text, made shorter."""

        def shorter(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
            return tuple(replace(s, passages=tuple(map(shorten, s.passages))) for s in samples)

        library = self.library and Library(shorter(self.library.samples))
        return replace(self, samples=shorter(self.samples), library=library)

    def blocks(self, size: int) -> Iterator["Block"]:
        """The samples, `size` at a time."""
        for start in range(0, len(self.samples), size):
            yield Block(self, start, min(start + size, len(self.samples)))


@dataclass(frozen=True, slots=True)
class Block:
    """Samples `[start, stop)` of a task: what is measured, kept and skipped together."""

    task: Task
    start: int
    stop: int

    @property
    def samples(self) -> tuple[Sample, ...]:
        return self.task.samples[self.start : self.stop]

    @property
    def digest(self) -> str:
        """Names the samples' text and how they are scored, whatever file they came from."""
        task = self.task
        how = [
            _DEFINITION,
            task.metrics,
            task.max_tokens,
            task.chat,
            task.first_line,
            task.group,
            *[task.classes] * bool(task.classes),
        ]
        return _digest([how, [astuple(sample) for sample in self.samples]])


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
