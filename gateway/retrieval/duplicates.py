"""Copies and near-copies among the texts of retrieved chunks: each would take the place of another text."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from fusionkv.gateway.ingest.text import WORD

# Share of common trigrams of words from which texts are near-copies. In 5,820 passages of four data sets, all 22
# pairs above it are versions of one passage; texts about different subjects reach 0.82.
_NEAR = 0.9
# Words of a text that are compared: more than a chunk has by default.
_WORDS = 1000


def distinct(texts: Iterable[str], question: str, count: int) -> list[int]:
    """The places of the first `count` different texts.

    Texts are the same if they differ in white space and case only, or in few words, none of which is in the question.
    """
    question_words = set(WORD.findall(question.casefold()))
    places: list[int] = []
    words: list[list[str]] = []  # of each of these texts
    trigrams: list[set[tuple[str, str, str]]] = []
    places_with: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)  # indices of `places`, by trigram
    known_texts: set[str] = set()
    for place, text in enumerate(texts):
        if len(places) == count:
            break
        text = " ".join(text.casefold().split())
        if text in known_texts:
            continue
        known_texts.add(text)
        text_words = WORD.findall(text)[:_WORDS]
        text_trigrams = set(zip(text_words, text_words[1:], text_words[2:], strict=False))
        common = Counter(number for trigram in text_trigrams for number in places_with[trigram])
        if any(
            shared >= _NEAR * len(text_trigrams | trigrams[number])
            and _alike(text_words, words[number], question_words)
            for number, shared in common.items()
        ):
            continue
        for trigram in text_trigrams:
            places_with[trigram].append(len(places))
        places.append(place)
        words.append(text_words)
        trigrams.append(text_trigrams)
    return places


def _alike(words: Sequence[str], others: Sequence[str], question_words: set[str]) -> bool:
    """Whether texts differ in few words, in none that is in the question."""
    one, other = Counter(words), Counter(others)
    different = (one - other) + (other - one)
    return different.total() <= (1 - _NEAR) * (len(words) + len(others)) and question_words.isdisjoint(different)
