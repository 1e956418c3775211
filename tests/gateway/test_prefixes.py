"""The order of passages that begins prompts as recent ones began."""

import pytest

from fusionkv.gateway.client.client import Client
from fusionkv.gateway.plan import Passage
from fusionkv.gateway.prefixes import Prefixes
from fusionkv.gateway.retrieval.base import TextChunk
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.stopwatch import Stopwatch
from tests.waiting import wait_until


def passages(*names: int, tokens: int = 3) -> list[Passage]:
    return [(TextChunk("d", at, str(n), (n,) * tokens), pb.Passage(text=str(n))) for at, n in enumerate(names)]


def names(ordered: list[Passage]) -> list[int]:
    return [int(shown.text) for _, shown in ordered]


@pytest.mark.parametrize(
    ("before", "ranked", "ordered"),
    [
        ([], [], []),
        ([], [1], [1]),
        ([], [1, 2, 3, 4], [1, 4, 3, 2]),
        ([[1, 2, 3]], [4, 3, 1, 5], [1, 5, 3, 4]),
        ([[1, 2, 3]], [2, 3, 4], [2, 4, 3]),
        ([[1, 2], [1, 4, 3]], [3, 4, 1, 5], [1, 4, 3, 5]),
        ([[7, 8, 9], [7]], [9, 8, 7], [7, 8, 9]),
        ([[1, 1, 2]], [2, 1], [1, 2]),
        ([[1, 2]], [2, 1, 1, 2], [1, 2, 2, 1]),
    ],
    ids=str,
)
def test_prompts_begin_as_recent_ones(before: list[list[int]], ranked: list[int], ordered: list[int]) -> None:
    prefixes = Prefixes()
    for known in before:
        # Behind the first, ranks are turned around: `known` is the order in the prompt.
        assert names(prefixes.order("root", passages(*known[:1], *known[:0:-1]))) == known
    assert names(prefixes.order("root", passages(*ranked))) == ordered


def test_other_roots_share_nothing() -> None:
    prefixes = Prefixes()
    prefixes.order(("tenant", "system"), passages(1, 2))
    assert names(prefixes.order(("tenant", "other"), passages(2, 1))) == [2, 1]
    assert names(prefixes.order(("tenant", "system"), passages(2, 1))) == [1, 2]
    # Of a request, whose system prompt may have half a megabyte, hashes are kept alone.
    assert all(isinstance(root, int) for root, _ in prefixes._recent)


def test_long_chunks_count_for_more() -> None:
    prefixes = Prefixes()
    long, short = passages(1, tokens=500), passages(2, 3, 4)
    prefixes.order("", [short[0], short[2], short[1]])
    prefixes.order("", long)
    assert names(prefixes.order("", [*short, *long])) == [1, 4, 3, 2]


def test_long_prompts_that_begin_alike_take_little_time() -> None:
    """The loop of a gateway waits for it."""
    prefixes = Prefixes()
    alike = [hash((number,)) for number in range(127)]
    prefixes._recent.update({(hash(""), (*alike, last)): None for last in range(1024)})
    watch = Stopwatch()
    assert names(prefixes.order("", passages(*range(128), tokens=1))) == [*range(128)], "every passage stays"
    assert watch.seconds() < 0.1


@pytest.mark.system
def test_exact_hits_follow(client: Client) -> None:
    asked = {"recipe": "prefix_cache", "order": "prefix", "max_tokens": 1}

    def exact(question: str) -> int:
        summary = client.ask("base", question, **asked).summary  # type: ignore[arg-type]
        return sum(hit.chunks for hit in summary.hits if hit.kind == "exact")

    exact("code of Name4?")
    wait_until(lambda: exact("code of Name4?") == 6)
    assert exact("code of Name2?") == 6
    with pytest.raises(InvalidArgument, match="Retrieve takes another order"):
        client.retrieve("base", "code of Name4?", order="prefix")
