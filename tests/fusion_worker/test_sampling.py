"""Drawing tokens, and turning them into text that may be sent."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionkv.fusion_worker.decode.sampling import Sampler, SamplingParams
from fusionkv.fusion_worker.decode.text import TextStream
from fusionkv.protos.contract.requests import check_sampling
from fusionkv.protos.fusion.v1.fusion_pb2 import Sampling
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.examples import examples
from tests.fusion_worker.oracle import byte_tokenizer, fallback_tokenizer

LOGITS = torch.tensor([0.0, 2.0, -1.0, 1.0, 0.5])


def draws(count: int, logits: torch.Tensor = LOGITS, **params: Any) -> list[int]:
    sampler = Sampler(SamplingParams(8, **{"temperature": 1.0, "seed": 7, **params}))
    return [sampler.draw(logits) for _ in range(count)]


def test_greedy_takes_the_best_and_the_first_of_equals() -> None:
    assert set(draws(5, temperature=0.0)) == {1}
    assert set(draws(5, torch.tensor([1.0, 3.0, 3.0]), temperature=0.0)) == {1}


def test_a_seed_decides_everything() -> None:
    assert draws(50, seed=3) == draws(50, seed=3)
    assert draws(50, seed=3) != draws(50, seed=4)
    assert len({tuple(draws(50, seed=None)) for _ in range(3)}) == 3
    assert draws(5, seed=(1 << 64) - 1)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_frequencies_are_those_of_the_temperature(temperature: float) -> None:
    count = 4000
    found = torch.bincount(torch.tensor(draws(count, temperature=temperature)), minlength=5).double()
    expected = (LOGITS / temperature).softmax(-1).double() * count
    chi_square = float(((found - expected) ** 2 / expected).sum())
    assert chi_square < 18.5, "4 degrees of freedom: above 18.47 once in a thousand"
    wrong = (LOGITS / temperature * 1.3).softmax(-1).double() * count
    assert float(((found - wrong) ** 2 / wrong).sum()) > 18.5, "the test can't tell a wrong temperature"


def test_top_k_and_top_p_which_keeps_the_fewest_that_reach_it() -> None:
    for top_k, kept in ((1, {1}), (3, {1, 3, 4}), (0, {0, 1, 2, 3, 4}), (99, {0, 1, 2, 3, 4})):
        assert set(draws(300, top_k=top_k)) == kept
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    every = {0, 1, 2, 3}
    for top_p, kept in ((1e-9, {1}), (0.39, {1}), (0.41, {1, 3}), (0.71, {1, 2, 3}), (1.0, every), (0.0, every)):
        assert set(draws(100, logits, top_p=top_p)) == kept


def test_a_token_takes_one_random_number_whatever_the_vocabulary() -> None:
    assert [token // 1000 for token in draws(20, torch.zeros(8000))] == draws(20, torch.zeros(8))


def test_a_large_vocabulary_is_not_ordered_for_a_few_likely_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is where many are needed."""
    ordered, topk = list[int](), torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda x, count: (ordered.append(count), topk(x, count))[1])
    likely = torch.zeros(50_000).index_fill(0, torch.tensor([7, 40_000]), 20.0)
    assert set(draws(40, likely, top_p=0.9)) == {7, 40_000}
    assert len(set(draws(200, torch.zeros(5000), top_p=0.5))) > 150
    assert max(draws(200, torch.arange(5000.0).neg() / 1e9, top_p=0.5)) < 2501
    assert sorted(set(ordered)) == [1024, 5000]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45, 5e-324])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    assert set(draws(20, LOGITS * 1e3, temperature=temperature)) == {1}
    assert set(draws(20, LOGITS, temperature=temperature, top_k=3, top_p=0.9)) == {1}


@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(1e-6, 100.0),
    top_p=st.floats(0.0, 1.0),
    top_k=st.integers(0, 50),
    spread=st.floats(0.0, 1e4),
)
@settings(max_examples=examples(80), deadline=None)
def test_always_some_token(seed: int, temperature: float, top_p: float, top_k: int, spread: float) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(seed % 2**63)) * spread
    for token in draws(3, logits, seed=seed, temperature=temperature, top_p=top_p, top_k=top_k):
        assert 0 <= token < 40
        if top_k:
            assert logits[token] >= logits.topk(min(top_k, 40)).values[-1]


@pytest.mark.parametrize(
    "bad",
    [
        *({"temperature": value} for value in (-0.1, math.nan, math.inf, 101.0)),
        *({"top_p": value} for value in (-0.1, 1.1, math.nan)),
        *({"stop": strings} for strings in ([""], ["x" * 257], ["x"] * 17)),
    ],
    ids=str,
)
def test_values_out_of_range(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        check_sampling(Sampling(**bad))


BYTES = byte_tokenizer().backend_tokenizer


def read(text: str, stop: tuple[str, ...]) -> tuple[list[str], bool]:
    """What is sent after each token, one a byte, and whether a stop string ended it."""
    ids = BYTES.encode(text).ids
    assert len(ids) == len(text.encode())
    stream, sent = TextStream(BYTES, stop), []
    for token in ids:
        sent.append(stream.push(token))
        if stream.stopped:
            return sent, True
    return [*sent, stream.flush()], False


def test_characters_are_sent_whole_and_nothing_of_a_stop_string_early() -> None:
    assert read("aé€😀b", ())[0] == ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]
    assert read("a STO b", ("STOP",))[0] == ["a", " ", "", "", "", "STO ", "b", ""]


def test_of_stop_strings_that_end_together_the_one_that_begins_first_counts() -> None:
    for text, stop, sent in (("aaab", ("aab",), "a"), ("ab--cd", ("cd", "--"), "ab"), ("xyz", ("z", "yz"), "x")):
        pieces, ended = read(text, stop)
        assert ("".join(pieces), ended) == (sent, True)


def test_bytes_that_are_no_text_end_no_answer() -> None:
    """A byte that belongs to no character, right behind a character of bytes."""
    stream = TextStream(fallback_tokenizer(), ())
    pushed = [stream.push(token) for token in (256, *"\u00e9".encode(), 0xA9, 257, 256)]
    assert pushed == ["a", "", "\u00e9", "", "\ufffd b", "a"]


def test_bytes_that_are_no_text_and_special_tokens_wait_for_nothing() -> None:
    """All that wait are decoded again at each step."""
    stream, stray, special = TextStream(BYTES, ()), BYTES.token_to_id("\u00ff"), BYTES.token_to_id("<s>")
    assert "".join(stream.push(stray) for _ in range(12)) == "\ufffd" * 9
    assert [stream.push(token) for token in BYTES.encode("a").ids] == ["\ufffd" * 3 + "a"]
    assert not any(stream.push(special) for _ in range(12))
    assert len(stream._characters._waiting) == 3
    assert [stream.push(token) for token in BYTES.encode("\u00e9b").ids] == ["", "\u00e9", "b"]


alphabet = st.sampled_from(["a", "b", "é", "😀"])


@given(text=st.text(alphabet, max_size=30), stop=st.lists(st.text(alphabet, min_size=1, max_size=4), max_size=3))
@settings(max_examples=examples(150), deadline=None)
def test_any_text_and_stop_strings(text: str, stop: list[str]) -> None:
    pieces, ended = read(text, tuple(stop))
    sent = "".join(pieces)
    assert text.startswith(sent)
    assert not any(s in sent for s in stop)
    assert ended == any(s in text for s in stop)
    if ended:
        assert any(text[len(sent) :].startswith(s) for s in stop)
    else:
        assert sent == text
