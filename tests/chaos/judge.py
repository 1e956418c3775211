"""What every recipe answers over given passages: said by a worker that has no cache and never fails."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.gateway.client.results import Passage
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.protos.deadline import Deadline
from tests.chaos.process import Wrong
from tests.system.prompts import asked

_SECONDS = 240.0
Recipe = tuple[str, float]


@dataclass
class Judge:
    """Knows the right answer to a question over the passages that were retrieved for it.

    Which passages those are is not fixed: a page that is stored again changes what a word weighs, until the
    index of words has been merged. So an answer is held to the passages that it was given from.
    """

    client: WorkerClient
    pages: Mapping[str, str]
    most_tokens: int
    _known: dict[tuple[str, Recipe, tuple[str, ...]], str] = field(default_factory=dict)
    _vocabulary: Vocabulary | None = None

    async def answer(self, question: str, recipe: Recipe, passages: Sequence[Passage]) -> str:
        """The right answer. Raises Wrong for a passage that is no page, or is given twice."""
        documents = tuple(passage.document for passage in passages)
        if len(set(documents)) < len(documents) or any(self.pages.get(p.document) != p.text for p in passages):
            raise Wrong(f"retrieved for {question!r}: {documents}, whose texts are not those that were stored")
        case = question, recipe, documents
        if case not in self._known:
            self._known[case] = await self._ask(question, recipe, [passage.text for passage in passages])
        return self._known[case]

    async def _ask(self, question: str, recipe: Recipe, texts: Sequence[str]) -> str:
        self._vocabulary = self._vocabulary or Vocabulary(await self.client.model(Deadline.after(_SECONDS)))
        name, ratio = recipe
        request = asked(self._vocabulary, texts, question, self.most_tokens, recipe=name, ratio=ratio)
        return "".join([event.token.text async for event in self.client.generate(request, Deadline.after(_SECONDS))])
