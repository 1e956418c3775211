"""Whoever starts a cache service gives it an environment in which its index lies in huge pages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusionkv.protos import huge_pages

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# The index's columns are arrays that grow; this one has 64 MiB, and says whether its pages are asked to be huge.
GROWN = """
import re
from array import array
column = array("q", bytes(1 << 20))
while len(column) < 1 << 23:
    column.extend(column)
at = column.buffer_info()[0]
mappings = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$", open("/proc/self/smaps").read(), re.M | re.S)
(flags,) = (flags.split() for low, high, flags in mappings if int(low, 16) <= at < int(high, 16))
print("hg" in flags)
"""


@pytest.mark.skipif(
    not ENABLED.exists() or "[madvise]" not in ENABLED.read_text(), reason="Linux gives huge pages to all or nobody"
)
def test_a_large_column_is_in_huge_pages() -> None:
    plain = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    for env, expected in ((plain, "False"), (plain | huge_pages.environment(), "True")):
        done = subprocess.run([sys.executable, "-c", GROWN], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [expected]


def test_own_tunables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert huge_pages.environment()["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=2")
    assert huge_pages.environment()["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=2"


def test_the_image_has_them_too(root: Path) -> None:
    assert "=".join(huge_pages.TUNABLE) in (root / "Dockerfile").read_text()
