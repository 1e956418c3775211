"""What tests see of processes that others started."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil


def ended(process: psutil.Process) -> bool:
    """Also if nobody has asked how."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def descendants(pid: int, word: str = "") -> list[psutil.Process]:
    """The processes of all generations below one that run and have a word in their command lines."""
    found = []
    for each in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if word in " ".join(each.cmdline()):
                found.append(each)
    return found


def cpu_seconds(pid: int) -> float:
    """Of a process and its children that ended."""
    return sum(psutil.Process(pid).cpu_times()[:4])


@dataclass(frozen=True, slots=True)
class Footing:
    """Resident memory in bytes, and number of open files."""

    bytes: int
    files: int

    @classmethod
    def of(cls, pid: int) -> "Footing":
        """Reads the figures of a process. Raises OSError when there is no such process."""
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        return cls(1024 * kilobytes, len(os.listdir(f"/proc/{pid}/fd")))

    def outgrew(self, early: "Footing", growth: float, more_bytes: int, more_files: int) -> bool:
        """Whether it exceeds `early` by the factor `growth` and `more_bytes` of memory, or by `more_files`."""
        return self.bytes > growth * early.bytes + more_bytes or self.files > early.files + more_files
