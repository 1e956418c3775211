"""Texts shortened by whole sentences: what stays is the text's own, in its order, and no more than was asked for."""

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionkv.gateway.ingest.parse import _sentences, shorten
from fusionkv.protos.runtime.errors import FailedPrecondition
from tests.fuzz import growth

PAGE = (
    "Report Velnora. The code of Delgan is 599. Zoe scored 41. The grey lake rests near the code house.\n"
    "The code of Amy is 12! Who scored like Zoe? Amy scored like Zoe of the code house.\n"
)


@pytest.mark.parametrize("left_out", [0.25, 0.5, 0.75])
def test_what_stays_are_sentences_in_their_order(left_out: float) -> None:
    short = shorten(PAGE, left_out)
    assert 0 < len(short) <= (1 - left_out) * len(PAGE) + 1
    assert short.endswith("\n")
    sentences = re.split(r"(?<=[.!?])\s", PAGE)
    kept = [s.strip() for s in sentences if s.strip() and s.strip() in short]
    at = [short.index(s) for s in kept]
    assert at == sorted(at)
    assert "".join("".join(kept).split()) == "".join(short.split())


def test_nothing_left_out_is_the_text_itself() -> None:
    assert shorten(PAGE, 0.0) == PAGE


@given(st.text(alphabet="ab .!?\n\u3002\u00e9", max_size=300), st.floats(0, 0.99))
def test_any_text_keeps_a_part_of_itself(text: str, left_out: float) -> None:
    short = shorten(text, left_out)
    assert len(short) <= len(text)
    assert bool(short.strip()) == bool(text.strip())
    left = iter(text)
    assert all(character in left for character in short), "in its order"


def test_a_long_text_keeps_its_share_everywhere() -> None:
    text = " ".join(f"Sentence number {i} of the part {i // 100} is here." for i in range(500))
    short = shorten(text, 0.5)
    for part in range(5):
        assert 40 <= short.count(f"part {part} ") <= 60


def test_the_time_to_find_sentences_grows_with_the_text() -> None:
    growth.check(lambda n: "A sentence. " * n, growth.in_thread(_sentences), 15_000)


def test_without_sumy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sumy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sumy", None)
    with pytest.raises(FailedPrecondition, match=r"pip install 'fusionkv\[compress\]'"):
        shorten(PAGE, 0.5)
