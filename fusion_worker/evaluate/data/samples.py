"""Samples of text with expected answers, and the tasks that they belong to."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

# Version of the definition of a sample's figures; results of another version are measured again.
_DEFINITION = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and its expected answers.

    Attributes:
        instruction: text before the context.
        passages: the context, one chunk each.
        question: text after the context.
        opening: start of the answer, given to the model.
        whole: whether passages are texts to split into chunks.
    """

    instruction: str
    passages: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    opening: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Library:
    """All samples of a file, among whose passages a chunk's neighbours are found."""

    samples: tuple[Sample, ...]

    @cached_property
    def digest(self) -> str:
        """Identifies the passages."""
        return _digest([[sample.passages, sample.whole] for sample in self.samples])


@dataclass(frozen=True, slots=True)
class Task:
    """Samples that are scored together.

    Attributes:
        metrics: of metrics.SCORES for generated answers. Without metrics, the first expected answer is fed in and
            compared token by token.
        max_tokens: maximum tokens of a generated answer.
        chat: whether prompts use the model's chat template.
        first_line: whether only the answer's first line counts.
        group: number of samples among whose contexts neighbours are found without a library.
        contexts: tasks with the same name here have the same contexts, sample by sample.
        library: passages among which neighbours are found.
        graded: whether answers are compared with the expected ones, besides full attention's.
        compared: those against full attention's own answer.
        right: one of `metrics`, which is 1 for right answers and 0 for wrong ones; empty if these are not counted.
    """

    name: str
    samples: tuple[Sample, ...]
    metrics: tuple[str, ...] = ()
    max_tokens: int = 0
    chat: bool = False
    first_line: bool = False
    group: int = 1
    contexts: str = ""
    library: Library | None = None
    graded: bool = True
    compared: tuple[str, ...] = ()
    right: str = ""

    def first(self, count: int) -> "Task":
        """The task with only its first `count` samples."""
        return replace(self, samples=self.samples[:count])

    def blocks(self, size: int) -> Iterator["Block"]:
        """Yields the samples in blocks of `size`."""
        for start in range(0, len(self.samples), size):
            yield Block(self, start, min(start + size, len(self.samples)))


@dataclass(frozen=True, slots=True)
class Block:
    """Samples `[start, stop)` of a task, which are measured, stored and skipped together."""

    task: Task
    start: int
    stop: int

    @property
    def samples(self) -> tuple[Sample, ...]:
        return self.task.samples[self.start : self.stop]

    @property
    def digest(self) -> str:
        """Identifies the samples' text and scoring, independent of their file."""
        task = self.task
        how: list[Any] = [_DEFINITION, task.metrics, task.max_tokens, task.chat, task.first_line, task.group]
        how += [task.compared] if task.compared else []
        return _digest([how, [astuple(sample) for sample in self.samples]])


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
