"""Recipes: every system of the papers as a value of its slots. A new system is a new row, not a new code path."""

from dataclasses import dataclass, field
from typing import Any

from fusionkv.fusion_worker.recipes.keep import SnapKV
from fusionkv.fusion_worker.select.attended_deviation import AttendedDeviation
from fusionkv.fusion_worker.select.auxiliary_attention import AuxiliaryAttention
from fusionkv.fusion_worker.select.base import Need, Selector
from fusionkv.fusion_worker.select.choose import TOP_K, Choice, Window
from fusionkv.fusion_worker.select.distance_to_start import DistanceToStart
from fusionkv.fusion_worker.select.inter_chunk_attention import InterChunkAttention
from fusionkv.fusion_worker.select.question_attention import QuestionAttention
from fusionkv.fusion_worker.select.shallow_question_attention import ShallowQuestionAttention
from fusionkv.fusion_worker.select.value_deviation import ValueDeviation
from fusionkv.protos.runtime.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Encode:
    """How a reused chunk's KV is made.

    corrected: whether what a corpus teaches about text behind other text goes over what was computed alone
        (docs/correction.md).
    """

    corrected: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Isolated(Encode):
    """A chunk's KV is computed after the system prompt alone."""


@dataclass(frozen=True, slots=True)
class SimilarityGuided(Encode):
    """A chunk's KV is computed after the isolated KV of its most similar chunks, ahead of time (FusionRAG 3.1)."""

    neighbours: int


@dataclass(frozen=True, slots=True)
class InPlace(Encode):
    """A chunk's KV is computed after all that stands before it, and serves after the same alone: a prefix cache."""


@dataclass(frozen=True, slots=True)
class Versions(Encode):
    """A chunk's KV is computed behind what a prompt has before it, and serves prompts that share some of that.

    The cache service keeps `most` versions of a chunk, by what stood before it (Cache-Craft, as CacheClip 5 has it).
    """

    most: int


@dataclass(frozen=True, slots=True)
class Anchored(Encode):
    """Of a chunk only trained anchor tokens' KV is kept, so many percent fewer than its tokens (KVLink 2.4)."""

    percent: int


ISOLATED = Isolated()


@dataclass(frozen=True, slots=True)
class Tempered:
    """Attention to the context at another temperature, its mass to the power of `scale` (APE; CacheClip 4.1)."""

    temperature: float
    scale: float


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Recomputes little first, and as much as the ratio says once the next token of the answer is in doubt.

    first: share of the ratio that comes first. certain: the least probability of a token that is not in doubt.
    """

    first: float
    certain: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a prompt's context is made.

    encode: how a reused chunk's KV was made; None reuses nothing.
    select: what makes a stale token worth recomputing; None when the ratio leaves no choice.
    ratio: recomputed context tokens / context tokens, unless a request says otherwise.
    fixed: whether a request may not say otherwise.
    choose: from scores to tokens.
    from_layer_1: the chosen tokens go on from the states behind layer 0 that their scores needed; otherwise they run
        through every layer.
    keep: what of the context stays behind the first token; None is all of it.
    attend: how question and answer attend to the context; None as the model was trained.
    links: link tokens behind every chunk, computed for each request; they see all before them (KVLink 2.3). None are
        used when nothing is reused as a stale copy.
    adapt: whether the ratio is the most, to be used when less leaves a token in doubt.
    """

    name: str
    description: str
    encode: Encode | None
    select: Selector[Any] | None
    ratio: float
    fixed: bool = False
    choose: Choice = TOP_K
    from_layer_1: bool = False
    keep: SnapKV | None = None
    attend: Tempered | None = None
    links: int = 0
    adapt: Adaptive | None = None

    @property
    def lossless(self) -> bool:
        """Whether its answers are full attention's by construction."""
        return self.encode is None or self.in_place

    @property
    def portable(self) -> bool:
        """Whether any engine can go on from its KV: it is of the prompt's own tokens, of all of them, for good."""
        return not (self.keep or self.attend or self.links or self.anchored or self.adapt)

    @property
    def in_place(self) -> bool:
        """Whether chunks are encoded where they stand, after all before them."""
        return isinstance(self.encode, InPlace)

    @property
    def neighbours(self) -> int:
        """Neighbours a chunk should be encoded with ahead of time."""
        return self.encode.neighbours if isinstance(self.encode, SimilarityGuided) else 0

    @property
    def anchored(self) -> int:
        """By how many percent chunks are compressed to anchor tokens; 0 when they are not."""
        return self.encode.percent if isinstance(self.encode, Anchored) else 0

    @property
    def needs(self) -> Need | None:
        """What has to be computed to choose tokens; None when there is nothing to choose."""
        return self.select.needs if self.select is not None else None

    def kept(self, context_tokens: int) -> int:
        """Context tokens kept by layer and head; 0 when all stay as they are."""
        return self.keep.tokens if self.keep is not None and context_tokens > self.keep.tokens else 0

    def ratio_for(self, asked: float | None) -> float:
        """The ratio a request gets.

        Raises:
            InvalidArgument: outside 0..1, or not a number; another one than the recipe's own, which is fixed; or
                between the two for chunks that are anchor tokens.
        """
        if asked is not None and not 0.0 <= asked <= 1.0:
            raise InvalidArgument(f"ratio {asked} is outside 0..1")
        if self.anchored and asked:
            if asked < 1.0:
                raise InvalidArgument(
                    f"{self.name} keeps no text of a chunk, so nothing of it can be recomputed at ratio {asked}: ask "
                    "for 0, or for 1, which is full attention of the text"
                )
            return asked
        if self.fixed and asked not in (None, self.ratio):
            raise InvalidArgument(
                f"{self.name} has the fixed ratio {self.ratio:g}, not {asked:g}: leave the ratio out, or take a "
                "recipe that chooses tokens, such as prophetkv"
            )
        return self.ratio if asked is None else asked


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("full_attention", "plain prefill of the whole prompt, nothing reused", None, None, 1.0, fixed=True),
        Recipe(
            "prefix_cache",
            "full attention, reused where the whole path before is the same",
            InPlace(),
            None,
            0.0,
            True,
        ),
        Recipe(
            "full_reuse", "every chunk as encoded alone, moved to its place (TurboRAG)", ISOLATED, None, 0.0, True
        ),
        Recipe(
            "ape",
            "full_reuse, the context attended to at temperature 0.9 and scale 0.9 (APE)",
            ISOLATED,
            None,
            0.0,
            fixed=True,
            attend=Tempered(0.9, 0.9),
        ),
        Recipe(
            "kvlink",
            "full_reuse with 5 trained link tokens behind every chunk; needs a model that has them (KVLink 2.3)",
            ISOLATED,
            None,
            0.0,
            fixed=True,
            links=5,
        ),
        Recipe("epic", "the first tokens of every chunk recomputed (EPIC)", ISOLATED, DistanceToStart(), 0.2),
        Recipe(
            "cacheblend",
            "recomputed where layer 1's values are off most, from layer 1 on (CacheBlend)",
            ISOLATED,
            ValueDeviation(),
            0.15,
            from_layer_1=True,
        ),
        Recipe(
            "kvshare",
            "as cacheblend, the deviation times all attention into the token (KVShare)",
            ISOLATED,
            AttendedDeviation(),
            0.2,
            from_layer_1=True,
        ),
        Recipe(
            "cache_craft",
            "recomputed by a token's own attention to chunks before it (Cache-Craft)",
            ISOLATED,
            InterChunkAttention(),
            0.15,
        ),
        Recipe(
            "a3",
            "recomputed by the question's attention at layer 1, from layer 1 on (A3)",
            ISOLATED,
            ShallowQuestionAttention(),
            0.15,
            from_layer_1=True,
        ),
        Recipe(
            "fusionrag",
            "encoded with similar chunks; recomputed by the question's last-layer attention (FusionRAG 3.1, 3.2)",
            SimilarityGuided(10),
            QuestionAttention(last_only=True),
            0.15,
        ),
        Recipe(
            "prophetkv",
            "recomputed by the question's attention over all layers (ProphetKV 4.2, 4.3)",
            ISOLATED,
            QuestionAttention(last_only=False),
            0.2,
        ),
        Recipe(
            "cacheclip",
            "recomputed by a small second model's attention, in windows; needs --auxiliary (CacheClip 3)",
            ISOLATED,
            AuxiliaryAttention(),
            0.2,
            choose=Window(),
        ),
    )
}
