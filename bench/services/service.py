"""Runs a service as a process, with the smallest reference model at hand."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = min(file.parent for file in (ROOT / "models").glob("*/config.json"))


@contextmanager
def running(
    module: str, *flags: str, listen: str = "127.0.0.1:0", env: Mapping[str, str] | None = None
) -> Iterator[tuple[list[str], int]]:
    """Runs a service until SIGTERM at the end; yields its addresses and process id."""
    command = [sys.executable, "-P", "-m", f"fusionkv.{module}", "--listen", listen, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if " serving on " in line)
            yield line.partition(" serving on ")[2].split(), process.pid
        finally:
            process.terminate()
