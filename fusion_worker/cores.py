"""The number of CPU cores available to this process."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def cores(cgroup: Path = _CGROUP) -> int:
    """Cores in this process's affinity mask, capped by its container's CPU quota.

    torch considers neither: 64 threads under a quota of 4 cores are throttled for most of every period.
    """
    available = len(os.sched_getaffinity(0))
    quota, period = _quota(cgroup)
    return max(1, min(available, -(-quota // period))) if quota > 0 and period > 0 else available


def _quota(cgroup: Path) -> tuple[int, int]:
    """The CPU quota and its period, in microseconds, from cgroup v2 or v1; (-1, 1) without a quota."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return (-1, 1) if quota == "max" else (int(quota), int(period))
    except (OSError, ValueError):
        pass
    try:
        quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota), int(period)
    except (OSError, ValueError):
        return -1, 1
