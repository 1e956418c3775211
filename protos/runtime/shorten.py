"""Text shortened before it is stored or asked about: sentences are left out, by TextRank of the library sumy."""

import re
from collections.abc import Sequence
from typing import Any

from fusionkv.protos.runtime.errors import FailedPrecondition

# Behind the end of a sentence, or of a line; what stands between two sentences goes with the first one.
_BORDER = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])|\n\s*")
_WORD = re.compile(r"\w+")
# Ranked together: the time goes with their square, and every part of a long text keeps its share.
_TOGETHER = 100


def shorten(text: str, left_out: float) -> str:
    """The text without this share of its characters, or a little more: the best whole sentences that fit, in order.

    One sentence of every hundred stays in any case. left_out: from 0 to less than 1.

    Raises:
        FailedPrecondition: sumy is not installed.
    """
    try:
        from sumy.models.dom import ObjectDocumentModel, Paragraph, Sentence
        from sumy.summarizers.text_rank import TextRankSummarizer
    except ImportError as error:
        raise FailedPrecondition("shortening texts needs sumy: pip install 'fusionkv[compress]'") from error
    pieces, kept = _sentences(text), list[str]()
    for start in range(0, len(pieces), _TOGETHER):
        part = pieces[start : start + _TOGETHER]
        choice = _Best([len(piece) for piece in part], left_out)
        sentences = [Sentence(piece, _Words()) for piece in part]
        TextRankSummarizer()(ObjectDocumentModel([Paragraph(sentences)]), choice)
        kept += [part[i] for i in sorted(choice.chosen)]
    return "".join(kept).rstrip() + text[len(text.rstrip()) :]


def _sentences(text: str) -> list[str]:
    """The text in pieces that make it up again, none of them blank unless the text is."""
    pieces, start = list[str](), 0
    for match in _BORDER.finditer(text):
        if text[start : match.end()].strip() and text[match.end() :].strip():
            pieces.append(text[start : match.end()])
            start = match.end()
    return [*pieces, text[start:]] if text else []


class _Words:
    """What sumy asks of a tokenizer. Its own needs a file of nltk's from the network."""

    @staticmethod
    def to_words(text: str) -> tuple[str, ...]:
        return tuple(_WORD.findall(text))


class _Best:
    """Takes the best sentences as long as they fit. sumy hands over all of them, best first."""

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
