"""Rates of a throughput run as a table and as a plot."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROWS = [
    {
        "name": name,
        "r": r,
        "requests_per_s": rate,
        "ttft_p50_s": late / 2,
        "ttft_p99_s": late,
        "tokens_per_s": 16 * rate,
        "engine_idle": 0.25,
        "bound_s": 6.2,
    }
    for name, r in (("full_attention", 1.0), ("prophetkv", 0.15))
    for rate, late in ((0.5, 2.0), (0.75, 7.0))
]


def run(script: Path, *arguments: Path) -> str:
    argv = [sys.executable, "-P", script, *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_a_line_for_each_rate(root: Path, tmp_path: Path) -> None:
    (tmp_path / "throughput.json").write_text(json.dumps(ROWS))
    lines = run(root / "scripts/throughput_table.py", tmp_path / "throughput.json").splitlines()
    assert lines[2:4] == [
        "| full attention | 0.50 | 1.00 | 2.00 | 8.0 | 25% |",
        "| full attention | 0.75 | 3.50 | **7.00** | 12.0 | 25% |",
    ]
    assert lines[4].startswith("| prophetkv, r = 0.15 | 0.50 |")
    assert {line.count("|") for line in lines} == {7}


@pytest.mark.slow
def test_what_was_measured_is_drawn_and_nothing_else(root: Path, tmp_path: Path) -> None:
    for folder in ("scripts", "build/bench", "docs/img"):
        (tmp_path / folder).mkdir(parents=True)
    script = tmp_path / "scripts/plots.py"
    script.write_text((root / "scripts/plots.py").read_text())
    (tmp_path / "build/bench/throughput.json").write_text(json.dumps(ROWS))
    assert "storage.svg stays as it is" in run(script)
    assert [path.name for path in (tmp_path / "docs/img").iterdir()] == ["throughput.svg"]
    drawn = (tmp_path / "docs/img/throughput.svg").read_text()
    assert all(name in drawn for name in ("full_attention", "prophetkv", "99th percentile", "answer tokens a second"))
