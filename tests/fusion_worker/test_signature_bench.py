"""The bench of what signatures cost runs, and says what its figures are of."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.system
def test_a_run(root: Path) -> None:
    command = [sys.executable, "-P", str(root / "bench/signatures.py"), "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for size in ("1 MiB", "8 MiB"):
        assert re.search(rf"^{size}: signing [\d.]+ us, verifying [\d.]+ us an entry$", done.stdout, re.MULTILINE)
    fetches = re.findall(
        r"^  fetch, (.+): ([\d.]+) ms(?:, of which the signature's part is ([\d.]+)%)?$", done.stdout, re.M
    )
    assert [(name, bool(share)) for name, _, share in fetches] == [
        ("streamed", True), ("memory", False), ("memory, verified", True),
    ] * 2  # fmt: skip
