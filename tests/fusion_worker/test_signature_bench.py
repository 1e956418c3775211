"""The bench of what signatures cost runs, and says what its figures are of."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.system
def test_a_run(root: Path) -> None:
    command = [sys.executable, "-P", str(root / "bench/services/signatures.py"), "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    sizes = re.findall(r"^(.+): signing \d+ us; verifying names \d+ us, bytes \d+ us$", done.stdout, re.MULTILINE)
    assert sizes == ["1 MiB", "8 MiB"]
    lines = re.findall(r"^  fetch, (.+): (\d+) us, and verified (\d+) us \(\d+% of it\)$", done.stdout, re.MULTILINE)
    assert [how for how, *_ in lines] == ["streamed", "from memory"] * 2
    assert all(int(alone) < int(verified) for _, alone, verified in lines)
