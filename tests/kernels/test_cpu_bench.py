"""The benchmark of the kernels on a CPU, at toy sizes."""

import json
from pathlib import Path

import pytest
import torch

from tests.commands import run_python

SCRIPT = Path(__file__).parent.parent.parent / "bench" / "kernels" / "cpu.py"


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU does not compute in bfloat16")
def test_every_part_at_toy_sizes(tmp_path: Path) -> None:
    out = tmp_path / "new" / "cpu.json"
    done = run_python(SCRIPT, "--tiny", "--json", out, timeout=240)
    written = json.loads(out.read_text())
    assert set(written["gflops"]) == {"bfloat16", "float32"}
    assert [row["what"].partition(",")[0] for row in written["rows"]] == ["attention"] * 5 + ["linear layers"] * 2
    for row in written["rows"]:
        assert row["what"] in done.stdout
        assert row["ms"] > 0
        assert row["ratio"] == pytest.approx(row["baseline_ms"] / row["ms"])
        for error in (row["error"], row["baseline_error"]):
            # Two ways to one result: bfloat16 rounds both, and neither leaves out or adds a key.
            assert error < 0.02 if row["what"].startswith("attention") else error is None
