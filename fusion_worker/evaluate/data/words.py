"""The vocabulary of the generated documents, and names that the reference models were not trained on."""

import itertools
import random


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

# Names of one token, of persons who refer to each other. The models were trained on them, unlike on other names.
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


LONG_SHARE = 0.25  # of the names have three syllables


def _held_out(tails: list[str]) -> list[tuple[str, str]]:
    """Every third pair of syllables, which training left out; it had each syllable in other pairs."""
    pairs = itertools.product(enumerate(FIRST), enumerate(tails))
    return [(first, second) for (i, first), (j, second) in pairs if (i + j) % 3 == 0]


PAIRS, PLACES = _held_out(SECOND), _held_out(PLACE)


class NamePool:
    """Draws held-out names, places and titles without repeating a name."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._used: set[str] = set()

    def _draw(self, long: bool, first: str = "") -> str:
        for tries in itertools.count():
            long = long or tries > 1000  # short names may run out
            head, tail = self._rng.choice(PAIRS)
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
        """A name of two syllables, sometimes of three."""
        return self._draw(self._rng.random() < LONG_SHARE)

    def near(self, name: str) -> str:
        """A name that shares its first syllable with `name`."""
        return self._draw(self._rng.random() < LONG_SHARE, name[:3])

    def places(self, count: int) -> list[str]:
        """`count` different places."""
        return ["".join(pair) for pair in self._rng.sample(PLACES, count)]
