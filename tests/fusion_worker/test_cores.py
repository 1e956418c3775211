"""Cores under a container's quota, as the kernel writes it."""

import os
from pathlib import Path

import pytest

from fusionkv.protos.runtime.process import cores

ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ALL),
        ({"cpu.max": "max 100000"}, ALL),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "150000 100000"}, min(2, ALL)),
        ({"cpu.max": "6400000 100000"}, ALL),
        ({"cpu.max": "junk"}, ALL),
        # Version 1.
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, ALL),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}, min(2, ALL)),
    ],
    ids=str,
)
def test_quotas(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    (tmp_path / "cpu").mkdir()
    for name, line in files.items():
        (tmp_path / name).write_text(line + "\n")
    assert cores(tmp_path) == expected


def test_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
