"""The page of `ask --explain`, by itself: right, whole without any other file, and legible in a real browser."""

import re
from pathlib import Path
from typing import Any

import browser
import pytest
from bs4 import BeautifulSoup

from fusionkv.gateway import explain
from fusionkv.gateway.client.results import Answer, Passage
from fusionkv.protos.answer.v1.answer_pb2 import ExplainedChunk, Explanation, StageSeconds, Summary, TierHits, Verdict
from tests.pages import Page

# What a careless page would run, or break on.
EVIL = "<script>alert('x')</script> & \"quoted\" <b>"


def summary(recipe: str, total: float, replaced: str = "") -> Summary:
    parts = (0.1, 0.02, 0, 0.05, 0.1, 0, 0.08, 0.25, 0.4, 0.6, 1.0)
    names = StageSeconds.DESCRIPTOR.fields_by_name
    seconds = StageSeconds(**{name: total * part for name, part in zip(names, parts, strict=True)})
    return Summary(
        finish_reason="end", seconds=seconds, hits=[TierHits(kind="alternative", tier="disk", chunks=1, tokens=60)],
        chunks_retrieved=2, chunks_missed=1, prompt_tokens=140, context_tokens=120, tokens_lossless=60,
        tokens_reused=40, tokens_recomputed=20, tokens_encoded=60, tokens_generated=5, bytes_fetched=1 << 20,
        recipe=recipe, ratio=0.2, trace_id="0af7651916cd43dd8448eb211c80319c", recipe_replaced=replaced,
    )  # fmt: skip


@pytest.fixture(scope="module")
def page() -> str:
    words = [f"word{i} " for i in range(58)]
    sources = (
        Passage("reports/a-very-long-name-of-a-document-that-has-no-place-to-break.md", 0, "a", 0.9, 60),
        Passage(EVIL, 1, "b", 0.5, 60),
    )
    missed = ExplainedChunk(texts=[*words, EVIL, "x" * 300], kind="miss", tier="none", lossless=True)
    found = ExplainedChunk(texts=[*words, "a", "b"], kind="alternative", tier="disk", scores=[0.5] * 60)
    found.recomputed.extend(range(20))
    answer = Answer(f"The code is 535. {EVIL}", sources, summary("deeplayer+primed", 0.08, f"it strays {EVIL}"))
    full = Answer("The code is 535.", sources, summary("full_attention", 0.2))
    system = ExplainedChunk(texts=["Answer ", "this."], lossless=True)
    question = ExplainedChunk(texts=["Which ", "code? ", EVIL], recomputed=range(3))
    verdicts = [
        Verdict(recipe="fusionrag", ratio=0.15, verdict="safe", why=f"it holds {EVIL}"),
        Verdict(recipe="ape", ratio=0.0, verdict="unsafe", why="it strays"),
    ]
    explanation = Explanation(chunks=(missed, found), system=system, question=question, verdicts=verdicts)
    return explain.render(explain.template(), f"Which code? {EVIL}", answer, explanation, full)


def test_the_page_is_whole_and_runs_nothing(page: str) -> None:
    parser = Page(page)
    assert parser.open == []
    tags = {tag for tag, _ in parser.seen}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    assert not [a for _, attributes in parser.seen for a in attributes if a in ("src", "href") or a.startswith("on")]
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert not re.search(r"url\(|@import", style)
    soup = BeautifulSoup(page, "html.parser")
    assert [each.text for each in soup.select("h1")] == [f"Which code? {EVIL}"]


def test_the_page_of_a_slower_answer_says_so() -> None:
    slow, fast = (Answer("535", (), summary(name, ttft)) for name, ttft in (("a3", 0.2), ("full_attention", 0.1)))
    page = explain.render(explain.template(), "Which code?", slow, Explanation(), fast)
    saved = BeautifulSoup(page, "html.parser").select_one(".saved")
    assert saved is not None
    assert saved.text.endswith("; the first token came no sooner than with full attention.")


def test_a_recomputed_line_break_is_seen_and_the_last_leaves_no_empty_lines() -> None:
    assert explain._shown("\n\n", "recomputed", last=False) == "↵\n\n"
    assert explain._shown("\n", "recomputed", last=True) == "↵"
    assert explain._shown(".\n\n", "reused", last=True) == "."
    assert explain._shown("\n", "reused", last=False) == "\n"


def test_the_page_says_what_happened(page: str) -> None:
    soup = BeautifulSoup(page, "html.parser")
    saved = "100 of 120 context tokens were not recomputed; the first token came 2.5 times sooner than with full"
    for selector, texts in (
        (".saved", [f"{saved} attention."]),
        (".answers .text", [f"The code is 535. {EVIL}", "The code is 535."]),
        (".answers h3 .badge", ["this answer", "different answer"]),
        (".notice", [f"Answered by full attention instead: it strays {EVIL}"]),
    ):
        assert [each.text for each in soup.select(selector)] == texts
    verdicts = [[cell.text for cell in row.select("td")] for row in soup.select(".verdicts tr")[1:]]
    assert verdicts == [["fusionrag", "0.15", "safe", f"it holds {EVIL}"], ["ape", "0", "unsafe", "it strays"]]
    before, first, second, behind = soup.select("details")
    assert "lossless" in first.summary.text  # type: ignore[union-attr]
    assert "alternative from disk" in second.summary.text  # type: ignore[union-attr]
    states = [token["class"] for token in second.select(".tokens i")]
    assert states == [["recomputed"]] * 20 + [["reused"]] * 40
    assert second.select(".tokens i")[0]["title"] == "recomputed, score 0.50"
    assert first.select(".tokens i")[0]["title"] == "lossless"
    for piece, name, state, text in (
        (before, "system prompt", "lossless", "Answer this."),
        (behind, "question", "computed", f"Which code? {EVIL}"),
    ):
        assert [each.text for each in piece.select("summary b, summary .badge")] == [name]
        assert "".join(token.text for token in piece.select(".tokens i")) == text
        assert {(token["title"], *token["class"]) for token in piece.select(".tokens i")} == {(state, state)}
    # The whole prompt is in the ribbon, in its order.
    assert [len(part.select("u")) for part in soup.select(".ribbon div")] == [1, 1, 2, 1]
    for bar, share in zip(soup.select(".bar"), (40.0, 100.0), strict=True):
        stretches = [re.findall(r"(left|width):([\d.]+)%", str(i["style"])) for i in bar.select("i")]
        assert stretches
        ends = [sum(float(number) for _, number in stretch) for stretch in stretches]
        assert max(ends) == pytest.approx(share, abs=0.01)


MEASURE = """(() => {
  // Parts of words that stand on two lines.
  const broken = (of) => {
    const texts = document.createNodeIterator(of, NodeFilter.SHOW_TEXT), found = [];
    for (let node = texts.nextNode(); node; node = texts.nextNode())
      for (const word of node.data.matchAll(/[^\\s+_]+/g)) {
        const range = document.createRange();
        range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
        if (new Set([...range.getClientRects()].map((at) => at.top)).size > 1) found.push(word[0]);
      }
    return found;
  };
  const css = (of) => getComputedStyle(of), token = css(document.querySelector(".tokens .recomputed"));
  const rects = (of) => [...document.querySelectorAll(of)].map((each) => each.getBoundingClientRect());
  return {
    width: document.documentElement.scrollWidth, room: document.documentElement.clientWidth,
    font: css(document.body).fontSize, ground: css(document.body).backgroundColor, ink: css(document.body).color,
    outline: token.outlineStyle, answers: rects(".answers section").map((at) => at.left),
    sides: ["h1", ".answers .text", ".tokens", "summary b"].map((of) => css(document.querySelector(of)).unicodeBidi),
    bars: rects(".bar i").map((at) => at.width),
    broken: [...document.querySelectorAll("small, h3 span")].flatMap(broken),
  };
})()"""


def lightness(colour: str) -> float:
    red, green, blue = map(int, re.findall(r"\d+", colour)[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


async def test_the_page_in_a_browser(chromium: str, page: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page)
    measured: list[dict[str, Any]] = []
    async with browser.browsing(chromium) as shown:
        for width, dark in ((390, False), (720, False), (1100, True)):
            await shown.size(width, 700, dark=dark)
            await shown.open(f"file://{tmp_path / 'page.html'}")
            measured.append(await shown.value(MEASURE))
    for found in measured:
        # Nothing sticks out, so nobody scrolls sideways.
        assert found["width"] == found["room"] <= 1100
        assert float(found["font"].removesuffix("px")) >= 16
        assert found["outline"] == "solid"
        assert all(bar >= 1 for bar in found["bars"])
        assert found["broken"] == []
        # A line in Arabic or Hebrew begins at the right.
        assert found["sides"] == ["plaintext"] * 4
        assert abs(lightness(found["ink"]) - lightness(found["ground"])) > 0.6
    phone, _, desk = measured
    # One below the other on a phone, side by side on a desk.
    assert len(set(phone["answers"])) == 1
    assert len(set(desk["answers"])) == 2
    assert lightness(phone["ground"]) > 0.8 > 0.3 > lightness(desk["ground"])
