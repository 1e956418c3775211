"""From a sample's text to the token ids of a prompt: instruction, chunks, question, all within the model's length."""

import re

from tokenizers import Tokenizer

from fusionkv.bench.quality.data.samples import Sample
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Chunk, Prompt

SENTENCE_ENDS = ".!?\u3002\uff01\uff1f"
# Where a text is cut, best first: behind a line, behind a sentence, at a space.
_BORDERS = (re.compile(r"\n\s*$"), re.compile(rf"[{SENTENCE_ENDS}]\s*$"), re.compile(r"\s$"))


class Prompter:
    """Makes prompts for one model.

    chunk_tokens: longest chunk of a context that is one text.
    """

    def __init__(self, model: Model, chunk_tokens: int) -> None:
        self._model = model
        self._chunk_tokens = chunk_tokens
        # Whatever the recipe, so that all see the same prompt.
        self._room = model.max_tokens - sum(map(len, model.links))
        self._control = model.tokenizer
        self._plain = Tokenizer.from_str(model.tokenizer_json.decode())
        self._plain.no_truncation()
        self._plain.no_padding()
        # In a data set's text "<eos>" is five characters; only the chat template may say it as a control token.
        self._plain.encode_special_tokens = True

    def prompt(self, sample: Sample, chat: bool, answer_tokens: int) -> tuple[Prompt, int]:
        """The prompt, and how many chunks were left out of its middle so that it fits with its answer.

        Raises:
            ValueError: not even one chunk fits.
        """
        head, tail = (self._model.template.head, self._model.template.tail) if chat else ("", "")
        bos = [] if self._model.bos is None else [self._model.bos]
        system = (*bos, *self._said(head), *self.ids(sample.instruction))
        question = (*self.ids(sample.question), *self._said(tail), *self.ids(sample.opening))
        chunks = self.chunks(sample)
        room = self._room - len(system) - len(question) - answer_tokens
        count = len(chunks)
        while sum(map(len, chunks)) > room:
            # LongBench and CacheBlend cut the middle as well: a question's neighbourhood and the start matter most.
            del chunks[len(chunks) // 2]
        if not chunks:
            raise ValueError(
                f"a prompt of {len(system) + len(question)} tokens beside its context leaves no room in "
                f"{self._room} for a chunk and {answer_tokens} answer tokens"
            )
        return Prompt(Chunk(system), tuple(Chunk(ids) for ids in chunks), question), count - len(chunks)

    def chunks(self, sample: Sample) -> list[tuple[int, ...]]:
        """The tokens of all chunks of a sample's context."""
        return [ids for text in sample.passages for ids in (self.split(text) if sample.whole else [self.ids(text)])]

    def expected(self, sample: Sample, chat: bool) -> tuple[int, ...]:
        """The tokens of the first expected answer, with a space before it where it goes on with a line of text."""
        before, answer = sample.opening or sample.question, sample.answers[0]
        begins_turn = chat and self._model.template.tail and not sample.opening
        spaced = begins_turn or before[-1:].isspace() or answer[:1].isspace()
        return self.ids(answer if spaced else f" {answer}")

    def ids(self, text: str) -> tuple[int, ...]:
        """A text's tokens, none of them a control token."""
        return tuple(self._plain.encode(text, add_special_tokens=False).ids)

    def split(self, text: str) -> list[tuple[int, ...]]:
        """A text's tokens in chunks of at most `chunk_tokens`.

        A chunk ends where a line or a sentence does, or at least a word, if one does in its last quarter.
        """
        encoding = self._plain.encode(text, add_special_tokens=False)
        ids, starts = encoding.ids, [start for start, _ in encoding.offsets]
        chunks, at = [], 0
        while len(ids) - at > self._chunk_tokens:
            stop = _border(text, starts, at + 3 * self._chunk_tokens // 4 + 1, at + self._chunk_tokens)
            chunks.append(tuple(ids[at:stop]))
            at = stop
        return [*chunks, tuple(ids[at:])] if at < len(ids) else chunks

    def _said(self, text: str) -> list[int]:
        """The tokens of a piece of the chat template, control tokens among them."""
        return self._control.encode(text, add_special_tokens=False).ids if text else []


def _border(text: str, starts: list[int], first: int, last: int) -> int:
    """The last token in `[first, last]` that stands behind the best kind of border."""
    for border in _BORDERS:
        for at in range(last, first - 1, -1):
            # Byte-level tokens may begin with the space before their word, and may start within a character.
            before = text[max(0, starts[at] - 8) : starts[at] + text[starts[at] : starts[at] + 1].isspace()]
            if starts[at] > starts[at - 1] and border.search(before):
                return at
    return last
