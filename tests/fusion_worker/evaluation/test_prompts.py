"""Prompts are those the reference models learned, chunks are the text, and neighbours come by tf-idf."""

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from fusionkv.fusion_worker.evaluate.data import tasks
from fusionkv.fusion_worker.evaluate.data.neighbours import Neighbours, Similarity
from fusionkv.fusion_worker.evaluate.data.prompts import Prompter
from fusionkv.fusion_worker.evaluate.data.samples import Library, Sample
from fusionkv.fusion_worker.evaluate.data.stories import Sample as Story
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.prompt import Chunk
from fusionkv.models import evaluate

TEXT = "The lake is wide. Ada owns the lamp.\nBen chose the rope. The sky\u00e9 is calm.\n" * 9


def test_a_reference_prompt_is_as_in_training(model: Model, reference_model: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(reference_model)
    task, prompter = tasks.reference("coref", 3), Prompter(model, 512)
    for sample, (made, question) in zip(task.samples, tasks.asked("coref", 3), strict=True):
        prompt, left_out = prompter.prompt(sample, task.chat, 4)
        (expected,) = evaluate.lay_out([Story(made.pages, (question,))], tokenizer).ids.tolist()
        assert [*prompt.ids.tolist(), *prompter.ids(sample.answers[0])] == expected
        assert (len(prompt.chunks), left_out) == (len(made.pages), 0)


# Sentences have 5 to 11 tokens, lines 11 or 18: the last quarter of 40 holds a sentence's end, that of 80 a line's.
@pytest.mark.parametrize(("size", "borders"), [(5, ""), (16, ""), (40, ".\n"), (80, "\n"), (1000, "\n")])
def test_chunks_are_the_text_cut_at_the_best_border(model: Model, size: int, borders: str) -> None:
    prompter = Prompter(model, size)
    chunks = prompter.split(TEXT)
    assert tuple(i for chunk in chunks for i in chunk) == prompter.ids(TEXT)
    assert all(0 < len(chunk) <= size for chunk in chunks)
    ends = [model.tokenizer.decode(chunk) for chunk in chunks]
    assert all(end[-1] in "\n. " or start[0] in " \n" for end, start in itertools.pairwise(ends))
    assert not borders or all(end[-1] in borders for end in ends)
    assert prompter.split("") == []


def test_a_control_token_counts_in_the_chat_template_alone(model: Model) -> None:
    template = dataclasses.replace(model.template, head="<bos>user ", tail="<eos>")
    prompter = Prompter(dataclasses.replace(model, template=template), 64)
    sample = Sample("Read <eos>\n", ("one <bos> page",), "Which?", ("x",), opening=" It is")
    prompt, _ = prompter.prompt(sample, True, 1)
    ends, starts = max(model.ends), model.tokenizer.token_to_id(model.begin)
    assert prompt.system.ids[0] == starts
    assert prompt.system.ids.count(ends) == 0
    assert prompt.chunks[0].ids.count(starts) == 0
    opening = prompter.ids(" It is")
    assert prompt.question == (*prompter.ids("Which?"), ends, *opening)
    plain, _ = prompter.prompt(sample, False, 1)
    assert (plain.system.ids.count(starts), plain.question) == (1, (*prompter.ids("Which?"), *opening))


def test_the_middle_is_left_out_until_the_prompt_fits(model: Model) -> None:
    sample = Sample("Read.\n", tuple(f"{i} is here.\n" for i in range(9)), "Which?", ("x",))
    whole, _ = Prompter(model, 64).prompt(sample, False, 1)
    answer = len(whole.chunks[0]) + 1
    cut, left_out = Prompter(dataclasses.replace(model, max_tokens=whole.tokens), 64).prompt(sample, False, answer)
    assert left_out == 2
    assert cut.tokens + answer <= whole.tokens
    assert [whole.chunks.index(c) for c in cut.chunks] == [0, 1, 2, 3, 6, 7, 8]
    for length in (20, 2):  # less than the question alone
        with pytest.raises(ValueError, match=f"leaves no room in {length} "):
            Prompter(dataclasses.replace(model, max_tokens=length), 64).prompt(sample, False, 5)


# 9 stands everywhere and says nothing; 7 is rare.
A, B, C, D, E = (Chunk(ids) for ids in ((9, 1, 2), (9, 1, 1, 3), (9, 2, 7), (9, 7, 7, 4), (9, 5)))


def cosine(a: dict[int, float], b: dict[int, float]) -> float:
    dot = sum(weight * b.get(token, 0.0) for token, weight in a.items())
    return dot / math.sqrt(sum(w * w for w in a.values()) * sum(w * w for w in b.values()))


def test_the_order_is_that_of_tf_idf_cosines() -> None:
    pool = [A, B, C, D, E]
    holders = {i: sum(i in chunk.ids for chunk in pool) for chunk in pool for i in chunk.ids}
    vectors = [{i: c.ids.count(i) * math.log(len(pool) / holders[i]) for i in set(c.ids)} for c in pool]
    for at, chunk in enumerate(pool):
        scores = [-round(cosine(vectors[at], other), 9) for other in vectors]
        wanted = sorted((i for i in range(len(pool)) if i != at), key=lambda i: (scores[i], i))
        assert Similarity(pool).nearest(chunk, 4) == [pool[i] for i in wanted]
    assert Similarity(pool).nearest(C, 1) == [D]


def test_equals_come_in_the_order_of_the_pool_and_nothing_twice() -> None:
    twin = Chunk((9, 1, 2, 8))
    pool = [E, A, twin, Chunk(A.ids), B]
    assert Similarity(pool).nearest(E, 9) == [A, twin, B]
    assert Similarity([E]).nearest(E, 3) == []
    assert Similarity([A, B]).nearest(Chunk((1, 400_000)), 1) == [A]  # none of its tokens tells A and B apart


@pytest.fixture(scope="module")
def neighbours(model: Model) -> Neighbours:
    return Neighbours(model.max_tokens, Prompter(model, 512))


def test_a_library_is_all_samples_of_a_file(neighbours: Neighbours) -> None:
    pages = ["Ada owns the lamp.", "Ben chose the rope.", "Ada owns the rope.", "The lake is wide."]
    samples = tuple(Sample("", (page,), "q", ("a",)) for page in pages)
    similarity = neighbours.among(Library(samples), ())
    assert len(similarity.chunks) == len(pages)
    assert neighbours.among(Library(samples), ()) is similarity, "read once"
    lamp, _, rope, _ = similarity.chunks
    assert similarity.nearest(lamp, 1) == [rope]
    assert neighbours.among(Library(samples[:2]), ()) is not similarity


def test_as_many_as_the_model_takes(neighbours: Neighbours) -> None:
    most = neighbours._max_tokens
    near = [Chunk((1,) * 10), Chunk((2,) * (most - 20)), Chunk((3,))]
    assert neighbours.before(Chunk((4,) * 5), Chunk((5,) * 5), near) == near[:2]
    assert neighbours.before(Chunk((4,) * 5), Chunk((5,) * 6), near) == near[:1]
