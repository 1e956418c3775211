"""The vocabulary of the generated documents, and the split of names into training and held-out ones."""

import functools
import itertools
import random
from typing import Literal

Split = Literal["train", "heldout"]


def _list(text: str) -> list[str]:
    return text.split()


FIRST = _list(
    "Bal Ber Bor Cal Cas Cor Dan Del Dor Fal Fen Fir Gal Gen Gor Hal Hel Hor Jan Jer "
    "Kal Kel Kor Lan Lem Lor Mar Mel Mor Nal Ner Nor Pal Per Ral Ros Sal Sel Tan Vel"
)
SECOND = _list(
    "ban bek bin dak den dol fan fek gan gel gor hin kas kel kin lak len lin mak men "
    "min nas nek nol pan pel ras rek rin rol sak sen sin tak ten tin tor van vek vin"
)
THIRD = _list("da ko le mi nu ra so ta vi zu")
PLACE = _list("berg ford mont port land holm ness vick")

# Single-token names of persons who refer to each other. Both splits share them, unlike other names, titles and
# places.
SHORT = _list(
    "Ada Abe Amy Ann Ben Bob Bea Cid Cleo Dag Dora Ed Ella Emil Eva Finn Fay Gus Gwen Hana Hugo Ida Igor Ines Ivo "
    "Jude June Kaya Knut Lara Leo Lisa Luis Maya Max Mina Nils Nora Olga Omar Otto Paul Rita Rosa Sven Tess Uma Zoe"
)

ITEMS = _list(
    "lamp rope coin drum kite vase bell fork harp lens mask nail oar pipe quilt ring saw tent urn whip "
    "axe broom candle dice easel flute globe hook iron jar"
)
ROLES = _list("speaker captain judge guard author pilot")
ADJECTIVES = _list("green blue quiet dark bright cold soft wide grey calm")
NOUNS = _list("grass sky river street garden market bridge forest window hill lake tower")
VERBS = _list("stands rests waits shines moves sleeps")
PREPOSITIONS = _list("near behind beside under")
DAYS = _list("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

FUNCTION = _list(
    "Report The A On the a is in of at and with to age code city score item items choice "
    "lives stays scored like what owns chose report question using passages"
)
STARTS = _list("Report Question Answer The A")  # words that can begin a text, without a space before them


def is_held_out(first: str, second: str) -> bool:
    """Whether a pair of syllables is held out: every third pair is, so each syllable is in both splits."""
    tails = SECOND if second in SECOND else PLACE
    return (FIRST.index(first) + tails.index(second)) % 3 == 0


@functools.cache
def _pairs(split: Split, places: bool) -> tuple[tuple[str, str], ...]:
    tails = PLACE if places else SECOND
    return tuple((a, b) for a in FIRST for b in tails if is_held_out(a, b) == (split == "heldout"))


class NamePool:
    """Draws names, places and titles of a split without repeating a name."""

    def __init__(self, rng: random.Random, split: Split, long_share: float = 0.25) -> None:
        self._rng = rng
        self._split: Split = split
        self._long_share = long_share
        self._used: set[str] = set()

    def _draw(self, long: bool, first: str = "") -> str:
        for tries in itertools.count():
            long = long or tries > 1000  # short names may run out
            head, tail = self._rng.choice(_pairs(self._split, False))
            name = head + tail + (self._rng.choice(THIRD) if long else "")
            if name not in self._used and first in ("", head):
                self._used.add(name)
                return name
        raise AssertionError("unreachable")

    def short(self) -> str:
        """A single-token name."""
        name = self._rng.choice([n for n in SHORT if n not in self._used])
        self._used.add(name)
        return name

    def release_short(self) -> None:
        """Allows single-token names to be drawn again."""
        self._used.difference_update(SHORT)

    def title(self) -> str:
        """A name of three syllables."""
        return self._draw(long=True)

    def person(self) -> str:
        """A name of two syllables, or of three for `long_share` of the draws."""
        return self._draw(self._rng.random() < self._long_share)

    def near(self, name: str) -> str:
        """A name that shares its first syllable with `name`."""
        return self._draw(self._rng.random() < self._long_share, name[:3])

    def places(self, count: int, alike: bool = False) -> list[str]:
        """`count` different places. alike: whether they share their first syllable."""
        pairs = _pairs(self._split, True)
        if alike:
            head = self._rng.choice(pairs)[0]
            pairs = tuple(pair for pair in pairs if pair[0] == head)
        return ["".join(pair) for pair in self._rng.sample(pairs, count)]
