"""The bench of what signatures cost runs, and says what its figures are of."""

import re
from pathlib import Path

import pytest

from tests.commands import run_python


@pytest.mark.system
def test_a_run(root: Path) -> None:
    done = run_python(root / "bench/services/signatures.py", 3)
    sizes = re.findall(r"^(.+): signing \d+ us; verifying names \d+ us, bytes \d+ us$", done.stdout, re.MULTILINE)
    assert sizes == ["1 MiB", "8 MiB"]
    lines = re.findall(r"^  fetch, (.+): (\d+) us, and verified (\d+) us \(\d+% of it\)$", done.stdout, re.MULTILINE)
    assert [how for how, *_ in lines] == ["streamed", "from memory"] * 2
    assert all(int(alone) < int(verified) for _, alone, verified in lines)
