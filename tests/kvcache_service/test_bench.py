"""The bench at a small size: every row is measured beside its limits."""

import json
import shutil
from pathlib import Path

import pytest

from fusionkv.bench.cache import bench
from tests.system import redis_process

pytestmark = [pytest.mark.system, pytest.mark.slow]


def test_every_row_has_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SIZES", [(8 * bench.MIB, 2)])
    server = Path(redis_process.server())
    monkeypatch.setenv("PATH", str(server.parent), prepend=":")
    assert shutil.which("redis-server")
    assert bench.main(["--rounds", "1", "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    operations = ["put", "fetch memory", "fetch disk"]
    expected = [(name, "tcp") for name in operations]
    expected += [(name, "unix") for name in (*operations, "fetch shared", "fetch extent", "fetch cold")]
    assert [(row["operation"], row["transport"]) for row in rows] == expected
    for row in rows:
        assert min(row["gb_per_s"], row["grpc_gb_per_s"], row["memcpy_gb_per_s"]) > 0
        assert (row["redis_gb_per_s"] is not None) == (
            (row["operation"], row["transport"]) == ("fetch memory", "tcp")
        )
