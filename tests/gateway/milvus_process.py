"""A Milvus for tests: Milvus Lite as a server of its own, spoken to as any other Milvus."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from tests.ports import free_port

_START_SECONDS = 180


@contextmanager
def running(folder: Path) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Its URL and its process."""
    port = free_port()
    command = [Path(sys.executable).parent / "milvus-lite", "server", "--data-dir", folder]
    log = folder.parent / f"{folder.name}.log"
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], stdout=out, stderr=out)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            ready, end = grpc.channel_ready_future(channel), time.monotonic() + _START_SECONDS
            while not ready.done() and process.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            assert ready.done(), log.read_text()
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()
