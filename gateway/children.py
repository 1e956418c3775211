"""Child processes of a gateway, which exchange messages with it through pipes: JSON and bytes."""

import asyncio
import contextlib
import json
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

_HEAD = struct.Struct("<QQ")
# The only environment variables passed on: the gateway's environment may hold secrets.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
_WRITE_BYTES = 1 << 18
Message = tuple[Any, bytes]


def frame(value: Any, data: bytes = b"") -> bytes:
    """A message: the lengths of both parts, a value as JSON, and bytes."""
    text = json.dumps(value, ensure_ascii=False).encode()
    return _HEAD.pack(len(text), len(data)) + text + data


def take_pipes(output: int) -> tuple[BinaryIO, BinaryIO]:
    """The pipes from and to the gateway, for a child process.

    Only messages may use the two pipes: the output of libraries goes to the file descriptor `output`.
    """
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull) as devnull:
        os.dup2(devnull.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    return incoming, outgoing


def messages(incoming: BinaryIO) -> Iterator[Message]:
    while head := incoming.read(_HEAD.size):
        first, second = _HEAD.unpack(head)
        yield json.loads(incoming.read(first)), incoming.read(second)


class ChildProcess:
    """A child process. Once it has ended, `send` raises OSError and `receive` EOFError."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.pid = process.pid
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout

    @classmethod
    async def start(cls, module: str, *args: str, environ: Mapping[str, str]) -> "ChildProcess":
        """Starts a module with nothing of the gateway's environment but what Python needs. Raises OSError."""
        # No preexec_fn: it would run code in the child of a process with gRPC's threads.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module, *args),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | {**environ},
            # Ctrl-C then reaches only the gateway.
            start_new_session=True,
        )
        return cls(process)

    async def send(self, value: Any, data: bytes = b"") -> None:
        message = memoryview(frame(value, data))
        for at in range(0, len(message), _WRITE_BYTES):
            self._stdin.write(message[at : at + _WRITE_BYTES])
            await self._stdin.drain()

    async def receive(self) -> Message:
        first, second = _HEAD.unpack(await self._stdout.readexactly(_HEAD.size))
        return json.loads(await self._stdout.readexactly(first)), await self._stdout.readexactly(second)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> int:
        """Waits for the end of the process; returns its status."""
        return await self._process.wait()

    async def end(self) -> None:
        self.kill()
        self._stdin.close()
        with contextlib.suppress(OSError):  # unwritten data no longer matters
            await self._stdin.wait_closed()
        await self._process.wait()
