"""What a process holds: compared with what it held before, it shows a leak."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Footing:
    """bytes: of memory that it has; files: that it has open."""

    bytes: int
    files: int

    @classmethod
    def of(cls, pid: int) -> "Footing":
        """Raises OSError when there is no such process."""
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        return cls(1024 * kilobytes, len(os.listdir(f"/proc/{pid}/fd")))

    def outgrew(self, early: "Footing", growth: float, more_bytes: int, more_files: int) -> bool:
        """Whether it has more than `growth` times the memory and `more_bytes`, or `more_files`, on top of `early`."""
        return self.bytes > growth * early.bytes + more_bytes or self.files > early.files + more_files
