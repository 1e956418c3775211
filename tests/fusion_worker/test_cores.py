"""Cores under a container's quota, as the kernel writes it."""

import os
from pathlib import Path

import pytest

from fusionkv.fusion_worker.cores import cores

ALL = len(os.sched_getaffinity(0))


def test_no_quota(tmp_path: Path) -> None:
    assert cores(tmp_path) == ALL


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("max 100000", ALL),
        ("50000 100000", 1),
        ("150000 100000", min(2, ALL)),
        ("6400000 100000", ALL),
        ("junk", ALL),
    ],
)
def test_version_2(tmp_path: Path, line: str, expected: int) -> None:
    (tmp_path / "cpu.max").write_text(line + "\n")
    assert cores(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [(-1, ALL), (100000, 1), (150000, min(2, ALL))])
def test_version_1(tmp_path: Path, quota: int, expected: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert cores(tmp_path) == expected


def test_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
