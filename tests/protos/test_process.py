"""What a service needs of its operating system."""

import os
from pathlib import Path

import pytest

from fusionkv.protos.runtime import folders, process

ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("host", "near"),
    [
        *((host, True) for host in ("localhost", "127.3.2.1", "::1", "10.96.0.7", "fd00::1")),
        *((host, False) for host in ("8.8.8.8", "2001:4860:4860::8888", "nowhere.invalid", "")),
    ],
)
def test_hosts_that_no_proxy_stands_before(host: str, near: bool) -> None:
    assert process.is_near(host) == near


# What is unseen can't be looked at, as in another user's folder.
HOMES = {"read-only": "/proc/self", "unseen": f"/proc/self{'/x' * 2100}"}


@pytest.mark.parametrize(
    ("home", "known"), [("none", False), ("read-only", True), ("unseen", True), ("there", False), ("there", True)]
)
def test_libraries_keep_their_files_where_they_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str, known: bool
) -> None:
    for variable in ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    if home != "none":
        monkeypatch.setenv("HOME", HOMES.get(home, str(tmp_path)))
    if not known:
        monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    folders.settle()
    kept = tmp_path / (".cache" if home == "there" else ".fusionkv/cache")
    expected = None if home == "there" and known else str(kept)
    assert os.environ.get("XDG_CACHE_HOME") == expected
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == (expected and f"{expected}/torchinductor")
    assert os.environ.get("TRITON_CACHE_DIR") == (expected and f"{expected}/triton")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ALL),
        ({"cpu.max": "max 100000"}, ALL),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "150000 100000"}, min(2, ALL)),
        ({"cpu.max": "junk"}, ALL),
        # Version 1.
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, ALL),
        ({"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}, min(2, ALL)),
    ],
    ids=str,
)
def test_cores_under_a_quota(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    """Of a container, as the kernel writes it."""
    (tmp_path / "cpu").mkdir()
    for name, line in files.items():
        (tmp_path / name).write_text(line + "\n")
    assert process.cores(tmp_path) == expected


def test_cores_that_a_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert process.cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
