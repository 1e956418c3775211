"""A self-contained HTML page that explains an answer, for `ask --explain`."""

import itertools
from typing import TYPE_CHECKING, Any

from fusionkv.gateway.cli.connect import UsageError
from fusionkv.gateway.client.results import Answer, Explanation, Passage, as_dict
from fusionkv.protos.answer.v1.answer_pb2 import ExplainedChunk, StageSeconds
from fusionkv.protos.runtime.settings import extra

if TYPE_CHECKING:
    from jinja2 import Template

# The recipe that answers are compared with.
REFERENCE = "full_attention"
# The stages of a request in order, each with the hue of its colour.
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
# How the page describes finish reasons other than the end of the answer.
ENDS = {"max_tokens": ", cut off at max_tokens", "stop_string": ", ended by a stop string"}


def template() -> "Template":
    """The page's template. Raises UsageError if jinja2 is not installed."""
    with extra("gateway", "--explain", UsageError):
        from jinja2 import Environment, PackageLoader
    loader = PackageLoader("fusionkv.gateway", "pages")
    pages = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return pages.get_template("explain.html")


def render(page: "Template", question: str, answer: Answer, explanation: Explanation, full: Answer) -> str:
    """Renders the page as HTML; `full` is the answer to the same question by full attention."""
    answers = [("this answer", answer), ("full attention", full)]
    longest = max(a.summary.seconds.total for _, a in answers) or 1.0
    return page.render(
        question=question,
        answers=[(name, a.text.strip(), a.summary) for name, a in answers],
        same=answer.text == full.text,
        same_chunks=answer.sources == full.sources,
        summary=answer.summary,
        saved=_saved(answer, full),
        facts=_facts(answer, full),
        duration=_duration,
        shown=_shown,
        stages=STAGES,
        timelines=[(name, _timeline(a.summary.seconds, longest), a.summary.seconds) for name, a in answers],
        seconds=[as_dict(a.summary.seconds) for _, a in answers],
        verdicts=explanation.verdicts,
        ends=ENDS,
        longest=longest,
        pieces=[
            _around("system prompt", explanation.system),
            *(_chunk(p, c) for p, c in zip(answer.sources, explanation.chunks, strict=True)),
            _around("question", explanation.question),
        ],
    )


def _saved(answer: Answer, full: Answer) -> str:
    s = answer.summary
    if not s.context_tokens or s.tokens_recomputed == s.context_tokens:
        return "Nothing was reused: the whole context was computed."
    saved = f"{s.context_tokens - s.tokens_recomputed:,} of {s.context_tokens:,} context tokens were not recomputed"
    if not (s.seconds.ttft and full.summary.seconds.ttft):
        return f"{saved}."
    times = full.summary.seconds.ttft / s.seconds.ttft
    if times < 1.05:
        return f"{saved}; the first token came no sooner than with full attention."
    return f"{saved}; the first token came {times:.1f} times sooner than with full attention."


def _facts(answer: Answer, full: Answer) -> list[tuple[str, str, str]]:
    s = answer.summary
    context = s.context_tokens or 1
    kept = f"{s.tokens_lossless:,} lossless, {s.tokens_reused:,} stale of {s.context_tokens:,}"
    hits = [f"{sum(h.chunks for h in s.hits if h.kind == kind)} {kind}" for kind in ("exact", "alternative")]
    return [
        ("first token", _duration(s.seconds.ttft), f"full attention: {_duration(full.summary.seconds.ttft)}"),
        ("reused", f"{100 * (s.tokens_lossless + s.tokens_reused) / context:.0f}%", kept),
        ("recomputed", f"{100 * s.tokens_recomputed / context:.0f}%", f"{s.tokens_recomputed:,} tokens, {s.recipe}"),
        ("chunks", f"{s.chunks_retrieved}", f"{', '.join(hits)}, {s.chunks_missed} missed"),
    ]


def _duration(seconds: float) -> str:
    """A number and its unit, joined by a no-break space."""
    return f"{seconds:.2f}\u00a0s" if seconds >= 1 else f"{1e3 * seconds:.0f}\u00a0ms"


def _timeline(seconds: StageSeconds, longest: float) -> list[tuple[str, float, float]]:
    """Name, start and length of each stage, in percent of the page's width. Gaps between stages are at the end."""
    start, stages = 0.0, []
    for stage in STAGES:
        length = 100 * getattr(seconds, stage) / longest
        if length > 0:
            stages.append((stage, start, length))
        start += length
    return stages


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
        "runs": [(state, len(list(group))) for state, group in itertools.groupby(states)],
        "tokens": list(zip(chunk.texts, states, scores, strict=True)),
    }


def _around(name: str, piece: ExplainedChunk) -> dict[str, Any]:
    """A part of the prompt that is not a chunk. Full attention computes it too, so it never counts as recomputed."""
    state = "lossless" if piece.lossless else "computed"
    return {
        "name": name,
        "counts": {state: len(piece.texts)},
        "runs": [(state, len(piece.texts))],
        "tokens": [(text, state, None) for text in piece.texts],
    }


def _shown(text: str, state: str, last: bool) -> str:
    """A token's text on the page: a recomputed line break has a sign, and the last token leaves no empty lines."""
    sign = "↵" if state == "recomputed" and text and not text.strip("\n") else ""
    return sign + (text.rstrip("\n") if last else text)
