"""The tokenizer writes any text and keeps the generator's words and syllables whole."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from fusionkv.fusion_worker.evaluate.data import stories as tasks
from fusionkv.fusion_worker.evaluate.data import words
from fusionkv.fusion_worker.load.anchors import cuts
from fusionkv.models.curriculum import question_pieces
from fusionkv.models.tokenizer import anchor_tokens, build

TOKENIZER = build()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(encode(text)) == text


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n \t", "naïve café", "数字 ٣٤ 🙂", "a" * 3000, "\x00\x7f", "0123 4567"]
)
def test_odd_texts_round_trip(text: str) -> None:
    assert TOKENIZER.decode(encode(text)) == text


def test_a_saved_tokenizer_is_the_same(tmp_path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "Report Velkasta. The code of Markas is 417.\n"
    assert again.encode(text, add_special_tokens=False) == encode(text)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(again, name) == getattr(TOKENIZER, name)


def test_names_are_one_token_a_syllable_and_numbers_one_a_digit() -> None:
    for first in words.FIRST:
        for second in words.SECOND + words.PLACE:
            assert TOKENIZER.tokenize(f" {first}{second}") == [f"Ġ{first}", second]
            for third in words.THIRD if second in words.SECOND else []:
                assert TOKENIZER.tokenize(f" {first}{second}{third}") == [f"Ġ{first}", second, third]
    assert TOKENIZER.tokenize(" 417") == ["Ġ4", "1", "7"]


@pytest.mark.parametrize(
    ("percent", "segment"), [(p, s) for s in (1, 10, 16, 20, 25) for p in range(100) if s * p % 100 == 0]
)
def test_a_worker_cuts_the_segments_that_anchor_tokens_were_made_for(percent: int, segment: int) -> None:
    names = anchor_tokens(percent, segment)
    (cut,) = cuts(range(segment), range(len(names)), percent)
    assert (len(cut.text), len(cut.anchors)) == (segment, len(names))
    assert len(cuts(range(segment + 1), range(len(names)), percent)) == 2


@pytest.mark.parametrize(
    ("percent", "segment"), [(30, 16), (60, 16), (99, 16), (100, 16), (-100, 16), (50, 0), (50, 15)]
)
def test_rates_that_cut_a_token_are_refused(percent: int, segment: int) -> None:
    with pytest.raises(ValueError, match="not a whole number of anchor tokens"):
        anchor_tokens(percent, segment)


def test_pieces_are_cut_where_tokens_end() -> None:
    made = tasks.sample(random.Random(3), "train", tasks.PROMPT)
    for page in made.pages:
        assert [token for piece in page.pieces for token in encode(piece)] == encode(page.text)
    for question in made.questions:
        pieces = question_pieces(question.text)
        assert "".join(pieces) == f"Question: {question.text}\nAnswer:"
        assert [token for piece in pieces for token in encode(piece)] == encode("".join(pieces))
