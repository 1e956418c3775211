"""Copies and near-copies among the texts of retrieved chunks: each would take the place of another text."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

_WORD = re.compile(r"\w+")
# Share of common rows of three words from which texts are near-copies. In 5,820 passages of four data sets, all 22
# pairs above it are versions of one passage; texts about different subjects reach 0.82.
_NEAR = 0.9
# Words of a text that are compared: more than a chunk has by default.
_WORDS = 1000


def distinct(texts: Iterable[str], question: str, count: int) -> list[int]:
    """The places of the first `count` different texts.

    Texts are the same if they differ in white space and case only, or in few words, none of which is in the question.
    """
    asked = set(_WORD.findall(question.lower()))
    kept: list[int] = []
    words: list[list[str]] = []  # of each kept text
    rows: list[set[tuple[str, str, str]]] = []
    kept_with: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)  # the kept texts with a row
    seen: set[str] = set()
    for place, text in enumerate(texts):
        if len(kept) == count:
            break
        text = " ".join(text.casefold().split())
        if text in seen:
            continue
        seen.add(text)
        own = _WORD.findall(text)[:_WORDS]
        own_rows = set(zip(own, own[1:], own[2:], strict=False))
        common = Counter(number for row in own_rows for number in kept_with[row])
        if any(
            shared >= _NEAR * len(own_rows | rows[number]) and _alike(own, words[number], asked)
            for number, shared in common.items()
        ):
            continue
        for row in own_rows:
            kept_with[row].append(len(kept))
        kept.append(place)
        words.append(own)
        rows.append(own_rows)
    return kept


def _alike(words: Sequence[str], others: Sequence[str], asked: set[str]) -> bool:
    """Whether texts differ in few words, in none that is asked for."""
    one, other = Counter(words), Counter(others)
    different = (one - other) + (other - one)
    return different.total() <= (1 - _NEAR) * (len(words) + len(others)) and asked.isdisjoint(different)
