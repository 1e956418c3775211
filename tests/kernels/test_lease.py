"""The script that measures a GPU, with a program in place of Python that notes how it is called."""

import csv
import json
import os
import shlex
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fusionkv.bench.gpu import summary
from fusionkv.bench.kernels.clock import busy_ms
from tests.commands import run_python

FAKE = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in *"$FAILS"*) exit 3;; esac
"""
PARTS = ["checks", "ttft", "decode", "tuning", "kernels", "encode"]


class Script:
    """bench/gpu/lease.sh, whose output goes to a folder."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._root, self.out, self._calls = root, folder / "out", folder / "calls"
        self._python = folder / "python"
        self._python.write_text(FAKE)
        self._python.chmod(0o755)

    def run(self, fails: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """Runs it; returns what it did, and how it called Python. fails: words of calls that fail."""
        self._calls.write_text("")
        mine = {"OUT": self.out, "CALLS": self._calls, "FAILS": fails, "PYTHON": self._python, "COMMIT": "abc"}
        env = {**os.environ, **{name: str(value) for name, value in mine.items()}}
        command = ["bash", str(self._root / "bench/gpu/lease.sh")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        return done, self._calls.read_text().splitlines()


@pytest.fixture
def script(root: Path, tmp_path: Path) -> Script:
    return Script(root, tmp_path)


def test_without_a_gpu(script: Script) -> None:
    done, calls = script.run("is_available")
    assert (done.returncode, len(calls)) == (2, 1)
    assert "no CUDA device" in done.stderr


def test_a_part_that_fails_stops_no_other_and_runs_again(script: Script) -> None:
    done, calls = script.run("worker.decode")
    assert (done.returncode, len(calls)) == (1, 2 + len(PARTS))
    assert f"FAILED decode: see {script.out}/decode.log" in done.stdout
    assert sorted(file.stem for file in script.out.glob("*.done")) == sorted({*PARTS} - {"decode"})
    done, calls = script.run("nothing fails")
    assert done.returncode == 0
    assert ["worker.decode" in call for call in calls] == [False, True, False]


@pytest.mark.slow
def test_its_commands_exist(script: Script, root: Path) -> None:
    _, calls = script.run("nothing fails")
    assert sum(seconds(line) for line in (root / "bench/gpu/lease.sh").read_text().splitlines()) < 540
    for call in calls[2:]:
        words = shlex.split(call)
        module = words[words.index("-m") + 1 :] if "-m" in words else []
        if module:
            shown = run_python("-m", module[0], "--help").stdout
            assert [flag for flag in module if flag.startswith("--") and flag not in shown] == []
    tests = [word for word in shlex.split(calls[1]) if word.startswith("tests/")]
    assert [test for test in tests if not (root / test.partition("::")[0]).exists()] == []


def seconds(line: str) -> int:
    """The limit of a part."""
    words = line.split()
    return int(words[2]) if words[:1] == ["part"] else 0


def test_what_a_gpu_computes_is_the_time_of_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's profiler counts microseconds, and none for calls that only launch."""
    events = [SimpleNamespace(self_device_time_total=us) for us in (1500.0, 0.0, 750.0)]
    profile = nullcontext(SimpleNamespace(key_averages=lambda: events))
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: ran.append("waited"))
    ran: list[str] = []
    assert busy_ms(lambda: ran.append("ran")) == 2.25
    assert ran == ["ran", "waited"]


def test_figures_beside_what_is_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ttft = {"name": "deeplayer+primed", "context": 16384, "r": 0.2, "baseline_s": 0.8, "value_s": 0.1}
    ttft |= {
        "resident_s": 0.09,
        "bytes_fetched": 900_000_000,
        "stages_s": {"load": 0.03, "select": 0.02, "prefill": 0.04},
        "busy_ms": {"select": 18.0, "prefill": 30.0},
    }
    decode = {"requests": 8, "chunks": 20, "recomputed": 0.15, "tokens": 16384, "step_ms": 29.0, "graph_ms": 11.0}
    decode |= {"busy_ms": 8.8}
    encode = {"chunks": 24, "tokens": 12000, "encoded_tokens_per_s": 30000}
    for name, row in {"ttft": ttft, "decode": decode, "encode": encode}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps([row]))
    out = tmp_path / "gpu.csv"
    monkeypatch.setattr("sys.argv", ["summary", str(tmp_path), "--commit", "abc", "--csv", str(out)])
    assert summary.main() == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [(row["kind"], row["ms"], row["ratio"], row["commit"]) for row in rows] == [
        ("ttft", "100", "8", "abc"),
        ("ttft", "800", "", "abc"),
        ("load", "30", "", "abc"),
        ("choose", "20", "", "abc"),
        ("compute", "40", "", "abc"),
        ("resident", "90", "", "abc"),
        ("step", "11", "2.636", "abc"),
        ("encode", "400", "", "abc"),
    ]
    assert rows[2]["tflops_or_gbs"] == "30"
    assert [row["share"] for row in rows] == ["", "", "", "0.9", "0.75", "", "0.8", ""]
    shown = {
        line.split()[0]: line.split()[-3:]
        for line in reversed(capsys.readouterr().out.splitlines())
        if "shape-7b" in line
    }
    assert shown["ttft"] == ["100", "56", "132"]
    assert shown["choose"] == ["2.7", "0.9", "0.85"]
    assert shown["step"][-3:] == ["10.5", "0.8", "0.85"]
