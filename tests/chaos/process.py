"""One service of a chaos run: at one address with one clock, whatever becomes of its processes."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from tests.chaos.network import Place
from tests.chaos.versions import Version
from tests.conftest import Service
from tests.system.redis_process import still

_START_SECONDS = 300
_LIBRARIES = tuple(f"/usr/lib/{kind}-linux-gnu/faketime/libfaketime.so.1" for kind in ("x86_64", "aarch64"))
# Of a log, kept for the report of a failure.
_MOST_LOG = 20_000


class Wrong(AssertionError):
    """Something that must never happen."""


class Clock:
    """The wall clock of one process, which jumps when it is told to; time that only runs on goes on as ever."""

    preload = next((path for path in _LIBRARIES if os.path.exists(path)), "")

    def __init__(self, file: Path) -> None:
        self._file = file
        self.jump(0)

    def jump(self, seconds: int) -> None:
        """To so many seconds from the true time."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{seconds:+d}\n")
        fresh.replace(self._file)

    @property
    def environment(self) -> Mapping[str, str]:
        """What makes a process read this clock; nothing where the preload is missing."""
        if not self.preload:
            return {}
        return {
            "LD_PRELOAD": self.preload,
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DISABLE_SHM": "1",
        }


class Process:
    """A service that is started, killed and stopped; `log` is what all its processes said."""

    def __init__(
        self, name: str, place: Place, module: str, *flags: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.place, self.address = name, place, place.listen()
        self._module, self.flags, self._env = module, flags, env or {}
        self._service: Service | None = None
        self._logs: list[str] = []

    def add(self, *flags: str) -> None:
        """Flags that follow from its place."""
        self.flags = (*self.flags, *flags)

    @property
    def pid(self) -> int:
        assert self._service is not None
        return self._service.process.pid

    @property
    def alive(self) -> bool:
        return self._service is not None and self._service.process.poll() is None

    @property
    def log(self) -> str:
        now = self._service.log if self._service else ""
        return "\n---\n".join([*self._logs, now])[-_MOST_LOG:]

    def begin(self, version: Version | None = None) -> Service:
        """A process of this version, or of another one."""
        if self._service is not None:
            self._logs = [self.log]
        env = {**self._env, **(version.environment if version else {})}
        self._service = Service(
            self._module, "--listen", self.address, *self.flags, env=env, before=self.place.before
        )
        return self._service

    async def start(self, version: Version | None = None) -> None:
        """Raises AssertionError, with its output, if it does not come to serve."""
        service = self.begin(version)
        await asyncio.to_thread(service.wait_until_serving, 1, _START_SECONDS)

    def kill9(self) -> None:
        assert self._service is not None
        self._service.kill9()

    async def ended(self) -> None:
        """Waits for its end after SIGTERM. Raises Wrong for an exit status that is not 0."""
        assert self._service is not None
        status = await asyncio.to_thread(self._service.wait, 60)
        if status != 0:
            raise Wrong(f"{self.name} ended with {status} after SIGTERM:\n{self.log}")

    def signal(self, number: signal.Signals) -> None:
        assert self._service is not None
        self._service.process.send_signal(number)

    def still(self) -> contextlib.AbstractContextManager[None]:
        assert self._service is not None
        return still(self._service.process)
