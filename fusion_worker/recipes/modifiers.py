"""Modifiers of recipes, as in `prophetkv+window(8,5)`: each replaces one option of a recipe."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from fusionkv.fusion_worker.recipes.recipes import (
    RECIPES,
    Adaptive,
    Anchored,
    Isolated,
    Recipe,
    SimilarityGuided,
    SnapKV,
    Versions,
)
from fusionkv.fusion_worker.select.base import Window
from fusionkv.kvcache_service.keys import MOST_VERSIONS
from fusionkv.protos.runtime.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Modifier:
    """A change of one option of a recipe: `recipe+name` or `recipe+name(numbers)`.

    Attributes:
        apply: makes the modified recipe of a recipe and the numbers.
        defaults: default values of its numbers.
        least: minimum value of each number.
        neighbours: default number of neighbours that chunks are encoded with; None if it does not change that.
    """

    name: str
    description: str
    apply: Callable[..., Recipe]
    defaults: tuple[int, ...] = ()
    least: int = 1
    neighbours: int | None = None


_CORRECTED_RATIO = 0.15


def _corrected(recipe: Recipe) -> Recipe:
    if not isinstance(recipe.encode, Isolated | SimilarityGuided):
        raise InvalidArgument(f"{recipe.name} reuses no chunks that were encoded alone, so it can't be corrected")
    # Recomputing 5% of corrected chunks gains as much as 15% of uncorrected ones (docs/quality.md).
    return replace(recipe, encode=replace(recipe.encode, corrected=True), ratio=min(recipe.ratio, _CORRECTED_RATIO))


def _versioned(recipe: Recipe, most: int) -> Recipe:
    if most > MOST_VERSIONS:
        raise InvalidArgument(f"versions({most}): at most {MOST_VERSIONS} versions of a chunk are kept")
    return replace(recipe, encode=Versions(most))


def _anchored(recipe: Recipe, percent: int) -> Recipe:
    if percent > 99:
        raise InvalidArgument(f"anchored({percent}) would leave no tokens of a chunk: the percentage is at most 99")
    if not recipe.fixed:
        raise InvalidArgument(f"{recipe.name} recomputes tokens of the text, of which anchored({percent}) keeps none")
    return replace(recipe, encode=Anchored(percent))


def _windowed(recipe: Recipe, size: int, least: int) -> Recipe:
    if least > size:
        raise InvalidArgument(f"window({size},{least}): a window of {size} tokens can't hold {least}")
    return replace(recipe, choose=Window(size, least))


def _linked(recipe: Recipe, count: int) -> Recipe:
    if recipe.depth < 1.0:
        raise InvalidArgument(f"{recipe.name} recomputes tokens in its first layers only: it takes no link tokens")
    return replace(recipe, links=count)


def _layers(recipe: Recipe, percent: int) -> Recipe:
    if percent > 100:
        raise InvalidArgument(f"layers({percent}): the percentage is at most 100")
    if recipe.fixed or recipe.links:
        raise InvalidArgument(
            f"{recipe.name} chooses no tokens, or has link tokens beside them: it takes no layers(N)"
        )
    return replace(recipe, depth=percent / 100)


def _adaptive(recipe: Recipe, first: int, certain: int) -> Recipe:
    if first >= 100 or certain >= 1000:
        raise InvalidArgument(
            f"adaptive({first},{certain}): the numbers must be below 100 percent and 1000 per mille"
        )
    if recipe.fixed:
        raise InvalidArgument(f"{recipe.name} has a fixed ratio, so it can't be adaptive")
    return replace(recipe, adapt=Adaptive(first / 100, certain / 1000))


MODIFIERS: dict[str, Modifier] = {
    modifier.name: modifier
    for modifier in (
        Modifier(
            "isolated",
            "chunks encoded alone",
            lambda r: replace(r, encode=Isolated(corrected=r.encode.corrected)),
            neighbours=0,
        ),
        Modifier(
            "similarity_guided",
            "chunks encoded together with N similar ones (FusionRAG 3.1)",
            lambda r, n: replace(r, encode=SimilarityGuided(n, corrected=r.encode.corrected)),
            (10,),
            neighbours=10,
        ),
        Modifier(
            "corrected",
            "chunks encoded alone, corrected by the average effect of preceding text (docs/correction.md)",
            _corrected,
        ),
        Modifier(
            "versions",
            "chunks as computed after others, reused when some of these precede them again; keeps N versions of "
            "each (Cache-Craft)",
            _versioned,
            (3,),
            neighbours=0,
        ),
        Modifier(
            "anchored",
            "chunks compressed to trained anchor tokens, N% fewer tokens; the model must have them (KVLink 2.4)",
            _anchored,
            (50,),
            neighbours=0,
        ),
        Modifier(
            "linked",
            "N trained link tokens after every chunk; the model must have them (KVLink 2.3)",
            _linked,
            (5,),
            least=0,
        ),
        Modifier(
            "window",
            "recomputes only in windows of N tokens with at least M chosen ones (CacheClip 3.3)",
            _windowed,
            (8, 5),
        ),
        Modifier(
            "layers",
            "recomputes the chosen tokens in the first N% of the layers; the later ones keep their reused KV",
            _layers,
            (80,),
        ),
        Modifier(
            "adaptive",
            "recomputes N% of the ratio first, and all of it once a token's probability is below M per mille",
            _adaptive,
            (40, 999),
        ),
        Modifier(
            "snapkv",
            "keeps only N context tokens after the first token, by layer and head (SnapKV; A3)",
            lambda r, n: replace(r, keep=SnapKV(n)),
            (1024,),
        ),
    )
}
_TERM = re.compile(r"([a-z0-9_]{1,32})(?:\(([0-9]{1,6}(?:, ?[0-9]{1,6}){0,3})\))?")
_MAX_MODIFIERS = 8


def find(name: str) -> Recipe:
    """Finds a recipe by name, with modifiers applied: `recipe` or `recipe+modifier+modifier(1,2)`.

    Raises:
        InvalidArgument: the recipe or a modifier is unknown, or a modifier does not fit the recipe.
    """
    base, *terms = name.split("+")
    if base not in RECIPES:
        raise InvalidArgument(f"unknown recipe {base[:40]!r}; known: {', '.join(RECIPES)}")
    if len(terms) > _MAX_MODIFIERS:
        raise InvalidArgument(f"the recipe has {len(terms)} modifiers, more than {_MAX_MODIFIERS}")
    recipe = RECIPES[base]
    for term in terms:
        recipe = _modified(recipe, term)
    return replace(recipe, name=name)


def _modified(recipe: Recipe, term: str) -> Recipe:
    match = _TERM.fullmatch(term)
    modifier = MODIFIERS.get(match[1]) if match else None
    if match is None or modifier is None:
        named = ", ".join(MODIFIERS)
        raise InvalidArgument(f"unknown recipe modifier {term[:40]!r}; known: {named}")
    if recipe.lossless:
        raise InvalidArgument(
            f"{recipe.name} is full attention and takes no modifiers such as {term}; other recipes equal full "
            "attention at a ratio of 1, and take modifiers"
        )
    given = [int(number) for number in match[2].split(",")] if match[2] else []
    numbers = (*given, *modifier.defaults[len(given) :])
    if len(numbers) != len(modifier.defaults) or any(n < modifier.least for n in numbers):
        raise InvalidArgument(
            f"{term}: {modifier.name} takes {len(modifier.defaults)} numbers, at least {modifier.least}; "
            f"the defaults are {modifier.defaults}"
        )
    return modifier.apply(recipe, *numbers)
