"""Without a usable Triton, a GPU computes by the reference."""

import sys
from types import ModuleType

import pytest

from fusionkv.kernels import gpu


@pytest.mark.parametrize("module", [None, ModuleType("triton")], ids=["missing", "too old"])
def test_no_triton(
    module: ModuleType | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("triton.language", "fusionkv.kernels.gpu.sparse_attention_triton"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(gpu, "sparse_attention_triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton", module)
    assert not gpu.has_triton.__wrapped__()
    assert "Triton 3.6 or later is not available; attention on the GPU is dense and slow: " in caplog.text
