"""CacheClip's second model: pages read alone, the sentences that lead to an answer, and its attention on them."""

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from fusionkv.fusion_worker.evaluate.data.stories import PROMPT, SYSTEM, TASKS, sample
from fusionkv.fusion_worker.select.auxiliary import carry_over, spans_of
from fusionkv.models import auxiliary
from fusionkv.models import tokenizer as tokenizers
from fusionkv.models.auxiliary import PageEncoder, PageRow, Run, last_attention, leads, losses, main, new_model
from fusionkv.models.curriculum import NONE, question_pieces
from fusionkv.models.train import collate

STORIES = 6


New = tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]


@pytest.fixture(scope="module")
def new() -> New:
    return new_model(7)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small batches, on one thread: on matrices of this size a second one of a busy machine is waited for."""
    monkeypatch.setattr(auxiliary, "_BATCH", 4)
    monkeypatch.setattr(auxiliary, "_WORDS", replace(auxiliary._WORDS, batch=4))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer(new: New) -> PreTrainedTokenizerFast:
    return new[1]


def rows(tokenizer: PreTrainedTokenizerFast, tuned: bool) -> list[PageRow]:
    encoder, rng = PageEncoder(tokenizer), random.Random(6)
    made = [sample(rng, "heldout", PROMPT) for _ in range(STORIES)]
    return [row for one in made for row in encoder.story(rng, one, tuned)]


@pytest.mark.parametrize("task", TASKS)
def test_a_sentence_of_every_needed_page_leads_to_the_answer(task: str) -> None:
    made = [sample(random.Random(seed), "heldout", PROMPT) for seed in range(12)]
    asked = [(one, question) for one in made for question in one.questions if question.task == task]
    assert asked
    for one, question in asked:
        found = sorted(leads(one, question))
        pages = [page for page, _ in found]
        assert set(pages) == set(question.needs)
        # Both codes may stand on one page.
        assert len(pages) == len(question.needs)
        said = [one.pages[page].sentences[number].text for page, number in found]
        assert all(any(f" {part}." in text for text in said) for part in question.answer.split(" and "))


@pytest.mark.parametrize("text", ["Report Fenhinzu. The code of Delgan is 599.\n", "naïve 日本 \t\x00 […]", ""])
def test_the_second_tokenizer_loses_nothing(text: str, tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_scores_find_their_tokens_in_the_other_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    """A score on each token of the second model in turn arrives at the primary's tokens over the same characters."""
    primary, second = tokenizers.build().backend_tokenizer, tokenizer.backend_tokenizer
    for page in sample(random.Random(11), "heldout", PROMPT).pages:
        text, spans = spans_of(primary, primary.encode(page.text + "\n", add_special_tokens=False).ids)
        own = second.encode(text, add_special_tokens=False).offsets
        assert text == page.text + "\n"
        assert own != spans, "the tokenizers cut every page in another way"
        for (start, stop), one in zip(own, torch.eye(len(own)), strict=True):
            found = carry_over(one, own, spans).nonzero().flatten().tolist()
            assert found == [i for i, (a, b) in enumerate(spans) if a < stop and start < b]
            assert found


def test_the_second_tokenizer_cuts_in_another_way(tokenizer: PreTrainedTokenizerFast) -> None:
    """The figures of models/README.md: 1.2 times as many tokens, seven in ten of them the same."""
    primary, second, rng = tokenizers.build().backend_tokenizer, tokenizer.backend_tokenizer, random.Random(11)
    first = own = same = 0
    for page in (page for _ in range(25) for page in sample(rng, "heldout", PROMPT).pages):
        one, other = (each.encode(page.text, add_special_tokens=False).offsets for each in (primary, second))
        assert one != other
        first, own, same = first + len(one), own + len(other), same + len({*one} & {*other})
    assert round(own / first, 1) == 1.2
    assert 0.7 <= same / own < 0.8


def test_a_row_is_what_the_worker_asks(tokenizer: PreTrainedTokenizerFast) -> None:
    """System text, page and question in the second model's tokens, as they are when each is encoded as a whole."""
    encode = partial(tokenizer.encode, add_special_tokens=False)
    made = sample(random.Random(5), "heldout", PROMPT)
    asked = {tuple(encode("".join(question_pieces(question.text)))) for question in made.questions}
    found = PageEncoder(tokenizer).story(random.Random(5), made, True)
    for page, row in zip(made.pages, found, strict=True):
        context = row.ids[: row.segment.index(1)]
        assert context == encode("<bos>" + SYSTEM) + encode(page.text + "\n")
        assert row.position[: len(context)] == list(range(len(context)))
        for span in row.rows:
            assert row.position[span.start] == len(context)
            assert tuple(row.ids[span.start : span.stop]) in asked


def test_what_a_page_is_asked(tokenizer: PreTrainedTokenizerFast) -> None:
    end = tokenizer.eos_token_id
    seen = set()
    for row in [*rows(tokenizer, False), *rows(tokenizer, True)]:
        for segment, (task, span, wanted) in enumerate(zip(row.tasks, row.rows, row.wanted, strict=True), 1):
            targets = [t for t, of in zip(row.answer, row.segment, strict=True) if of == segment and t != NONE]
            helps = wanted != [0]
            assert all(row.page[t] == 1 and t < span.start for t in wanted) or not helps
            assert (targets == [end]) == (not helps), "ends at once exactly where the page does not help"
            assert (len(targets) > 1) == (task != "none"), "answered exactly where the page says all"
            seen.add((task != "none", helps))
    assert seen == {(True, True), (False, True), (False, False)}
    asked = [pair for row in rows(tokenizer, False) for pair in zip(row.tasks, row.wanted, strict=True)]
    # The base is not asked about more pages.
    assert all((task == "none") == (wanted == [0]) for task, wanted in asked)


def test_the_attention_that_is_trained_is_the_models_own(new: New) -> None:
    model, tokenizer = new
    batch = collate(rows(tokenizer, True)[:3])
    inputs = {"input_ids": batch.ids, "attention_mask": batch.mask.float(), "position_ids": batch.position}
    implementation = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            out = model(**inputs, output_hidden_states=True, output_attentions=True, use_cache=False)
            found = last_attention(model, out.hidden_states[-2], batch)
    finally:
        model.set_attn_implementation(implementation)
    torch.testing.assert_close(found, out.attentions[-1].mean(1), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_fine_tuning_moves_the_attention(new: New) -> None:
    """A few steps on fresh stories; measured on stories that they had not."""
    run = Run(*new, seed=1, tuned=True)
    kept = rows(run.tokenizer, True)[:4]

    def measured() -> float:
        with torch.no_grad():
            return losses(run.model, collate(kept), run.tokenizer.eos_token_id, kept).attention.item()

    before = measured()
    for _ in range(4):
        run.step(0.0)
    assert measured() < before


@pytest.mark.usefixtures("few")
def test_a_base_begins_with_words(new: New) -> None:
    run = Run(*new, seed=1, tuned=False)
    assert " words " in run.step(0.0)
    assert " pages " in run.step(0.9), "for a part of the run at most"
    run.smooth["words"] = 1.0
    assert " pages " in run.step(0.0), "until they are known"


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_the_command_writes_a_base_and_fine_tunes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    for flags in (["--out", str(base)], ["--base", str(base), "--out", str(tuned)]):
        monkeypatch.setattr(sys, "argv", ["auxiliary", "--minutes", "0.01", *flags])
        main()
    text = "The code of Delgan is 599."
    one, other = (PreTrainedTokenizerFast.from_pretrained(path) for path in (base, tuned))
    assert one.encode(text) == other.encode(text)
    before, after = (Qwen2ForCausalLM.from_pretrained(path).state_dict() for path in (base, tuned))
    assert any(not value.equal(after[name]) for name, value in before.items())
