"""Recipes with a slot filled otherwise: any encoding with any selector, choosing by windows, and so on."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from fusionkv.fusion_worker.recipes.keep import SnapKV
from fusionkv.fusion_worker.recipes.recipes import (
    RECIPES,
    Adaptive,
    Anchored,
    Isolated,
    Recipe,
    SimilarityGuided,
    Versions,
)
from fusionkv.fusion_worker.select.choose import Window
from fusionkv.kvcache_service.keys import MOST_VERSIONS
from fusionkv.protos.runtime.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Modifier:
    """One slot of a recipe filled otherwise: `recipe+name` or `recipe+name(numbers)`.

    defaults: its numbers. least: the lowest value of each. neighbours: of a chunk's encoding by default, when it
        decides about that.
    """

    name: str
    description: str
    defaults: tuple[int, ...]
    least: tuple[int, ...]
    apply: Callable[..., Recipe]
    neighbours: int | None = None


_CORRECTED_RATIO = 0.15


def _corrected(recipe: Recipe) -> Recipe:
    if not isinstance(recipe.encode, Isolated | SimilarityGuided):
        raise InvalidArgument(f"{recipe.name} reuses no chunk that was encoded alone, so there is nothing to correct")
    # Recomputing 5% of corrected chunks brings as much as 15% of others (docs/quality.md): less is enough.
    return replace(recipe, encode=replace(recipe.encode, corrected=True), ratio=min(recipe.ratio, _CORRECTED_RATIO))


def _versioned(recipe: Recipe, most: int) -> Recipe:
    if most > MOST_VERSIONS:
        raise InvalidArgument(f"versions({most}): at most {MOST_VERSIONS} of a chunk are kept")
    return replace(recipe, encode=Versions(most))


def _anchored(recipe: Recipe, percent: int) -> Recipe:
    if percent > 99:
        raise InvalidArgument(f"anchored({percent}) would leave nothing of a chunk: at most 99 percent can go")
    if not recipe.fixed:
        raise InvalidArgument(f"{recipe.name} recomputes text, and anchored({percent}) keeps none of it")
    return replace(recipe, encode=Anchored(percent))


def _windowed(recipe: Recipe, size: int, least: int) -> Recipe:
    if least > size:
        raise InvalidArgument(f"window({size},{least}): a window of {size} tokens never holds {least}")
    return replace(recipe, choose=Window(size, least))


def _adaptive(recipe: Recipe, first: int, certain: int) -> Recipe:
    if first >= 100 or certain >= 1000:
        raise InvalidArgument(f"adaptive({first},{certain}) takes less than 100 percent and less than 1000 per mille")
    if recipe.fixed:
        raise InvalidArgument(f"{recipe.name} has one ratio, so there is nothing to adapt")
    return replace(recipe, adapt=Adaptive(first / 100, certain / 1000))


MODIFIERS: dict[str, Modifier] = {
    modifier.name: modifier
    for modifier in (
        Modifier(
            "isolated",
            "chunks as encoded alone",
            (),
            (),
            lambda r: replace(r, encode=Isolated(corrected=r.encode.corrected)),
            0,
        ),
        Modifier(
            "similarity_guided",
            "chunks as encoded with N similar ones (FusionRAG 3.1)",
            (10,),
            (1,),
            lambda r, n: replace(r, encode=SimilarityGuided(n, corrected=r.encode.corrected)),
            10,
        ),
        Modifier(
            "corrected",
            "chunks encoded alone, corrected by what text before a chunk changes on average (docs/correction.md)",
            (),
            (),
            _corrected,
        ),
        Modifier(
            "versions",
            "chunks as computed behind others of which some are before them now, N of each kept (Cache-Craft)",
            (3,),
            (1,),
            _versioned,
            0,
        ),
        Modifier(
            "anchored",
            "chunks as trained anchor tokens, N% fewer than theirs; the model must have them (KVLink 2.4)",
            (50,),
            (1,),
            _anchored,
            0,
        ),
        Modifier(
            "linked",
            "N trained link tokens behind every chunk; the model must have them (KVLink 2.3)",
            (5,),
            (0,),
            lambda r, n: replace(r, links=n),
        ),
        Modifier(
            "window", "only in windows of N with M chosen tokens or more (CacheClip 3.3)", (8, 5), (1, 1), _windowed
        ),
        Modifier(
            "adaptive",
            "N% of the ratio first, all of it once an answer's token has less than M per mille",
            (40, 999),
            (1, 1),
            _adaptive,
        ),
        Modifier(
            "snapkv",
            "after the first token only N context tokens stay, by layer and head (SnapKV; A3)",
            (1024,),
            (1,),
            lambda r, n: replace(r, keep=SnapKV(n)),
        ),
    )
}
_TERM = re.compile(r"([a-z0-9_]{1,32})(?:\(([0-9]{1,6}(?:, ?[0-9]{1,6}){0,3})\))?")
_MOST = 8  # modifiers of a recipe


def find(name: str) -> Recipe:
    """The recipe of this name, or what `recipe+modifier+modifier(1,2)` makes of one.

    Raises:
        InvalidArgument: there is none, or a modifier is unknown or does not fit.
    """
    base, *terms = name.split("+")
    if base not in RECIPES:
        raise InvalidArgument(f"unknown recipe {base[:40]!r}; known: {', '.join(RECIPES)}")
    if len(terms) > _MOST:
        raise InvalidArgument(f"the recipe has {len(terms)} modifiers; at most {_MOST} are taken")
    recipe = RECIPES[base]
    for term in terms:
        recipe = _modified(recipe, term)
    return replace(recipe, name=name)


def _modified(recipe: Recipe, term: str) -> Recipe:
    match = _TERM.fullmatch(term)
    modifier = MODIFIERS.get(match[1]) if match else None
    if match is None or modifier is None:
        named = ", ".join(MODIFIERS)
        raise InvalidArgument(f"unknown modifier {term[:40]!r} of a recipe; known: {named}")
    if recipe.lossless:
        raise InvalidArgument(
            f"{recipe.name} is full attention, so there is nothing to modify by {term}; recipes that take "
            "modifiers compute all of the context at a ratio of 1"
        )
    given = [int(number) for number in match[2].split(",")] if match[2] else []
    numbers = (*given, *modifier.defaults[len(given) :])
    if len(numbers) != len(modifier.defaults) or any(n < low for n, low in zip(numbers, modifier.least, strict=True)):
        raise InvalidArgument(
            f"{term}: {modifier.name} takes {len(modifier.defaults)} numbers, from {modifier.least} on; "
            f"defaults {modifier.defaults}"
        )
    return modifier.apply(recipe, *numbers)
