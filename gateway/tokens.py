"""Turns text into token ids and chunks, with the tokenizer of the worker's model."""

import copy
import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from semantic_text_splitter import MarkdownSplitter, TextSplitter

from fusionkv.fusion_worker.decode.plain import PlainTokenizers
from fusionkv.fusion_worker.decode.text import TextStream
from fusionkv.gateway.ingest.document import Document
from fusionkv.protos.fusion.v1 import fusion_pb2
from fusionkv.protos.runtime.errors import InvalidArgument

# Longest line, in characters, that is split at once: splitting is quadratic, 0.14 s for 4,000 of them ("e.g.e.g.").
_LONGEST_LINE = 4096
# Longest text, in characters, that is split at once: 400 KB of nested Markdown lists take 45 s whole, 3 s in parts.
_LONGEST_TEXT = 64 * 1024
# The length of a title in tokens is rounded up to a multiple of this number.
_TITLE_STEP = 16
# Maximum characters per token of a text that may be a single chunk.
_MAX_CHARACTERS_PER_TOKEN = 16
_LONG_LINE = re.compile(rf"[^\n]{{{_LONGEST_LINE + 1}}}")


@dataclass(frozen=True)
class ModelIdentity:
    """The models that a corpus was built with."""

    fingerprint: bytes  # of the weights, which variants depend on
    tokenizer: bytes  # digest of the tokenizer and the chunk template, which token ids depend on
    embedder: str = ""  # empty: no vectors
    name: str = field(default="", compare=False)  # display name of the model


# Lines of lists deeper than 32 levels. Splitting a list of k levels as Markdown takes k³ steps, 0.4 s for 126.
_DEEP = re.compile(r"^[ \t]{64}", re.M)


class Vocabulary:
    """The tokenizer and prompt template of one model.

    Thread-safe. Its methods block: call them in a thread for anything longer than a question.
    """

    def __init__(self, model: fusion_pb2.GetModelResponse) -> None:
        self.model = model
        self.identity = ModelIdentity(
            model.fingerprint,
            hashlib.sha256(model.tokenizer_json + b"\0" + model.template.chunk.encode()).digest(),
            name=model.name,
        )
        self.template = model.template
        self.rendered: OrderedDict[str, Vocabulary] = OrderedDict()
        """This vocabulary with templates that requests asked for, by their values; least recently used first."""
        self._splitters: dict[tuple[bool, int, int], TextSplitter | MarkdownSplitter] = {}
        self._plain = PlainTokenizers.of(model.tokenizer_json.decode())
        self._tokenizer = self._plain.within
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token.content: (id, token) for id, token in added.items() if token.special}
        names = "|".join(map(re.escape, self._special))
        self._control = re.compile(f"({names})") if names else None

    @property
    def plain_layout(self) -> str:
        """The user message of a prompt without passages: the question, labelled where there is no chat template."""
        return "{passages}{question}" if self.template.tail else "{passages}Question: {question}\nAnswer:"

    def with_template(self, template: fusion_pb2.PromptTemplate) -> "Vocabulary":
        """This vocabulary with another prompt template; both share the tokenizer."""
        other = copy.copy(self)
        other.template = template
        return other

    def text(self, stop: Sequence[str]) -> TextStream:
        """A decoder that turns the ids of an answer into text as they arrive."""
        return TextStream(self._tokenizer, stop)

    def system(self, system: str = "", layout: str = "") -> list[int]:
        """Ids of the system prompt, which begins a prompt.

        Args:
            system: the request's system prompt; empty uses the template's.
            layout: the request's user message with {passages} and {question}, whose beginning counts to the system
                prompt; empty uses the template's.
        """
        return self._encode(*_system(self.template, system, layout), begins=True)

    def question(self, *turns: str, layout: str = "") -> list[int]:
        """Ids of a question within the template.

        Args:
            turns: one question, or the texts of the user and the assistant in turn; the first and the last are the
                user's.
            layout: as for `system`.
        """
        return self._encode(*self._question(turns, layout))

    def alone(self, system: str, turns: Sequence[str], layout: str) -> tuple[list[int], list[int]]:
        """Ids of a prompt without passages, encoded as one text: of its system prompt, and of the rest.

        A token across the border of the two, such as a word with the space before it, is part of the rest.
        """
        first, rest = _system(self.template, system, layout), self._question(turns, layout)
        ids = self._encode(*first, *[""] * (len(first) % 2), *rest, begins=True)
        alone = self._encode(*first, begins=True)
        border = next((at for at, (a, b) in enumerate(zip(alone, ids, strict=False)) if a != b), len(alone))
        return ids[:border], ids[border:]

    def _question(self, turns: Sequence[str], layout: str) -> tuple[str, ...]:
        """Pieces of the question, for `_encode`."""
        before, after = self.template.question.split("{question}")
        if layout:
            _, _, rest = layout.partition("{passages}")
            first, _, last = rest.lstrip().partition("{question}")
            *earlier, question = turns
            turns = (*earlier, f"{question}{last}")
            turns = (f"{first}{turns[0]}", *turns[1:])
            before, after = "", self.template.tail
        answer, _, next_ = self.template.turn.partition("{answer}")
        separators = (next_, answer)  # the text before a turn of the user, and before one of the assistant
        pieces = [piece for number, turn in enumerate(turns) for piece in (separators[number % 2], turn)]
        return (before, *pieces[1:], after)

    def chunk(self, text: str) -> list[int]:
        """Ids of a text as a chunk of a prompt, the same as `chunks` returns for this text."""
        before, after = self.template.chunk.split("{text}")
        return self._encode(before, text, after)

    def chunks(self, document: Document, max_tokens: int, overlap: int) -> list[tuple[str, list[int]]]:
        """Splits a document into chunks of about `max_tokens`, each headed by a line with the document's title.

        Args:
            overlap: number of tokens that a chunk repeats from the previous one.

        Returns:
            Text and token ids of each chunk, the ids as in a prompt.

        Raises:
            InvalidArgument: template, title and overlap leave no room for text.
        """
        head = f"{document.title}\n" if document.title else ""
        before, after = self.template.chunk.split("{text}")
        # Rounded up, so that titles of different lengths share few splitters.
        title = -(-len(self._encode("", head)) // _TITLE_STEP) * _TITLE_STEP
        room = max_tokens - len(self._encode(before, "", after)) - title
        if room <= overlap:
            beside = f"the template, a title of {title} tokens" if head else "the template"
            raise InvalidArgument(
                f"chunk_tokens = {max_tokens} leaves no room for text beside {beside} and {overlap} tokens of overlap"
            )
        chunks: list[tuple[str, list[int]]] = []
        for part in _parts(document.text):
            whole = head + part.strip()
            # Most passages fit into one chunk, which needs no splitter.
            if len(part) <= _MAX_CHARACTERS_PER_TOKEN * max_tokens and len(ids := self.chunk(whole)) <= max_tokens:
                chunks += [(whole, ids)] if part.strip() else []
                continue
            splitter = self._splitter(document.markdown and not _DEEP.search(part), room, overlap)
            chunks += [(head + text, self.chunk(head + text)) for text in splitter.chunks(part)]
        return chunks

    def _splitter(self, markdown: bool, room: int, overlap: int) -> TextSplitter | MarkdownSplitter:
        """A splitter, shared by all documents because each holds a copy of the tokenizer."""
        key = markdown, room, overlap
        if key not in self._splitters:
            kind = MarkdownSplitter if markdown else TextSplitter
            self._splitters[key] = kind.from_huggingface_tokenizer(self._tokenizer, room, overlap=overlap)
        return self._splitters[key]

    def _encode(self, *pieces: str, begins: bool = False) -> list[int]:
        """Ids of all pieces together, the template's and users' in turn. Only the template's hold control tokens.

        begins: whether they begin a prompt.
        """
        # Text and control tokens in turn, as re.split with one group returns them.
        parts = [""]
        for number, piece in enumerate(pieces):
            first, *rest = self._control.split(piece) if self._control and number % 2 == 0 else [piece]
            parts[-1] += first
            parts += rest
        for number, part in enumerate(parts[1::2]):
            _, token = self._special[part]
            # Those of Phi take the white space beside them.
            if token.lstrip:
                parts[2 * number] = parts[2 * number].rstrip()
            if token.rstrip:
                parts[2 * number + 2] = parts[2 * number + 2].lstrip()
        ids: list[int] = []
        for number, part in enumerate(parts):
            if number % 2:
                ids.append(self._special[part][0])
                # Without a chat template it is not in the text that the tokenizer splits.
                begins = begins and not self.template.tail
            elif part:
                # encode_batch_fast computes no offsets: 8 chunks of 250 tokens take 2.4 ms instead of 3.6 (SmolLM2).
                alone = self._plain.after_control if number else self._tokenizer
                tokenizer = self._plain.beginning if begins else alone
                begins = False
                ids.extend(tokenizer.encode_batch_fast([part], add_special_tokens=False)[0].ids)
        return ids


def _system(template: fusion_pb2.PromptTemplate, system: str, layout: str) -> tuple[str, ...]:
    """Pieces of the system prompt, for `Vocabulary._encode`."""
    before, _, after = (template.around_system if layout else template.own_system).partition("{system}")
    pieces = (before, system, after) if system else (template.head if layout else template.system,)
    return (*pieces, layout.partition("{passages}")[0]) if layout else pieces


def _parts(text: str) -> Iterator[str]:
    """Cuts a long text where it can, after a paragraph or a line, and a long line after a sentence or a word.

    Hardly any ordinary document is that long or has such a line.
    """
    start = 0
    while True:
        if line := _LONG_LINE.search(text, start, start + _LONGEST_TEXT):
            low, high = line.start() + _LONGEST_LINE // 2, line.start() + _LONGEST_LINE
            end = _border(text, low, high, (". ", "。", "।", " "))
        elif len(text) - start > _LONGEST_TEXT:
            end = _border(text, start + _LONGEST_TEXT // 2, start + _LONGEST_TEXT, ("\n\n", "\n", " "))
        else:
            yield text[start:]
            return
        yield text[start:end]
        start = end


def _border(text: str, low: int, high: int, borders: Sequence[str]) -> int:
    """The end of the last of the first border that occurs between two positions; without any, the second position."""
    ends = (text.rfind(border, low, high) + len(border) for border in borders)
    return next((end for end in ends if end > low), high)
