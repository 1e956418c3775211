"""The bench of peers, as a process: every system that is here is measured, and its figures are written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.slow]


def test_every_system_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "new" / "peers.json"
    command = [sys.executable, "-P", "-m", "fusionkv.bench.cache.peers", "--quick", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())
    assert set(rows[0]) == {"system", "operation", "bytes", "gb_s", "cpu_s_per_gb", "p99_ms"}
    by_system = {row["system"]: row for row in rows}
    assert len(rows) == 2 * len(by_system)
    for engine in ("redis", "mooncake"):
        assert (engine in by_system) == (f"{engine} is not measured" not in done.stderr)
        assert (f"fusionkv over {engine}" in by_system) == (engine in by_system)
    assert all(row["gb_s"] > 0 and row["p99_ms"] > 0 and row["cpu_s_per_gb"] > 0 for row in rows)
