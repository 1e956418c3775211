"""Recipes: each published method as a combination of options, a row of a table; and modifiers of one option."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from fusionkv.protos.contract.limits import MAX_MODIFIERS, MAX_RECIPE, MOST_VERSIONS
from fusionkv.protos.contract.selectors import (
    AttendedDeviation,
    CachedAttention,
    DistanceToStart,
    InterChunkAttention,
    Need,
    QuestionAttention,
    SecondModel,
    Selector,
    ShallowQuestionAttention,
    SnapKV,
    ValueDeviation,
    Window,
)
from fusionkv.protos.runtime.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Encode:
    """How the KV of reused chunks is made."""


@dataclass(frozen=True, slots=True)
class Isolated(Encode):
    """A chunk's KV is computed after the system prompt only."""


@dataclass(frozen=True, slots=True)
class SimilarityGuided(Encode):
    """A chunk's KV is computed after the isolated KV of its most similar chunks, ahead of time (FusionRAG 3.1)."""

    neighbours: int


@dataclass(frozen=True, slots=True)
class InPlace(Encode):
    """A chunk's KV is computed after all parts before it, and reused only after the same parts: a prefix cache."""


@dataclass(frozen=True, slots=True)
class Versions(Encode):
    """A chunk's KV is computed after all parts before it, and reused in prompts that share some of those parts.

    The cache service keeps `most` versions of a chunk, by the parts before it (Cache-Craft, as described in
    CacheClip 5).
    """

    most: int


@dataclass(frozen=True, slots=True)
class Primed(Encode):
    """A chunk's KV is computed after the system prompt and the corpus's primer, a few of the corpus's passages.

    The first tokens of a text attend to little but themselves. After the primer, they are computed as in the middle
    of a prompt, where they are reused.
    """


ISOLATED = Isolated()


@dataclass(frozen=True, slots=True)
class Tempered:
    """Attention to the context at a temperature, its total weight to the power of `scale` (APE; CacheClip 4.1)."""

    temperature: float
    scale: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the KV of a prompt's context is made.

    Attributes:
        select: scores stale tokens; None if the ratio is fixed and leaves no choice.
        ratio: default share of context tokens to recompute.
        encode: how the KV of reused chunks is made; None reuses nothing.
        choose: chooses tokens by their scores; None chooses those with the highest ones.
        keep: the context tokens to keep after the first token; None keeps all.
        attend: how question and answer attend to the context; None attends as the model was trained.
        links: link tokens after every chunk, computed for each request; they see everything before them (KVLink 2.3).
            Not used if no chunk is reused stale.
    """

    name: str
    description: str
    select: Selector | None = None
    ratio: float = 0.0
    encode: Encode | None = ISOLATED
    choose: Window | None = None
    keep: SnapKV | None = None
    attend: Tempered | None = None
    links: int = 0

    @property
    def fixed(self) -> bool:
        """Whether requests can't change the ratio."""
        return self.select is None

    @property
    def lossless(self) -> bool:
        """Whether its answers equal those of full attention by construction."""
        return self.encode is None or self.in_place

    @property
    def portable(self) -> bool:
        """Whether other engines can decode from its KV: plain attention over exactly the prompt's tokens."""
        return not (self.keep or self.attend or self.links)

    @property
    def primed(self) -> bool:
        """Whether chunks are encoded after the corpus's primer."""
        return isinstance(self.encode, Primed)

    @property
    def in_place(self) -> bool:
        """Whether chunks are encoded at their position, after all parts before them."""
        return isinstance(self.encode, InPlace)

    @property
    def neighbours(self) -> int:
        """Number of neighbours to encode a chunk with ahead of time."""
        return self.encode.neighbours if isinstance(self.encode, SimilarityGuided) else 0

    @property
    def needs(self) -> Need | None:
        """The inputs of its selector; None without a selector."""
        return self.select.needs if self.select is not None else None

    def kept(self, context_tokens: int) -> int:
        """Context tokens kept by layer and head; 0 keeps all."""
        return self.keep.tokens if self.keep is not None and context_tokens > self.keep.tokens else 0

    def ratio_for(self, asked: float | None) -> float:
        """The ratio for a request that asks for `asked`; None asks for the default.

        Raises InvalidArgument if the ratio is outside 0..1 or not a number, or differs from a fixed ratio.
        """
        if asked is not None and not 0.0 <= asked <= 1.0:
            raise InvalidArgument(f"ratio is {asked:.15g}: it must be from 0 to 1")
        if self.fixed and asked not in (None, self.ratio):
            raise InvalidArgument(
                f"{self.name} has the fixed ratio {self.ratio:g}, not {asked:g}: omit the ratio, or use a recipe "
                "that chooses tokens, such as prophetkv"
            )
        return self.ratio if asked is None else asked


# What the first layers attend to says little about the answer. Without them, Qwen2.5-Coder-0.5B is nearer to full
# attention in 44 of 60 answers, and SmolLM2 as near as with them (docs/quality.md, docs/journal/selection.md).
DEEP = CachedAttention(first=1 / 3)
# The relative error of a token's reused values falls with the tokens before it in its chunk, to the power of 0.27 to
# 0.47 on SmolLM2 and Qwen2.5-Coder-0.5B; not measured on other models (docs/journal/selection.md).
FADE = 0.5

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("full_attention", "prefills the whole prompt and reuses nothing", encode=None, ratio=1.0),
        Recipe("prefix_cache", "full attention; reuses a chunk only after exactly the same text", encode=InPlace()),
        Recipe("full_reuse", "reuses every chunk as encoded alone, moved to its position (TurboRAG)"),
        Recipe(
            "ape",
            "full_reuse, with attention to the context at temperature 0.9 and scale 0.9 (APE)",
            attend=Tempered(0.9, 0.9),
        ),
        Recipe(
            "kvlink",
            "full_reuse, with 5 trained link tokens after every chunk; the model must have them (KVLink 2.3)",
            links=5,
        ),
        Recipe("epic", "recomputes the first tokens of every chunk (EPIC)", DistanceToStart(), 0.2),
        Recipe(
            "cacheblend",
            "recomputes the tokens whose values at layer 1 deviate most, from layer 1 on (CacheBlend)",
            ValueDeviation(),
            0.15,
        ),
        Recipe(
            "kvshare",
            "as cacheblend, with each deviation weighted by the attention to the token (KVShare)",
            AttendedDeviation(),
            0.2,
        ),
        Recipe(
            "cache_craft",
            "recomputes the tokens that attend most to earlier chunks (Cache-Craft)",
            InterChunkAttention(),
            0.15,
        ),
        Recipe(
            "a3",
            "recomputes the tokens that the question attends to most at layer 1, from layer 1 on (A3)",
            ShallowQuestionAttention(),
            0.15,
        ),
        Recipe(
            "fusionrag",
            "reuses chunks encoded with similar ones; recomputes the tokens that the question attends to most in the "
            "last layer (FusionRAG 3.1, 3.2)",
            QuestionAttention(CachedAttention(first=1.0)),
            0.15,
            encode=SimilarityGuided(10),
        ),
        Recipe(
            "prophetkv",
            "recomputes the tokens that the question attends to most over all layers (ProphetKV 4.2, 4.3)",
            QuestionAttention(),
            0.2,
        ),
        Recipe(
            "deeplayer",
            "recomputes the tokens that the question attends to most in the last two thirds of the layers, weighted "
            "by their place in the chunk",
            QuestionAttention(DEEP, FADE),
            0.2,
        ),
        Recipe(
            "cacheclip",
            "recomputes, in windows, the tokens that the question attends to most in a small auxiliary model; needs "
            "the setting auxiliary (CacheClip 3)",
            QuestionAttention(SecondModel()),
            0.2,
            choose=Window(),
        ),
    )
}


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


def _versioned(recipe: Recipe, most: int) -> Recipe:
    if most > MOST_VERSIONS:
        raise InvalidArgument(f"versions({most}): at most {MOST_VERSIONS} versions of a chunk are kept")
    return replace(recipe, encode=Versions(most))


def _windowed(recipe: Recipe, size: int, least: int) -> Recipe:
    if least > size:
        raise InvalidArgument(f"window({size},{least}): a window of {size} tokens can't hold {least}")
    return replace(recipe, choose=Window(size, least))


def _evicting(recipe: Recipe, tokens: int) -> Recipe:
    if recipe.attend is not None:
        raise InvalidArgument(f"{recipe.name} attends to its whole context at a temperature: it takes no snapkv")
    return replace(recipe, keep=SnapKV(tokens))


MODIFIERS: dict[str, Modifier] = {
    modifier.name: modifier
    for modifier in (
        Modifier("isolated", "chunks encoded alone", lambda r: replace(r, encode=Isolated()), neighbours=0),
        Modifier(
            "similarity_guided",
            "chunks encoded together with N similar ones (FusionRAG 3.1)",
            lambda r, n: replace(r, encode=SimilarityGuided(n)),
            (10,),
            neighbours=10,
        ),
        Modifier(
            "primed",
            "chunks encoded after a few passages of their corpus, the same for all of them",
            lambda r: replace(r, encode=Primed()),
            neighbours=0,
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
            "linked",
            "N trained link tokens after every chunk; the model must have them (KVLink 2.3)",
            lambda r, n: replace(r, links=n),
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
            "snapkv",
            "keeps only N context tokens after the first token, by layer and head (SnapKV; A3)",
            _evicting,
            (1024,),
        ),
    )
}
_TERM = re.compile(r"([a-z0-9_]{1,32})(?:\(([0-9]{1,6}(?:, ?[0-9]{1,6}){0,3})\))?")


def find_recipe(name: str) -> Recipe:
    """Finds a recipe by name, with modifiers applied: `recipe` or `recipe+modifier+modifier(1,2)`.

    Raises InvalidArgument if the recipe or a modifier is unknown, a modifier does not fit the recipe, or the name is
    too long.
    """
    if len(name) > MAX_RECIPE:
        raise InvalidArgument(f"the recipe's name has {len(name)} characters; the maximum is {MAX_RECIPE}")
    base, *terms = name.split("+")
    if base not in RECIPES:
        raise InvalidArgument(f"unknown recipe {base[:40]!r}; known: {', '.join(RECIPES)}")
    if len(terms) > MAX_MODIFIERS:
        raise InvalidArgument(f"the recipe has {len(terms)} modifiers, more than {MAX_MODIFIERS}")
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
        limits = f", at least {modifier.least}; the defaults are {modifier.defaults}" if modifier.defaults else ""
        raise InvalidArgument(f"{term}: {modifier.name} takes {len(modifier.defaults) or 'no'} numbers{limits}")
    return modifier.apply(recipe, *numbers)
