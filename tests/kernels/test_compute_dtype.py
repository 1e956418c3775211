"""The dtype that a CPU computes in: bfloat16 only where its products are faster."""

import pytest
import torch

from fusionkv.kernels.cpu import compute_dtype as module
from fusionkv.kernels.cpu.compute_dtype import compute_dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_float16_would_overflow_and_float32_is_not_rounded(dtype: torch.dtype) -> None:
    assert compute_dtype(dtype) == torch.float32


@pytest.mark.parametrize("faster", [torch.bfloat16, torch.float32])
def test_bfloat16_is_computed_in_the_faster_dtype(faster: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_seconds", lambda dtype: 1.0 if dtype == faster else 2.0)
    assert compute_dtype.__wrapped__(torch.bfloat16) == faster
