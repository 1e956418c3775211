"""Tokenises samples to prompts: instruction, chunks and question, within the model's length."""

import re

from fusionkv.fusion_worker.decode.plain import PlainTokenizers
from fusionkv.fusion_worker.evaluate.data.samples import Sample
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Chunk, Prompt

SENTENCE_ENDS = ".!?\u3002\uff01\uff1f"
# Where a text is split, best first: after a line, after a sentence, at a space.
_BORDERS = (re.compile(r"\n\s*$"), re.compile(rf"[{SENTENCE_ENDS}]\s*$"), re.compile(r"\s$"))


class Prompter:
    """Makes prompts for one model."""

    def __init__(self, model: Model, chunk_tokens: int) -> None:
        """chunk_tokens: maximum tokens of a chunk when a context is split."""
        self._model = model
        self._chunk_tokens = chunk_tokens
        # Leaves room for link tokens with all recipes, so that all have the same prompt.
        self._room = model.max_tokens - sum(map(len, model.links))
        self._control = model.tokenizer
        # In a data set's text, "<eos>" is plain text; only the chat template may contain control tokens.
        self._plain = PlainTokenizers.of(model.tokenizer_json.decode())

    def prompt(self, sample: Sample, chat: bool, answer_tokens: int) -> tuple[Prompt, int]:
        """The prompt, and the number of chunks dropped from its middle so that it fits with its answer.

        Raises ValueError if no chunk fits.
        """
        template = self._model.template
        head, tail = (template.head, template.tail) if chat else (self._model.begin, "")
        first = self._plain.within if chat and template.tail else self._plain.beginning
        system = (*self._said(head), *first.encode(sample.instruction, add_special_tokens=False).ids)
        question = (*self.ids(sample.question), *self._said(tail), *self.ids(sample.opening))
        chunks = self.chunks(sample)
        room = self._room - len(system) - len(question) - answer_tokens
        count = len(chunks)
        while chunks and sum(map(len, chunks)) > room:
            # LongBench and CacheBlend drop the middle as well: the start and the end of the context matter most.
            del chunks[len(chunks) // 2]
        if not chunks:
            raise ValueError(
                f"a prompt of {len(system) + len(question)} tokens beside its context leaves no room in "
                f"{self._room} for a chunk and {answer_tokens} answer tokens"
            )
        return Prompt(Chunk(system), tuple(Chunk(ids) for ids in chunks), question), count - len(chunks)

    def chunks(self, sample: Sample) -> list[tuple[int, ...]]:
        """Tokens of all chunks of a sample's context."""
        return [ids for text in sample.passages for ids in (self.split(text) if sample.whole else [self.ids(text)])]

    def expected(self, sample: Sample, chat: bool) -> tuple[int, ...]:
        """Tokens of the first expected answer, with a space before it if it continues a line."""
        before, answer = sample.opening or sample.question, sample.answers[0]
        begins_turn = chat and self._model.template.tail and not sample.opening
        spaced = begins_turn or before[-1:].isspace() or answer[:1].isspace()
        return self.ids(answer if spaced else f" {answer}")

    def ids(self, text: str) -> tuple[int, ...]:
        """Tokens of a text within a prompt, without control tokens."""
        return tuple(self._plain.within.encode(text, add_special_tokens=False).ids)

    def split(self, text: str) -> list[tuple[int, ...]]:
        """Splits a text into chunks of at most `chunk_tokens` tokens.

        A chunk ends with a line, a sentence or a word, in this order of preference, if one ends in its last quarter.
        """
        encoding = self._plain.within.encode(text, add_special_tokens=False)
        ids, starts = encoding.ids, [start for start, _ in encoding.offsets]
        chunks, at = [], 0
        while len(ids) - at > self._chunk_tokens:
            stop = _border(text, starts, at + 3 * self._chunk_tokens // 4 + 1, at + self._chunk_tokens)
            chunks.append(tuple(ids[at:stop]))
            at = stop
        return [*chunks, tuple(ids[at:])] if at < len(ids) else chunks

    def _said(self, text: str) -> list[int]:
        """Tokens of a part of the chat template, which may be control tokens."""
        return self._control.encode(text, add_special_tokens=False).ids if text else []


def _border(text: str, starts: list[int], first: int, last: int) -> int:
    """The last token in `[first, last]` after the best kind of border."""
    for border in _BORDERS:
        for at in range(last, first - 1, -1):
            # Byte-level tokens may include the space before their word, and may start within a character.
            before = text[max(0, starts[at] - 8) : starts[at] + text[starts[at] : starts[at] + 1].isspace()]
            if starts[at] > starts[at - 1] and border.search(before):
                return at
    return last
