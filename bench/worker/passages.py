"""Passages and questions as a model's tokens, for benchmarks: real or random."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.evaluate.data import datasets
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Chunk, Prompt
from fusionkv.fusion_worker.servicer import FusionServicer
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb

_WORLD = Path(__file__).parent.parent.parent / "examples/world"
_SYSTEM, _QUESTION, _RANDOM_IDS = 32, 32, 1000
# Chunks that the primer is made of.
_SAMPLE = 8


@dataclass(frozen=True, slots=True)
class Passages:
    """A knowledge base: the chunks of its passages, and questions about them."""

    system: Chunk
    chunks: tuple[Chunk, ...]
    questions: tuple[tuple[int, ...], ...]

    @classmethod
    async def of(cls, model: Model, files: Sequence[Path], count: int) -> "Passages":
        """The first `count` passages of files that `fusionkv eval` reads, or of the demo's documents.

        Raises:
            ValueError: there are fewer than `count` passages.
        """
        servicer = FusionServicer(WorkerConfig(pool_bytes=1 << 20), model)
        try:
            vocabulary = Vocabulary(await servicer.GetModel(pb.GetModelRequest(), None))
        finally:
            await servicer.close()
        texts, asked = dict[str, None](), list[tuple[int, ...]]()
        for question, passages in questions(files):
            texts |= dict.fromkeys(passages)
            asked.append(tuple(vocabulary.question(question)))
        if len(texts) < count:
            raise ValueError(f"there are {len(texts)} passages, fewer than {count}")
        chunks = tuple(Chunk(tuple(vocabulary.chunk(text))) for text in list(texts)[:count])
        return cls(Chunk(tuple(vocabulary.system())), chunks, tuple(asked))

    @classmethod
    def random(cls, count: int, tokens: int) -> "Passages":
        """`count` random chunks of `tokens` tokens each."""

        def text(seed: int, length: int) -> tuple[int, ...]:
            chance = random.Random(seed)
            return tuple(chance.randrange(_RANDOM_IDS) for _ in range(length))

        chunks = tuple(Chunk(text(number, tokens)) for number in range(count))
        return cls(Chunk(text(-1, _SYSTEM)), chunks, tuple(text(-number, _QUESTION) for number in range(2, 34)))

    @property
    def tokens(self) -> int:
        """Tokens of all chunks together."""
        return sum(len(chunk.ids) for chunk in self.chunks)

    def prompt(self, numbers: Sequence[int], question: int) -> Prompt:
        """A prompt with these chunks, in this order, and a question."""
        asked = self.questions[question % len(self.questions)]
        return Prompt(self.system, tuple(self.chunks[n] for n in numbers), asked)

    async def store(self, servicer: FusionServicer) -> None:
        """Encodes and stores every chunk twice: alone, and after a primer of the first ones."""
        for chunk in self.chunks:
            await self._encode(servicer, chunk, pb.EncodeRequest.MODE_PRIMED, self.chunks[:_SAMPLE])

    async def encode(self, servicer: FusionServicer, chunk: Chunk) -> None:
        """Encodes and stores one chunk alone."""
        await self._encode(servicer, chunk, pb.EncodeRequest.MODE_EXACT)

    async def _encode(
        self, servicer: FusionServicer, chunk: Chunk, mode: pb.EncodeRequest.Mode, before: Sequence[Chunk] = ()
    ) -> None:
        system, *earlier, own = (pb.Tokens(ids=part.ids) for part in (self.system, *before, chunk))
        await servicer.Encode(pb.EncodeRequest(system=system, before=earlier, chunk=own, mode=mode), None)


def questions(files: Sequence[Path], passages: int = 8) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields questions with their passages, from files that `fusionkv eval` reads, or from the demo."""
    for file in files:
        for task in datasets.load(file):
            for sample in task.samples:
                yield sample.question, [text.strip() for text in sample.passages]
    if not files:
        documents = [file.read_text(encoding="utf-8").strip() for file in sorted(_WORLD.glob("*/*.md"))]
        random.Random(1).shuffle(documents)
        asked = json.loads((_WORLD / "questions.json").read_text(encoding="utf-8"))
        for number, question in enumerate(asked):
            yield question["question"], documents[number * passages : (number + 1) * passages]
