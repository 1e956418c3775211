"""Selection along references: words, turns, rounds, and what is computed in the end."""

import itertools
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker.methods.choose import in_turn, spread, top_k
from fusionkv.fusion_worker.methods.lexical import near_and_back

CLOSE = 1e-4
# Words as numbers: 1, 2 filler; 10 a name of the question; 20 a role that stands beside it; 30 what the role did.
IDS = [1, 1, 10, 20, 1, 1, 1, 1, 1, 1, 2, 2, 2, 20, 30, 2, 2, 2, 2, 2]
CHUNKS = [0] * 10 + [1] * 10


def test_words_lead_to_what_looks_back() -> None:
    near, back = near_and_back(IDS, CHUNKS, question=[10, 99])
    assert not near.any(), "nothing is said before that a token near the question's word could look back at"
    order = back.argsort(descending=True, stable=True).tolist()
    assert order[:3] == [14, 13, 15], "the rare word behind the one in common, that one, and what stands behind it"
    assert not back[:13].any(), "what stands before the word in common does not see it"
    assert back.count_nonzero() == 5, "it, and four tokens behind it"


def test_words_of_the_question_that_were_said_before() -> None:
    # Two passages own up to the same name: the second one's tokens may look back at the first.
    ids = [10, 40, 50, 1, 1, 1, 10, 41, 60, 1, 1, 1, 1, 1]
    near, _ = near_and_back(ids, [0] * 6 + [1] * 8, question=[10])
    assert not near[:6].any()
    assert near[6:10].tolist() == sorted(near[6:10].tolist(), reverse=True)
    assert near[6] > near[9] > 0
    assert not near[10:].any(), "out of reach"


def test_words_lead_on_along_a_chain() -> None:
    # 11 like 12 is said last, 12 like 13 before it, 13 first of all; asked for 11.
    links = [[13, 5], [1] * 6, [12, 6, 13, 1, 1, 1], [11, 7, 12, 1]]
    ids, chunks = [*itertools.chain(*links)], [number for number, link in enumerate(links) for _ in link]
    near, back = near_and_back(ids, chunks, question=[11])
    assert int(near.argmax()) == 16, "12 where 11 is like it"
    assert int(back.argmax()) == 10, "13 where 12 is like it, in an earlier passage"
    assert not back[:2].any(), "13 itself looks back at nothing"


def test_words_of_one_passage_link_to_no_other() -> None:
    ids = [10, 20, 1, 1, 1, 1, 20, 30]
    for question in ([10], [99]):
        assert not torch.cat(near_and_back(ids, [0] * 8, question)).any()


def test_reach_ends_with_the_chunk() -> None:
    near, _ = near_and_back([10, 2, 1, 10, 2, 3], [0, 0, 1, 1, 2, 2], [10])
    assert near[3] > 0
    assert not near[[0, 1, 2, 4, 5]].any()


def test_neighbours_share_a_score_within_their_chunk() -> None:
    scores, chunk = torch.tensor([0.0, 1.0, 0.5, 0.0, 2.0]), torch.tensor([0, 0, 0, 1, 1])
    assert spread(scores, chunk, 1, 0.8).tolist() == pytest.approx([0.8, 1.0, 0.8, 1.6, 2.0])
    assert spread(scores, chunk, 1, 0.8, both=False).tolist() == pytest.approx([0.0, 1.0, 0.8, 0.0, 2.0])


def test_lists_are_taken_in_turn() -> None:
    stale = torch.tensor([False] + [True] * 7)
    have = torch.zeros(8, dtype=torch.bool)
    have[6] = True
    first = torch.tensor([9.0, 8, 7, 6, 5, 4, 3, 2])
    second = torch.tensor([9.0, 0, 0, 0, 1, 2, 0, 3])
    order = in_turn([(first, 1.0), (second, 2.0)], have, stale)
    # What is there already, then one of the first list and two of the second, and so on.
    expected = [6, 1, 7, 5, 2, 4, 3]
    assert [sorted(expected[:n]) for n in range(1, 8)] == [top_k(order, stale, n).tolist() for n in range(1, 8)]


@pytest.fixture
def parts(tools: Any) -> tuple[list[int], list[list[int]], list[int]]:
    return tools.random_ids(5, 0), [tools.random_ids(n, n) for n in (13, 30, 1, 25)], tools.random_ids(6, 99)


async def test_what_is_chosen_is_recomputed(family: str, start: Any, oracle: Any, parts: Any, tools: Any) -> None:
    system, chunks, question = parts
    rig, plain = await start(family), oracle(family)
    fuser, chosen, rounds = rig.servicer.answerer._fuser, [], []
    fuse, compute = fuser.fuse, fuser._follower._compute

    async def watch_fuse(*args: Any) -> Any:
        chosen.append((await fuse(*args)).chosen)
        return await fuse(*args)

    async def watch_compute(placement: Any, prompt: Any, new: Any, *rest: Any) -> Any:
        rounds.append((new, await compute(placement, prompt, new, *rest)))
        return rounds[-1][1]

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
    # Each round computes a few other tokens over the stale cache and each other, and keeps nothing of them.
    (first, _), (second, _) = rounds[:2]
    assert not set(first.tolist()) & set(second.tolist())
    for new, weights in rounds[:2]:
        alone = torch.zeros_like(fresh)
        alone[new] = True
        expected = plain.weights(whole, stale, alone)[new][:, : weights.shape[1]]
        assert float((weights - expected).abs().max()) < CLOSE


async def test_fewer_tokens_than_a_round_takes(start: Any, parts: Any) -> None:
    rig = await start("llama")
    for ratio in (0.01, 0.03, 0.06):
        answer = await rig.ask(*parts, recipe="trace", ratio=ratio)
        assert answer.summary.tokens_recomputed == round(ratio * sum(map(len, parts[1])))
