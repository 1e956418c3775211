"""Text to token ids and chunks, exactly as the worker's model counts them."""

import hashlib
import re
from collections.abc import Sequence
from functools import cached_property

from semantic_text_splitter import MarkdownSplitter, TextSplitter
from tokenizers import Tokenizer

from fusionkv.gateway.ingest.parse import Section
from fusionkv.gateway.retrieval.base import ModelIdentity
from fusionkv.protos.fusion.v1 import fusion_pb2
from fusionkv.protos.runtime.errors import InvalidArgument

# Characters of a line that are split together: the splitter takes the square, 0.14 s of 4,000 of them ("e.g.e.g.").
_LONGEST_LINE = 4096
_LONG_LINE = re.compile(rf"[^\n]{{{_LONGEST_LINE + 1}}}")


class Vocabulary:
    """The tokenizer and prompt template of one model. Thread-safe; its methods block, so call them from a thread
    for anything larger than a question.
    """

    def __init__(self, model: fusion_pb2.GetModelResponse) -> None:
        self.model = model
        self.identity = ModelIdentity(
            model.fingerprint,
            hashlib.sha256(model.tokenizer_json + b"\0" + model.template.chunk.encode()).digest(),
        )
        self._tokenizer = Tokenizer.from_str(model.tokenizer_json.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # In what users write, "<eos>" is five characters; only the template may say it as a control token.
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token.content: id for id, token in added.items() if token.special}
        names = "|".join(map(re.escape, self._special))
        self._control = re.compile(f"({names})") if names else None

    @cached_property
    def system(self) -> list[int]:
        """Ids of the system prompt, with the beginning-of-sequence token if the model has one."""
        start = [self.model.bos_token] if self.model.HasField("bos_token") else []
        return start + self._encode(self.model.template.system, "")

    def question(self, text: str) -> list[int]:
        """Ids of the question within the template's words around it."""
        before, after = self.model.template.question.split("{question}")
        return self._encode(before, text, after)

    def chunks(self, sections: Sequence[Section], most_tokens: int, overlap: int) -> list[tuple[str, list[int]]]:
        """Splits sections into texts of at most about `most_tokens`, each with its ids as it stands in a prompt."""
        before, after = self.model.template.chunk.split("{text}")
        room = most_tokens - len(self._encode(before, "", after))
        if room <= overlap:
            raise InvalidArgument(
                f"chunk_tokens = {most_tokens} leaves no room beside the template and {overlap} tokens of overlap"
            )
        # One splitter for all sections: each takes a copy of the tokenizer.
        splitters = {
            markdown: kind.from_huggingface_tokenizer(self._tokenizer, room, overlap=overlap)
            for markdown, kind in ((False, TextSplitter), (True, MarkdownSplitter))
            if any(section.markdown is markdown for section in sections)
        }
        texts = [
            text
            for section in sections
            for part in _parts(section.text)
            for text in splitters[section.markdown].chunks(part)
        ]
        return [(text, self._encode(before, text, after)) for text in texts]

    def _encode(self, before: str, text: str, after: str = "") -> list[int]:
        """Ids of `before + text + after`, where control tokens count in `before` and `after` but not in `text`."""
        head = self._control.split(before) if self._control else [before]
        tail = self._control.split(after) if self._control else [after]
        parts = [*head[:-1], head[-1] + text + tail[0], *tail[1:]]
        # Splitting by one group alternates text and control tokens, on both sides of the part that holds `text`.
        ids: list[int] = []
        for number, part in enumerate(parts):
            if number % 2:
                ids.append(self._special[part])
            elif part:
                ids.extend(self._tokenizer.encode(part, add_special_tokens=False).ids)
        return ids


def _parts(text: str) -> list[str]:
    """The text, cut within lines that are too long to be split in one go, behind a sentence or a word if possible.

    Of ordinary documents hardly any has such a line.
    """
    parts, start = [], 0
    while found := _LONG_LINE.search(text, start):
        low, high = found.start() + _LONGEST_LINE // 2, found.start() + _LONGEST_LINE
        ends = (text.rfind(border, low, high) + len(border) for border in (". ", " "))
        end = next((end for end in ends if end > low), high)
        parts.append(text[start:end])
        start = end
    return [*parts, text[start:]]
