"""Runs a model in a separate process; questions are processed before documents."""

import asyncio
import contextlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from fusionkv.gateway.embed import child
from fusionkv.gateway.embed.frames import HEAD, frame
from fusionkv.protos.runtime.errors import FailedPrecondition, ServiceError, Unavailable

# Loading Python, torch and a model of 100 MB takes four seconds on an idle machine.
_START_SECONDS = 120.0
# The only environment variables passed on: the gateway's environment may hold secrets.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
Reply = tuple[dict[str, Any], bytes]


class _Request(NamedTuple):
    background: bool
    number: int
    message: dict[str, Any]
    reply: "asyncio.Future[Reply]"


class ModelProcess:
    """Requests to a model in a separate process, from one event loop. The next request restarts a process that died.

    Attributes:
        description: the model's description of itself, such as its name.
    """

    def __init__(self, task: str, directory: Path, threads: int) -> None:
        self.description: dict[str, Any] = {}
        self._argv = (task, str(directory), str(threads))
        self._process: asyncio.subprocess.Process | None = None
        self._numbers = itertools.count()
        self._queue: asyncio.PriorityQueue[_Request] = asyncio.PriorityQueue()
        self._serving: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, task: str, directory: Path, threads: int) -> "ModelProcess":
        """Starts the process and waits until the model is loaded.

        Raises:
            FailedPrecondition: the directory contains no such model.
            Unavailable: the process can't be started.
        """
        model_process = cls(task, directory, threads)
        await model_process._start()
        model_process._serving = asyncio.create_task(model_process._serve())
        return model_process

    async def ask(self, message: dict[str, Any], *, background: bool = False) -> Reply:
        """Returns the reply to a message. `background` messages wait until there are no others.

        Raises:
            Unavailable: the process ended before replying, or can't be started.
        """
        request = _Request(background, next(self._numbers), message, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(request)
        return await request.reply

    async def close(self) -> None:
        """Ends the process; pending requests fail as UNAVAILABLE."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        while not self._queue.empty():
            _fail(self._queue.get_nowait().reply, Unavailable("the gateway is stopping"))
        await self._end()

    async def _serve(self) -> None:
        while True:
            request = await self._queue.get()
            if request.reply.done():  # the caller was cancelled
                continue
            try:
                if self._process is None:
                    await self._start()
                reply, data = await self._exchange(request.message)
            except asyncio.CancelledError:
                _fail(request.reply, Unavailable("the gateway is stopping"))
                raise
            except (OSError, EOFError) as error:
                await self._end()
                why = type(error).__name__
                _fail(request.reply, Unavailable(f"the process of the model {self._argv[1]} ended: {why}"))
            except ServiceError as error:
                _fail(request.reply, error)
            else:
                if "failed" in reply:
                    _fail(request.reply, ServiceError(f"{self._argv[1]}: {reply['failed']}"))
                elif not request.reply.done():
                    request.reply.set_result((reply, data))

    async def _start(self) -> None:
        try:
            async with asyncio.timeout(_START_SECONDS):
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", child.__name__, *self._argv),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
                    # An OpenMP thread that waits releases its core to the workers.
                    | {"OMP_NUM_THREADS": self._argv[2], "OMP_WAIT_POLICY": "PASSIVE"}
                    | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
                    # Ctrl-C then reaches only the gateway.
                    start_new_session=True,
                )
                self.description, _ = await self._read()
        except (OSError, EOFError, TimeoutError) as error:
            await self._end()
            reason = str(error) or type(error).__name__
            raise Unavailable(f"can't start the process of the model {self._argv[1]}: {reason}") from error
        if "refused" in self.description:
            await self._end()
            task, directory, _ = self._argv
            raise FailedPrecondition(f"{directory} can't be used to {task}: {self.description['refused']}")

    async def _exchange(self, message: dict[str, Any]) -> Reply:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(frame(message))
        await self._process.stdin.drain()
        return await self._read()

    async def _read(self) -> Reply:
        assert self._process is not None
        stdout = self._process.stdout
        assert stdout is not None
        first, second = HEAD.unpack(await stdout.readexactly(HEAD.size))
        reply = json.loads(await stdout.readexactly(first))
        return reply, await stdout.readexactly(second)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _fail(reply: "asyncio.Future[Reply]", error: Exception) -> None:
    if not reply.done():
        reply.set_exception(error)
