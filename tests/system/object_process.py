"""Object stores for tests: an S3 of the package moto, and a directory as a shared file system has one."""

import contextlib
import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.system.redis_process import Killable

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
"""Of services and engines that use the server, with the endpoint that `ObjectServer` adds."""


class ObjectServer(Killable):
    """One server on a port that stays its own over restarts; it keeps nothing, not even its bucket."""

    flags: Sequence[str] = ()

    def __init__(self, folder: Path) -> None:
        for package in ("obstore", "moto", "flask_cors"):
            pytest.importorskip(package)
        self.port = free_port()
        self.url = "s3://fusionkv/prefix"
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        # One process has one endpoint, as a service has.
        os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=self.endpoint)
        self.start()

    def start(self) -> None:
        command = (sys.executable, "-P", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port))
        self._begin(command, self._folder / f"s3-{self.port}.log", self._made)

    def _made(self) -> bool:
        """Whether it has a bucket."""
        with contextlib.suppress(OSError):
            bucket = urllib.request.Request(f"{self.endpoint}/fusionkv", method="PUT")
            return bool(urllib.request.urlopen(bucket, timeout=10))
        return False


class Directory:
    """A directory, which is gone where a server would be killed."""

    flags: Sequence[str] = ()

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("obstore")
        self._folder = folder / "shared files"
        self.url = f"file://{self._folder}".replace(" ", "%20")
        self.start()

    def start(self) -> None:
        self._folder.mkdir()

    def kill9(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def still(self) -> contextlib.AbstractContextManager[None]:
        pytest.skip("a directory does not stand still")
