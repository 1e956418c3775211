"""A Milvus for tests: Milvus Lite as a server of its own, spoken to as any other Milvus."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from tests.ports import free_port


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Its URL."""
    port = free_port()
    command = [Path(sys.executable).parent / "milvus-lite", "server", "--data-dir", folder]
    log = (folder.parent / f"{folder.name}.log").open("w")
    process = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], stdout=log, stderr=log)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            grpc.channel_ready_future(channel).result(timeout=60)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        log.close()
