"""Training sequences with pages read alone: who sees whom, and where link tokens stand."""

import dataclasses
import random

import pytest
import torch

from fusionkv.fusion_worker.evaluate.data.stories import PROMPT, sample
from fusionkv.models import curriculum, tokenizer
from fusionkv.models.train import collate

LINKS = 2
STAGE = curriculum.RECIPES["linked"].stages[-1]


@pytest.fixture(scope="module")
def encoder() -> curriculum.Encoder:
    return curriculum.Encoder(tokenizer.build(LINKS, PROMPT.pages[1]), (LINKS,))


def test_pages_read_alone_and_links_that_see_all(encoder: curriculum.Encoder) -> None:
    made = encoder.make(random.Random(3), dataclasses.replace(STAGE, alone=1.0))
    names = tokenizer.build(LINKS, PROMPT.pages[1]).convert_ids_to_tokens(made.ids)
    wanted = [f"<|link_{page}_{link}|>" for page in range(1, 9) for link in (1, 2)]
    links = [i for i, name in enumerate(names) if name.startswith("<|link")]
    assert [names[i] for i in links] == wanted
    context = made.segment.index(1)
    assert made.position[:context] == list(range(context)), "link tokens take positions of their own"
    pages = {page: [i for i in range(context) if made.page[i] == page] for page in range(9)}
    mask = collate([made]).mask[0, 0]
    for page in range(1, 9):
        *own, first, second = pages[page]
        assert [first, second] == links[2 * page - 2 : 2 * page], "they stand behind their page"
        for row in (*own, first, second, context):
            seen = set(torch.nonzero(mask[row] == 0)[:, 0].tolist())
            before = set(range(row + 1))
            assert seen == (before & {*pages[0], *own} if row in own else before)


@pytest.mark.parametrize("percent", [50, 75])
def test_pages_of_which_anchors_alone_are_seen(percent: int) -> None:
    words = tokenizer.build(LINKS, PROMPT.pages[1], {percent: 16})
    made = curriculum.Encoder(words, (LINKS,), (percent,), 16).make(
        random.Random(3), dataclasses.replace(curriculum.RECIPES["anchored"].stages[-1], alone=1.0)
    )
    names, mask = words.convert_ids_to_tokens(made.ids), collate([made]).mask[0, 0]
    context = made.segment.index(1)
    system = {i for i in range(context) if made.page[i] == 0}
    anchors, links = ([i for i in range(context) if names[i].startswith(f"<|{kind}_")] for kind in ("anchor", "link"))
    text = [i for i in range(context) if i not in {*system, *anchors, *links}]
    assert {made.text[i] for i in text} == {made.reads[i] for i in anchors} == set(range(1, 1 + max(made.text)))
    for row in (*text, *anchors, *links, context):
        seen = set(torch.nonzero(mask[row] == 0)[:, 0].tolist())
        if row in text:
            wanted = system | {i for i in text if made.text[i] == made.text[row]}
        elif row in anchors:
            mine = {i for i in text if made.text[i] == made.reads[row]}
            wanted = system | mine | {i for i in anchors if made.page[i] == made.page[row]}
        else:
            wanted = system | {*anchors, *links, context}
        assert seen == {i for i in wanted if i <= row}
    # What the question sees stands in the order of its positions, without a gap behind the first segment's room.
    places = [made.position[i] for i in sorted({*anchors, *links, context})]
    assert places == list(range(len(system) + 16, len(system) + 16 + len(places)))
    for segment in range(1, 1 + max(made.text)):
        own = [made.position[i] for i in text if made.text[i] == segment]
        assert own == list(range(own[0], min(made.position[i] for i in anchors if made.reads[i] == segment)))


def test_other_sequences_hold_no_links(encoder: curriculum.Encoder) -> None:
    plain = curriculum.Encoder(tokenizer.build())
    usual = dataclasses.replace(STAGE, alone=0.0)
    made, same = (e.make(random.Random(3), usual) for e in (encoder, plain))
    assert made.ids == same.ids
    length = made.segment.index(1)
    mask = collate([made]).mask[0, 0, :length, :length]
    assert torch.equal(mask == 0, torch.ones(length, length, dtype=torch.bool).tril())


def test_what_a_blind_question_sees(encoder: curriculum.Encoder) -> None:
    """The system text, itself, and of the pages what leaves the answer open but for what they learnt of others."""
    stage = dataclasses.replace(curriculum.RECIPES["forced"].stages[-1], blind=1.0)
    made, story = encoder.make(random.Random(3), stage), sample(random.Random(3), "train", stage.size)
    asked = {question.task: question for question in story.questions}
    context, mask = made.segment.index(1), collate([made]).mask[0, 0]
    tasks = dict[str, int]()
    for row in range(context, len(made.ids)):
        name = made.tasks[made.segment[row] - 1]
        seen = {made.page[i] for i in range(context) if mask[row, i] == 0}
        tasks[name] = len(seen)
        assert {i for i in range(context, row + 1) if made.segment[i] == made.segment[row]} == {
            i for i in range(context, len(made.ids)) if mask[row, i] == 0
        }
    open_ended = {"multiquery", "multivalue"}
    assert set(tasks) == open_ended | {f"{task}*" for task in asked if task not in open_ended}
    assert tasks == {name: 9 if name[-1] != "*" else 3 if name == "coref*" else 2 for name in tasks}
    # Both choices are seen, and neither of the pages that say who it was.
    for question in (q for q in story.questions if q.task == "coref"):
        texts = ["".join(s.text for s in story.pages[page].sentences) for page in question.enough]
        assert len(texts) == 2
        assert all(" chose the " in text for text in texts)
        name = question.text.split()[-1].removesuffix("?")
        assert not any(f" is {name}." in text for text in texts)
