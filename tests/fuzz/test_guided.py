"""The decoders of bytes again, with inputs that atheris grows towards code that was not reached before."""

import re
from pathlib import Path

import pytest

from tests.commands import run_python
from tests.fuzz import effort
from tests.fuzz.decoders import GUIDED

pytest.importorskip("atheris", reason="pip install -e '.[fuzz]'")
_RUNS = 5000


# `make test` holds only that it works: starting takes some seconds.
@pytest.mark.parametrize("name", GUIDED if effort.SECONDS else ["index_record"])
def test_guided(name: str, root: Path, tmp_path: Path) -> None:
    effort_flag = f"-max_total_time={int(effort.SECONDS)}" if effort.SECONDS else f"-runs={_RUNS}"
    flags = (effort_flag, f"-seed={effort.SEED}", "-timeout=30", "-max_len=1024", f"-artifact_prefix={tmp_path}/")
    done = run_python(root / "tests/fuzz/guided.py", name, *flags, timeout=None)
    runs = re.search(r"Done (\d+)", done.stderr)
    assert runs is not None, done.stderr[-5000:]
    assert int(runs[1]) >= _RUNS
    effort.done[f"{name}, guided"] += int(runs[1])
