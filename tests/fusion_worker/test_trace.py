"""Selection along references: words, turns, what is followed, and what is computed in the end."""

import itertools
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker.methods.choose import in_turn, spread, top_k
from fusionkv.fusion_worker.methods.lexical import ends_sentence, references
from fusionkv.fusion_worker.methods.scoring import PeakAttention

CLOSE = 1e-4
# Words as numbers: 0 ends a sentence; 1, 2 filler; 10 a name of the question; 20 a role beside it; 30 what that did.
IDS = [1, 1, 0, 10, 20, 1, 1, 1, 1, 1, 2, 2, 0, 20, 30, 2, 0, 2, 2, 0]
CHUNKS = [0] * 10 + [1] * 10


def words(ids: list[int], chunks: list[int], question: list[int]) -> torch.Tensor:
    return references(ids, chunks, [i == 0 for i in ids], question)


def test_words_lead_to_what_looks_back() -> None:
    back = words(IDS, CHUNKS, question=[10, 99])
    order = back.argsort(descending=True, stable=True).tolist()
    assert order[:3] == [13, 14, 15], "the word in common, the rare one behind it, and what stands behind that"
    assert not back[:13].any(), "what stands before the word in common does not see it"
    assert back.count_nonzero() == 4, "the sentence's end, and nothing of the next one"


def test_words_of_another_sentence_are_not_near() -> None:
    # 20 stands beside the question's 10, but ends another sentence.
    back = words([20, 0, 10, 1, 1, 20, 30, 0], [0] * 5 + [1] * 3, question=[10])
    assert not back.any()


def test_words_of_the_question_that_were_said_before() -> None:
    # Two passages own up to the same name: the second one's tokens may look back at the first.
    ids = [10, 40, 50, 0, 1, 1, 10, *range(60, 70)]
    near = words(ids, [0] * 6 + [1] * 11, question=[10])
    assert not near[:6].any()
    assert near[6:13].tolist() == sorted(near[6:13].tolist(), reverse=True)
    assert near[6] > near[12] > 0
    assert not near[13:].any(), "out of reach"


def test_words_lead_on_along_a_chain() -> None:
    # 11 like 12 is said last, 12 like 13 before it, 13 first of all; asked for 11.
    pages = [[13, 5, 0], [1] * 6, [12, 6, 13, 0, 1, 1], [11, 7, 12, 0]]
    ids, chunks = [*itertools.chain(*pages)], [number for number, page in enumerate(pages) for _ in page]
    score = words(ids, chunks, question=[11])
    assert int(score.argmax()) == 17, "12 where 11 is like it"
    assert int(score[:15].argmax()) == 11, "13 where 12 is like it, in an earlier passage"
    assert not score[:3].any(), "13 itself looks back at nothing"


def test_words_of_one_passage_link_to_no_other() -> None:
    ids = [10, 20, 1, 1, 1, 1, 20, 30]
    for question in ([10], [99]):
        assert not words(ids, [0] * 8, question).any()


def test_reach_ends_with_the_chunk() -> None:
    near = words([10, 2, 1, 10, 3, 4], [0, 0, 1, 1, 2, 2], [10])
    assert near[3] > 0
    assert not near[[0, 1, 2, 4, 5]].any()


def test_tokens_that_end_a_sentence() -> None:
    ends = [".", "!", "?", "\u3002", " end.", '."', ".\u201d", "?)", ". ", "\n", ".\n\n", "a\nb"]
    assert all(map(ends_sentence, ends))
    assert not any(map(ends_sentence, ["", " ", "a", ",", ":", ".5", "e.g", '"', "3.1"]))


def test_neighbours_share_a_score_within_their_chunk() -> None:
    scores, chunk = torch.tensor([0.0, 1.0, 0.5, 0.0, 2.0]), torch.tensor([0, 0, 0, 1, 1])
    assert spread(scores, chunk, 1, 0.8).tolist() == pytest.approx([0.8, 1.0, 0.8, 1.6, 2.0])
    assert spread(scores, chunk, 1, 0.8, both=False).tolist() == pytest.approx([0.0, 1.0, 0.8, 0.0, 2.0])


def test_lists_are_taken_in_turn() -> None:
    stale = torch.tensor([False] + [True] * 7)
    first = torch.tensor([9.0, 8, 7, 6, 5, 4, 3, 2])
    second = torch.tensor([9.0, 0, 0, 0, 1, 2, 0, 3])
    order = in_turn([(first, 1.0), (second, 2.0)], stale)
    # One of the first list and two of the second, and so on.
    expected = [1, 7, 5, 2, 4, 3, 6]
    assert [sorted(expected[:n]) for n in range(1, 8)] == [top_k(order, stale, n).tolist() for n in range(1, 8)]


@pytest.fixture
def parts(tools: Any) -> tuple[list[int], list[list[int]], list[int]]:
    return tools.random_ids(5, 0), [tools.random_ids(n, n) for n in (13, 30, 1, 25)], tools.random_ids(6, 99)


async def test_what_is_chosen_is_recomputed(family: str, start: Any, oracle: Any, parts: Any, tools: Any) -> None:
    system, chunks, question = parts
    rig, plain = await start(family), oracle(family)
    fuser, chosen, followed = rig.servicer.answerer._fuser, [], []
    fuse, compute = fuser.fuse, fuser._follower._compute

    async def watch_fuse(*args: Any) -> Any:
        chosen.append((await fuse(*args)).chosen)
        return await fuse(*args)

    async def watch_compute(placement: Any, prompt: Any, new: Any) -> Any:
        followed.append((new, await compute(placement, prompt, new)))
        return followed[-1][1]

    fuser.fuse, fuser._follower._compute = watch_fuse, watch_compute
    answer = await rig.ask(*parts, recipe="trace", ratio=0.4, max_tokens=2)
    context = sum(map(len, chunks))
    assert answer.summary.tokens_recomputed == round(0.4 * context) == len(chosen[0])
    whole, stale = [*system, *itertools.chain(*chunks), *question], plain.reused(system, chunks)
    fresh = torch.zeros(len(system) + context, dtype=torch.bool)
    fresh[chosen[0]] = True
    assert not fresh[: len(system) + len(chunks[0])].any(), "lossless"
    for at, logits in enumerate(answer.logits):
        assert tools.error(logits, plain.overlaid([*whole, *answer.ids[:at]], stale, fresh)) < CLOSE
    # A few tokens are computed over the stale cache and each other, to see what they look at; nothing is kept.
    new, weights = followed[0]
    assert len(new) == 4
    alone = torch.zeros_like(fresh)
    alone[new] = True
    expected = plain.weights(whole, stale, alone)[new][:, : weights.shape[1]]
    assert float((weights - expected).abs().max()) < CLOSE


async def test_peaks_of_the_questions_attention(family: str, start: Any, oracle: Any, parts: Any, tools: Any) -> None:
    system, chunks, _ = parts
    question = tools.random_ids(9, 99)
    rig, plain = await start(family), oracle(family)
    follower, found = rig.servicer.answerer._fuser._follower, {}
    peaks = follower.peaks

    async def watch(placement: Any, prompt: Any, wanted: Any) -> Any:
        for most in (4, len(question)):
            found[most] = await peaks(placement, prompt, PeakAttention(most))
        return await peaks(placement, prompt, wanted)

    follower.peaks = watch
    await rig.ask(system, chunks, question, recipe="trace", ratio=0.4)
    whole, stale = [*system, *itertools.chain(*chunks), *question], plain.reused(system, chunks)
    at = len(whole) - len(question)
    weights = plain.weights(whole, stale, torch.zeros(at, dtype=torch.bool))[at:, :at]
    for most, (scores, rows) in found.items():
        assert rows == len(question), "the last rows look at those before them"
        assert float((scores - weights[-most:].square().sum(0).sqrt()).abs().max()) < CLOSE


async def test_fewer_tokens_than_are_followed(start: Any, parts: Any) -> None:
    rig = await start("llama")
    for ratio in (0.01, 0.03, 0.06):
        answer = await rig.ask(*parts, recipe="trace", ratio=ratio)
        assert answer.summary.tokens_recomputed == round(ratio * sum(map(len, parts[1])))
