"""A request whose passages are fused inside vLLM: where they lie in its prompt, and by which recipe."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fusionkv.protos.contract.limits import check_label
from fusionkv.protos.contract.names import DEFAULT
from fusionkv.protos.contract.recipes import find_recipe
from fusionkv.protos.fusion.v1 import fusion_pb2 as pb
from fusionkv.protos.runtime.errors import InvalidArgument

PARAMETER = "fusionkv"
"""Key of `kv_transfer_params` that holds a `SpannedPrompt` or a `FusedPrompt`."""
_KINDS = {"spans": (list,), "ratio": (int, float)} | dict.fromkeys(("recipe", "tenant", "corpus", "ticket"), (str,))


@dataclass(frozen=True, slots=True)
class SpannedPrompt:
    """`kv_transfer_params.fusionkv` with `spans`, and the prompt.

    Attributes:
        ids: token ids of the whole prompt.
        spans: first token of each passage, and the one after its last. They follow one another; before them is the
            system prompt, and behind them the question.
        ratio: None for the recipe's own.
        tenant: whose KV is used and stored; by default, that of requests with the same cache_salt.
        corpus: whose primer passages are encoded after.
        ticket: names the gateway's call that gets the figures; empty for none.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    recipe: str = DEFAULT
    ratio: float | None = None
    tenant: str = ""
    corpus: str = ""
    ticket: str = ""

    @classmethod
    def of(cls, params: Mapping[str, Any] | None, ids: Sequence[int], salt: str = "") -> "SpannedPrompt | None":
        """Parses the parameters of a request; None if they name no spans.

        Raises ValueError if they are wrong, as far as that does not depend on the model.
        """
        values = (params or {}).get(PARAMETER)
        if not isinstance(values, Mapping) or "spans" not in values:
            return None
        names = [field.name for field in fields(cls) if field.name != "ids"]
        if unknown := sorted(set(values) - set(names)):
            raise ValueError(f"kv_transfer_params.{PARAMETER}.{unknown[0]} is not one of {', '.join(names)}")
        for name, value in values.items():
            if type(value) not in _KINDS[name]:
                raise ValueError(f"kv_transfer_params.{PARAMETER}.{name} has the wrong type")
        asked = cls(tuple(ids), **{"tenant": salt, **values, "spans": _spans(values["spans"], len(ids))})
        try:
            check_label(asked.tenant, "tenant")
            check_label(asked.corpus, "corpus")
            if asked.recipe.partition("+")[0] != DEFAULT:
                find_recipe(asked.recipe).ratio_for(asked.ratio)
        except InvalidArgument as error:
            raise ValueError(str(error)) from error
        return asked

    @classmethod
    def separated(cls, ids: Sequence[int], separator: Sequence[int], salt: str) -> "SpannedPrompt | None":
        """The passages of a prompt that marks them by separators; None with fewer than two.

        One separator ends the system prompt, and one each passage, to which it belongs.
        """
        given, count = list(separator), len(separator)
        ends = [at + count for at in range(len(ids) - count) if list(ids[at : at + count]) == given]
        return cls(tuple(ids), tuple(itertools.pairwise(ends)), tenant=salt) if len(ends) > 1 else None

    @property
    def tokens(self) -> int:
        """Number of tokens before the question."""
        return self.spans[-1][1]

    @property
    def reuses(self) -> bool:
        """Whether the recipe reuses anything; otherwise vLLM computes the prompt."""
        return self.recipe.partition("+")[0] == DEFAULT or find_recipe(self.recipe).encode is not None

    def request(self) -> pb.GenerateRequest:
        """The request as a worker gets it."""
        return pb.GenerateRequest(
            system=pb.Tokens(ids=self.ids[: self.spans[0][0]]),
            chunks=[pb.Chunk(ids=self.ids[first:end]) for first, end in self.spans],
            question=pb.Tokens(ids=self.ids[self.tokens :]),
            recipe=self.recipe,
            ratio=self.ratio,
            tenant=self.tenant,
            corpus=self.corpus,
        )

    def figures(self, computed: int) -> dict[str, Any]:
        """The figures of a prompt that is not fused, as answer.v1.Summary in JSON.

        computed: tokens of it in vLLM's prefix cache, which has fused KV if the recipe reuses anything.
        """
        start = self.spans[0][0]
        context, cached = self.tokens - start, max(0, min(computed, self.tokens) - start)
        return {
            "recipe": self.recipe,
            "ratio": (self.ratio or 0.0) if self.reuses else 1.0,
            "prompt_tokens": len(self.ids),
            "context_tokens": context,
            "tokens_reused" if self.reuses else "tokens_lossless": cached,
            "tokens_recomputed": context - cached,
        }


def ticket_of(params: Mapping[str, Any] | None) -> str:
    """The ticket of a request, also of one whose parameters are wrong otherwise; empty if it has none."""
    values = (params or {}).get(PARAMETER)
    ticket = values.get("ticket") if isinstance(values, Mapping) else None
    return ticket if isinstance(ticket, str) else ""


def _spans(given: Sequence[Any], tokens: int) -> tuple[tuple[int, int], ...]:
    """Raises ValueError unless they are pairs that follow one another within the prompt, before its question."""
    what = f"kv_transfer_params.{PARAMETER}.spans"
    for span in given:
        if not (isinstance(span, list) and [type(at) for at in span] == [int, int]):
            raise ValueError(f"{what} must be pairs of positions")
    spans = tuple((first, end) for first, end in given)
    if not spans:
        raise ValueError(f"{what} is empty")
    before = spans[0][0]
    for first, end in spans:
        if first != before or not 0 <= first < end:
            raise ValueError(f"{what}: [{first}, {end}] is empty, or does not begin where the passage before it ends")
        before = end
    if before >= tokens:
        raise ValueError(f"{what} end at {before}, and the prompt has {tokens} tokens: there is no question")
    return spans
