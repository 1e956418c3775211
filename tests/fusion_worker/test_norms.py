"""Norms of transformers that are replaced: the same function, and none of another kind."""

import copy
from typing import Any

import pytest
import torch

from fusionkv.kernels.norms import WideRMSNorm, install
from tests.fusion_worker.oracle import network


def norms(of: torch.nn.Module) -> dict[str, Any]:
    return {name: module for name, module in of.named_modules() if type(module).__name__.endswith("RMSNorm")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_norm_is_replaced(family: str, dtype: torch.dtype) -> None:
    ours, theirs = (copy.deepcopy(network(family, dtype)) for _ in range(2))
    install(ours)
    assert {*ours.state_dict()} == {*theirs.state_dict()}
    generator = torch.Generator().manual_seed(0)
    for name, before in norms(theirs).items():
        norm = norms(ours)[name]
        assert type(norm) is WideRMSNorm
        x = torch.randn(5, len(norm.weight), generator=generator).to(dtype) * 30
        exact = before.double()(x.double())
        torch.testing.assert_close(norm(x).double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_a_norm_that_computes_something_else_stays() -> None:
    class ShiftedRMSNorm(torch.nn.RMSNorm):
        variance_epsilon = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0.1

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = ShiftedRMSNorm(16)

    made = Network()
    install(made)
    assert type(made.norm) is ShiftedRMSNorm
