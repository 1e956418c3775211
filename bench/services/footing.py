"""Memory and open files of a process, to detect leaks."""

import os
from dataclasses import dataclass
from pathlib import Path


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
