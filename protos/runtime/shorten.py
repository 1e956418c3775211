"""Shortens text by whole sentences, ranked by TextRank of the library sumy."""

import re
from collections.abc import Sequence
from typing import Any

from fusionkv.protos.runtime.errors import FailedPrecondition
from fusionkv.protos.runtime.settings import extra

# After the end of a sentence or a line; separators belong to the sentence before them.
_BORDER = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])|\n\s*")
_WORD = re.compile(r"\w+")
# Sentences ranked together: time is quadratic in their number, and every part of a long text keeps its share.
_GROUP = 100


def shorten(text: str, left_out: float) -> str:
    """Omits a share of a text's characters, or slightly more: keeps the best whole sentences that fit, in order.

    At least one of every hundred sentences is kept. Raises FailedPrecondition if sumy is not installed.
    """
    with extra("compress", "shortening texts", FailedPrecondition):
        from sumy.models.dom import ObjectDocumentModel, Paragraph, Sentence
        from sumy.summarizers.text_rank import TextRankSummarizer
    pieces, kept = _sentences(text), list[str]()
    for start in range(0, len(pieces), _GROUP):
        part = pieces[start : start + _GROUP]
        choice = _Best([len(piece) for piece in part], left_out)
        sentences = [Sentence(piece, _Words()) for piece in part]
        TextRankSummarizer()(ObjectDocumentModel([Paragraph(sentences)]), choice)
        kept += [part[i] for i in sorted(choice.chosen)]
    return "".join(kept).rstrip() + text[len(text.rstrip()) :]


def _sentences(text: str) -> list[str]:
    """Splits a text into sentences that concatenate to it; none is blank unless the text is."""
    pieces, start, end = list[str](), 0, len(text.rstrip())
    for match in _BORDER.finditer(text):
        if match.end() < end and text[start : match.end()].strip():
            pieces.append(text[start : match.end()])
            start = match.end()
    return [*pieces, text[start:]] if text else []


class _Words:
    """The tokenizer interface that sumy needs. Its own tokenizer downloads data of nltk."""

    @staticmethod
    def to_words(text: str) -> tuple[str, ...]:
        return tuple(_WORD.findall(text))


class _Best:
    """Selects the best sentences that fit. sumy passes all of them, best first."""

    def __init__(self, lengths: Sequence[int], left_out: float) -> None:
        self._lengths = lengths
        self._room = (1 - left_out) * sum(lengths)
        self.chosen: list[int] = []

    def __call__(self, infos: Sequence[Any]) -> Sequence[Any]:
        for info in infos:
            if self._lengths[info.order] <= self._room or not self.chosen:
                self._room -= self._lengths[info.order]
                self.chosen.append(info.order)
        return infos
