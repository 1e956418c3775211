"""The protos hold to buf's standard rules and format."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("command", [["lint"], ["format", "--diff", "--exit-code"]], ids=["lint", "format"])
def test_buf(root: Path, command: list[str]) -> None:
    buf = Path(sys.executable).parent / "buf"
    done = subprocess.run([buf, *command, "protos"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
