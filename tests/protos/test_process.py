"""What a service needs of its operating system."""

import os
from pathlib import Path

import pytest

from fusionkv.protos.runtime import folders, process


@pytest.mark.parametrize(
    ("host", "near"),
    [
        ("localhost", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("10.96.0.7", True),
        ("fd00::1", True),
        ("8.8.8.8", False),
        ("2001:4860:4860::8888", False),
        ("nowhere.invalid", False),
        ("", False),
    ],
)
def test_hosts_that_no_proxy_stands_before(host: str, near: bool) -> None:
    assert process.is_near(host) == near


@pytest.mark.parametrize(("home", "known"), [("none", False), ("read-only", True), ("there", False), ("there", True)])
def test_libraries_keep_their_files_where_they_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str, known: bool
) -> None:
    for variable in ("HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    if home != "none":
        monkeypatch.setenv("HOME", str(tmp_path) if home == "there" else "/proc/self")
    if not known:
        monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    folders.settle()
    kept = tmp_path / (".cache" if home == "there" else ".fusionkv/cache")
    expected = None if home == "there" and known else str(kept)
    assert os.environ.get("XDG_CACHE_HOME") == expected
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == (expected and f"{expected}/torchinductor")
    assert os.environ.get("TRITON_CACHE_DIR") == (expected and f"{expected}/triton")
