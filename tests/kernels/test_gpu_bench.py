"""The benchmark of the kernels on a GPU, at toy sizes on the CPU."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fusionkv.bench.gpu import gpu

COLUMNS = (
    "date,commit,gpu,torch,triton,kind,shape,context,r,batch,ms,baseline,baseline_ms,ratio,ideal,tflops_or_gbs,share"
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command, without a GPU; returns its status."""

    def main(*flags: object) -> int:
        monkeypatch.setattr("sys.argv", ["gpu", *map(str, flags)])
        return gpu.main()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return main


@pytest.mark.slow
def test_every_part_at_toy_sizes(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "gpu.csv"
    assert run("--tiny", "--out", out, "--commit", "abc", "--budget-seconds", "10000") == 0
    assert out.read_text().splitlines()[0] == COLUMNS
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert {row["kind"] for row in rows} == {"rate", "prefill", "decode", "scores"}
    assert {row["commit"] for row in rows} == {"abc"}
    for row in rows:
        assert float(row["ms"]) > 0
        assert float(row["tflops_or_gbs"]) > 0
        assert bool(row["baseline"]) == bool(row["ratio"])
    said = capsys.readouterr().out
    assert all(f"\n{title}" in said for title in ("Ceilings", "Decoding", "Attention scores", "Prefill"))


def test_a_short_budget_leaves_rows_out_and_a_part_that_fails_stops_no_other(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.csv"
    out.write_text(f"{COLUMNS}\nolder\n")
    monkeypatch.setattr(gpu.scores, "measure", lambda setup: 1 // 0)
    assert run("--tiny", "--out", out, "--budget-seconds", "0") == 1
    lines = out.read_text().splitlines()
    assert lines[:2] == [COLUMNS, "older"]
    assert {row["kind"] for row in csv.DictReader(lines[:1] + lines[2:])} == {"rate"}
    said = capsys.readouterr().out
    assert all(f"skipped: {what}" in said for what in ("decode", "prefill"))
    assert "FAILED scores failed: ZeroDivisionError" in said


def test_without_a_gpu_it_says_so(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    assert "no CUDA device" in capsys.readouterr().err
