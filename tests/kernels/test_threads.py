"""Pieces side by side: each on a thread of its own, with its share of torch's threads."""

from collections.abc import Iterator

import pytest
import torch

from fusionkv.kernels.cpu.threads import side_by_side


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [2, 4, 8], indirect=True)
def test_pieces_share_the_threads(threads: int) -> None:
    def piece(number: int) -> tuple[int, float, int]:
        # Large enough that torch would spread it.
        return number, float(torch.ones(1 << 20).exp2_().sum()), torch.get_num_threads()

    for _ in range(3):
        found = side_by_side(piece, range(2 * threads))
        assert [number for number, _, _ in found] == list(range(2 * threads))
        assert {total for _, total, _ in found} == {2.0 * (1 << 20)}
        assert {share for _, _, share in found} == {1}
    assert torch.get_num_threads() == threads
