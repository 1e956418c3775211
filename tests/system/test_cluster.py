"""`make cluster` over a Redis: no answer is wrong or missing, whichever part is away."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.redis_process import server

pytestmark = [pytest.mark.system, pytest.mark.slow]
SCRIPT = Path(__file__).parent.parent.parent / "examples/cluster.py"


def test_questions_go_on(tmp_path: Path) -> None:
    server()
    out = tmp_path / "cluster.json"
    flags = ("--questions", "3", "--out", str(out))
    done = subprocess.run([sys.executable, "-P", str(SCRIPT), *flags], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = json.loads(out.read_text())
    assert [step["right"] for step in steps] == [3] * 6
    assert steps[0]["chunks"].keys() <= {"device", "memory"}
    # Only what stands still is missed: what is killed is noticed, and its place is taken.
    assert [step["what"] for step in steps if step["degraded"]] in ([], ["node 1's cache service stands still"])
