"""Runs a service as a process, with the first reference model; and what a process computes."""

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = min(file.parent for file in (ROOT / "models").glob("*/config.json"))


@contextmanager
def running(
    module: str, *flags: str, listen: str = "127.0.0.1:0", env: Mapping[str, str] | None = None
) -> Iterator[tuple[list[str], int]]:
    """Runs a service until SIGTERM at the end; yields its addresses and process id.

    Raises:
        OSError: it ended before it served.
    """
    command = [sys.executable, "-P", "-m", f"fusionkv.{module}", "--listen", listen, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            line = next((line for line in process.stdout if " serving on " in line), "")
            if not line:
                raise OSError(f"{module} did not start; to see why, run {shlex.join(command)}")
            yield shlex.split(line.partition(" serving on ")[2]), process.pid
        finally:
            process.terminate()


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process so far, with those of threads that have ended. Raises OSError if there is none."""
    return time.clock_gettime(~pid << 3 | 2)  # the clock of clock_getcpuclockid(3)
