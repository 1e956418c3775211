"""A model in a process of its own: what is asked of it waits in order, questions before documents."""

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

# Python, torch and a model of 100 MB: four seconds, on a machine with nothing else to do.
_START_SECONDS = 120.0
# All that it knows of the gateway's environment, which may hold secrets.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
Reply = tuple[dict[str, Any], bytes]


class _Asked(NamedTuple):
    later: bool
    number: int
    message: dict[str, Any]
    reply: "asyncio.Future[Reply]"


class ModelProcess:
    """Belongs to one event loop. One that has died is started again by the next request.

    told: what the model says of itself.
    """

    def __init__(self, task: str, directory: Path, threads: int) -> None:
        self.told: dict[str, Any] = {}
        self._argv = (task, str(directory), str(threads))
        self._process: asyncio.subprocess.Process | None = None
        self._numbers = itertools.count()
        self._queue: asyncio.PriorityQueue[_Asked] = asyncio.PriorityQueue()
        self._serving: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, task: str, directory: Path, threads: int) -> "ModelProcess":
        """Starts it, and waits until the model is loaded.

        Raises:
            FailedPrecondition: the directory is no such model.
            Unavailable: the process can't be started.
        """
        made = cls(task, directory, threads)
        await made._start()
        made._serving = asyncio.create_task(made._serve())
        return made

    async def ask(self, message: dict[str, Any], *, later: bool = False) -> Reply:
        """The reply to a message. later: whatever is not comes first.

        Raises:
            Unavailable: the process ended meanwhile, or can't be started.
        """
        asked = _Asked(later, next(self._numbers), message, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(asked)
        return await asked.reply

    async def close(self) -> None:
        """Ends the process; whoever waits is told that it is unavailable."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        while not self._queue.empty():
            _fail(self._queue.get_nowait().reply, Unavailable("the gateway is stopping"))
        await self._end()

    async def _serve(self) -> None:
        while True:
            asked = await self._queue.get()
            if asked.reply.done():  # its caller was cancelled
                continue
            try:
                if self._process is None:
                    await self._start()
                said, data = await self._exchange(asked.message)
            except asyncio.CancelledError:
                _fail(asked.reply, Unavailable("the gateway is stopping"))
                raise
            except (OSError, EOFError) as error:
                await self._end()
                _fail(asked.reply, Unavailable(f"the process of {self._argv[1]} has ended: {type(error).__name__}"))
            except ServiceError as error:
                _fail(asked.reply, error)
            else:
                if "failed" in said:
                    _fail(asked.reply, ServiceError(f"{self._argv[1]}: {said['failed']}"))
                elif not asked.reply.done():
                    asked.reply.set_result((said, data))

    async def _start(self) -> None:
        try:
            async with asyncio.timeout(_START_SECONDS):
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", child.__name__, *self._argv),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
                    # A thread that waits for the other leaves its core to the workers.
                    | {"OMP_NUM_THREADS": self._argv[2], "OMP_WAIT_POLICY": "PASSIVE"}
                    | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
                    # Ctrl-C reaches the gateway alone.
                    start_new_session=True,
                )
                self.told, _ = await self._read()
        except (OSError, EOFError, TimeoutError) as error:
            await self._end()
            why = str(error) or type(error).__name__
            raise Unavailable(f"no process could be started for {self._argv[1]}: {why}") from error
        if "refused" in self.told:
            await self._end()
            raise FailedPrecondition(f"{self._argv[1]} can't be used to {self._argv[0]}: {self.told['refused']}")

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
        said = json.loads(await stdout.readexactly(first))
        return said, await stdout.readexactly(second)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _fail(reply: "asyncio.Future[Reply]", error: Exception) -> None:
    if not reply.done():
        reply.set_exception(error)
