"""`fusionkv ask --explain`: one page on how an answer came about, that needs nothing else to be read."""

from dataclasses import asdict
from importlib import resources
from typing import TYPE_CHECKING, Any

from fusionkv.gateway.files import UsageError
from fusionkv.gateway.results import Answer, ExplainedChunk, Explanation, Passage, StageSeconds

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


def template() -> "Template":
    """The page's template. Raises UsageError when its library is missing."""
    try:
        from jinja2 import Environment
    except ModuleNotFoundError as error:
        raise UsageError("--explain needs the package jinja2: pip install 'fusionkv[gateway]'") from error
    text = resources.files(__package__).joinpath("explain.html").read_text(encoding="utf-8")
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)


def render(page: "Template", question: str, answer: Answer, explanation: Explanation, full: Answer) -> str:
    """The page as HTML. `full` is the answer by full attention, over the same chunks."""
    longest = max(answer.summary.seconds.total, full.summary.seconds.total) or 1.0
    named = [("this answer", answer), ("full attention", full)]
    return page.render(
        question=question,
        answers=[(name, a.text.strip(), a.summary) for name, a in named],
        same=answer.text == full.text,
        summary=answer.summary,
        stages=STAGES,
        timelines=[(name, _timeline(a.summary.seconds, longest), a.summary.seconds) for name, a in named],
        seconds=[asdict(a.summary.seconds) for _, a in named],
        longest=longest,
        chunks=[_chunk(p, c) for p, c in zip(answer.sources, explanation.chunks, strict=True)],
    )


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
    kept = "lossless" if chunk.lossless else "reused"
    states = ["recomputed" if i in chunk.recomputed else kept for i in range(len(chunk.texts))]
    return {
        "name": f"{passage.document}#{passage.position}",
        "score": passage.score,
        "kind": chunk.kind or "not looked up",
        "tier": chunk.tier,
        "counts": {state: states.count(state) for state in ("lossless", "reused", "recomputed") if state in states},
        "tokens": list(zip(chunk.texts, states, scores, strict=True)),
    }
