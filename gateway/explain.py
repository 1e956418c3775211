"""One page on how an answer came about, that needs nothing else to be read: `ask --explain`, a gateway's pages."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fusionkv.gateway.cli.files import UsageError
from fusionkv.gateway.client.results import Answer, Explanation, Passage, fields
from fusionkv.protos.answer.v1.answer_pb2 import ExplainedChunk, StageSeconds

if TYPE_CHECKING:
    from jinja2 import Template

# What an answer is held against.
REFERENCE = "full_attention"
# In the order that a request goes through them, each with a hue.
STAGES = {
    "retrieve": 200,
    "plan": 230,
    "queue": 0,
    "lookup": 170,
    "load": 140,
    "encode": 55,
    "select": 285,
    "prefill": 25,
    "decode": 320,
}


# What the page says of an answer that did not come to its own end.
ENDS = {"max_tokens": ", cut off at its limit of tokens", "stop_string": ", up to a stop string"}


@dataclass(frozen=True, slots=True)
class Served:
    """What the page has besides when a gateway serves it: when that was, the list of all answers, and where to have
    the question asked again with full attention, if it was not yet.
    """

    at: str
    home: str
    compare: str


def template(name: str = "explain.html") -> "Template":
    """A page's template. Raises UsageError when its library is missing."""
    try:
        from jinja2 import Environment, PackageLoader
    except ModuleNotFoundError as error:
        raise UsageError("--explain needs the package jinja2: pip install 'fusionkv[gateway]'") from error
    loader = PackageLoader("fusionkv.gateway", "pages")
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template(name)


def render(
    page: "Template",
    question: str,
    answer: Answer,
    explanation: Explanation,
    full: Answer | None,
    served: Served | None = None,
) -> str:
    """The page as HTML. `full` is the answer by full attention, if that was asked."""
    named = [("this answer", answer), *([("full attention", full)] if full is not None else [])]
    longest = max(a.summary.seconds.total for _, a in named) or 1.0
    return page.render(
        question=question,
        answers=[(name, a.text.strip(), a.summary) for name, a in named],
        same=full is not None and answer.text == full.text,
        same_chunks=full is not None and answer.sources == full.sources,
        summary=answer.summary,
        saved=_saved(answer, full),
        facts=_facts(answer, full),
        stages=STAGES,
        timelines=[(name, _timeline(a.summary.seconds, longest), a.summary.seconds) for name, a in named],
        seconds=[fields(a.summary.seconds) for _, a in named],
        verdicts=explanation.verdicts,
        ends=ENDS,
        longest=longest,
        pieces=[
            _around("system prompt", explanation.system),
            *(_chunk(p, c) for p, c in zip(answer.sources, explanation.chunks, strict=True)),
            _around("question", explanation.question),
        ],
        **(asdict(served) if served else {}),
    )


def _saved(answer: Answer, full: Answer | None) -> str:
    """What reuse brought, in one sentence."""
    s = answer.summary
    if not s.context_tokens or s.tokens_recomputed == s.context_tokens:
        return "Nothing was reused: all of the context was computed."
    said = (
        f"{s.context_tokens - s.tokens_recomputed:,} of {s.context_tokens:,} context tokens were not computed again"
    )
    if full is None or not (s.seconds.ttft and full.summary.seconds.ttft):
        return f"{said}."
    times = full.summary.seconds.ttft / s.seconds.ttft
    return f"{said}: the first token came {times:.1f} times as fast as with full attention."


def _facts(answer: Answer, full: Answer | None) -> list[tuple[str, str, str]]:
    """Title, value, and what is said below it."""
    s = answer.summary
    first = f"of {_duration(s.seconds.total)} in all"
    if full is not None and s.seconds.ttft and full.summary.seconds.ttft:
        first = f"full attention: {_duration(full.summary.seconds.ttft)}"
    context = s.context_tokens or 1
    kept = f"{s.tokens_lossless} lossless, {s.tokens_reused} stale of {s.context_tokens}"
    hits = [f"{sum(h.chunks for h in s.hits if h.kind == kind)} {kind}" for kind in ("exact", "alternative")]
    return [
        ("first token", _duration(s.seconds.ttft), first),
        ("reused", f"{100 * (s.tokens_lossless + s.tokens_reused) / context:.0f}%", kept),
        ("recomputed", f"{100 * s.tokens_recomputed / context:.0f}%", f"{s.tokens_recomputed} tokens, {s.recipe}"),
        ("chunks", f"{s.chunks_retrieved}", f"{', '.join(hits)}, {s.chunks_missed} missed"),
    ]


def _duration(seconds: float) -> str:
    """A number and its unit, which stay on one line."""
    return f"{seconds:.2f}\u00a0s" if seconds >= 1 else f"{1e3 * seconds:.0f}\u00a0ms"


def _timeline(seconds: StageSeconds, longest: float) -> list[tuple[str, float, float]]:
    """Stage, where it begins and how long it is, in percent of the page. What lies between stages goes to the end."""
    at, found = 0.0, []
    for stage in STAGES:
        length = 100 * getattr(seconds, stage) / longest
        if length > 0:
            found.append((stage, at, length))
        at += length
    return found


def _chunk(passage: Passage, chunk: ExplainedChunk) -> dict[str, Any]:
    scores = chunk.scores or (None,) * len(chunk.texts)
    recomputed = {*chunk.recomputed}
    kept = "lossless" if chunk.lossless else "reused"
    states = ["recomputed" if i in recomputed else kept for i in range(len(chunk.texts))]
    return {
        "name": passage.name,
        "score": passage.score,
        "kind": chunk.kind or "not looked up",
        "tier": chunk.tier,
        "counts": {state: states.count(state) for state in ("lossless", "reused", "recomputed") if state in states},
        "runs": _runs(states),
        "tokens": list(zip(chunk.texts, states, scores, strict=True)),
    }


def _around(name: str, piece: ExplainedChunk) -> dict[str, Any]:
    """What is no chunk: full attention computes it as well, so nothing of it is computed once more."""
    state = "lossless" if piece.lossless else "computed"
    return {
        "name": name,
        "counts": {state: len(piece.texts)},
        "runs": [(state, len(piece.texts))],
        "tokens": [(text, state, None) for text in piece.texts],
    }


def _runs(states: Sequence[str]) -> list[tuple[str, int]]:
    """States that follow each other, and how often."""
    return [(state, len(list(group))) for state, group in itertools.groupby(states)]
