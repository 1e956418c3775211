"""The benchmark of the kernels on a GPU, at toy sizes on the CPU."""

import csv
import subprocess
from pathlib import Path

import pytest

from tests.commands import run_python

MODULE = ("-m", "fusionkv.bench.gpu.gpu")
COLUMNS = (
    "date,commit,gpu,torch,triton,kind,shape,context,r,batch,ms,baseline,baseline_ms,ratio,ideal,tflops_or_gbs,share"
)
pytestmark = pytest.mark.slow


def run(*args: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    return run_python(*args, status=status, env={"CUDA_VISIBLE_DEVICES": ""}, timeout=240)


def test_every_part_at_toy_sizes(tmp_path: Path) -> None:
    out = tmp_path / "new" / "gpu.csv"
    done = run(*MODULE, "--tiny", "--out", out, "--commit", "abc", "--budget-seconds", "10000")
    assert out.read_text().splitlines()[0] == COLUMNS
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert {row["kind"] for row in rows} == {"rate", "prefill", "decode", "scores"}
    assert {row["commit"] for row in rows} == {"abc"}
    for row in rows:
        assert float(row["ms"]) > 0
        assert float(row["tflops_or_gbs"]) > 0
        assert bool(row["baseline"]) == bool(row["ratio"])
    for title in ("Ceilings", "Decoding", "Attention scores", "Prefill"):
        assert f"\n{title}" in done.stdout


def test_a_short_budget_leaves_rows_out_and_names_them(tmp_path: Path) -> None:
    out = tmp_path / "gpu.csv"
    out.write_text(f"{COLUMNS}\nolder\n")
    done = run(*MODULE, "--tiny", "--out", out, "--budget-seconds", "0")
    lines = out.read_text().splitlines()
    assert lines[:2] == [COLUMNS, "older"]
    assert {row["kind"] for row in csv.DictReader(lines[:1] + lines[2:])} == {"rate"}
    for what in ("decode", "scores", "prefill"):
        assert f"skipped: {what}" in done.stdout


def test_without_a_gpu_it_says_so() -> None:
    done = run(*MODULE, status=2)
    assert done.stdout == ""
    assert "no CUDA device" in done.stderr
