"""`fusionkv serve all`: runs the three services as child processes on one machine."""

import argparse
import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.gateway.cli.launch import launched
from fusionkv.gateway.client import DEFAULT_ADDRESS
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.gateway.config import GatewayConfig
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime import process, settings
from fusionkv.protos.runtime.errors import Unavailable

T = TypeVar("T")
_SERVING = re.compile(r"^(\S+) serving on (.+)$")
# Lines of a traceback before its last one, which states the error.
_TRACEBACK = re.compile(r"^\s|^Traceback|^$")
# Lists of addresses are split at commas and spaces. A socket's path has at most 107 bytes, and the longest name 22.
_SOCKETS = re.compile(r"[\w./-]{1,80}", re.ASCII)
_MAX_LINE = 16 << 20
_LOOK_SECONDS = 0.1
# Before a service that has ended is started again: at first, and at most, with twice the last time between. After so
# many seconds of serving, an end counts as the first.
_WAIT_SECONDS, _MAX_WAIT_SECONDS, _SOUND_SECONDS = 0.5, 30.0, 60.0
# A process that has ended may leave children behind, which hold its output open.
_LAST_LINES_SECONDS = 1.0
# By default, all data is below it, and the sockets.
_DATA = Path(".fusionkv")
_ENDPOINTS = {"fusionkv-gateway": "gRPC", "fusionkv-gateway-http": "HTTP"}


class Child:
    """One service, started again whenever its process ends. Its output goes to standard error, after its name.

    It is up once the server of its name serves, and the `others` that it has.
    """

    def __init__(
        self, name: str, module: str, flags: Sequence[str], *, others: Sequence[str] = (), as_json: bool = False
    ) -> None:
        self.name = name
        self._servers, self._as_json = {f"fusionkv-{name}", *others}, as_json
        self._argv = launched(f"serve {name}", module, flags)
        self._process: asyncio.subprocess.Process | None = None
        self.up = asyncio.Event()
        """Whether the service has served."""
        self._began = 0.0
        self._served_since: float | None = None
        """When all of this process's servers served, by the monotonic clock."""
        self.ended: asyncio.Task[int] | None = None
        self.served: dict[str, list[str]] = {}
        """Addresses by server name, as far as the service has reported them."""
        self.last = ""
        """The last line that the process printed, tracebacks aside."""

    async def keep(self) -> None:
        """Starts the service, and again after a wait whenever it has ended.

        Raises ChildEnded if it ends before it has ever served, as with a setting that can't be.
        """
        wait = _WAIT_SECONDS / 2
        while True:
            await self.start()
            assert self.ended is not None
            status = await asyncio.shield(self.ended)
            if not self.up.is_set():
                raise ChildEnded(self, status)
            sound = self._served_since is not None and time.monotonic() - self._served_since > _SOUND_SECONDS
            wait = _WAIT_SECONDS if sound else min(2 * wait, _MAX_WAIT_SECONDS)
            line = f"{ChildEnded(self, status)}; it starts again in {wait:g} s"
            _report(self._as_json, "ended", line, service=self.name, exit_code=status, restart_seconds=wait)
            await asyncio.sleep(wait)

    async def start(self) -> None:
        """Starts a process. Its output is printed until it ends, and `ended` then holds its exit status."""
        self.last, self._served_since, self._began = "", None, time.monotonic()
        # Not a pipe of asyncio's: with one, a process that has ended counts as running while a child of it goes on.
        reading, writing = os.pipe()
        output = asyncio.StreamReader(limit=_MAX_LINE)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(reading, "rb")
        )
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=asyncio.subprocess.STDOUT,
                # Ctrl-C then reaches only the parent, which stops the children in order.
                start_new_session=True,
                # If the parent is killed, no children remain that hold ports and data.
                preexec_fn=lambda: process.end_with_parent(signal.SIGTERM),
            )
        finally:
            os.close(writing)
        self.ended = asyncio.create_task(self._ended(self._process, output))

    async def stop(self) -> None:
        """Sends SIGTERM, on which the service drains, and waits for the process to end."""
        if self.ended is not None:
            self.signal(signal.SIGTERM)
            await self.ended

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def report(self) -> None:
        """Says that the service is up, and where."""
        addresses = self.served[f"fusionkv-{self.name}"]
        seconds = round((self._served_since or 0.0) - self._began, 1)
        line = f"{self.name:8}up on {' '.join(addresses)} after {seconds} s"
        _report(self._as_json, "up", line, service=self.name, addresses=addresses, seconds=seconds)

    async def _ended(self, running: asyncio.subprocess.Process, output: asyncio.StreamReader) -> int:
        reading = asyncio.create_task(self._read(output))
        status = await running.wait()
        await asyncio.wait([reading], timeout=_LAST_LINES_SECONDS)
        return status

    async def _read(self, output: asyncio.StreamReader) -> None:
        awaited = {*self._servers}
        async for raw in output:
            line = raw.decode(errors="replace").rstrip("\n")
            if match := _SERVING.match(line):
                self.served[match[1]] = shlex.split(match[2])
                awaited.discard(match[1])
                if not awaited and self._served_since is None:
                    self._served_since = time.monotonic()
                    if self.up.is_set():
                        self.report()
                    self.up.set()
                continue
            if not _TRACEBACK.match(line):
                self.last = line
            process.say(self._shown(line), sys.stderr)

    def _shown(self, line: str) -> str:
        """The line with the service's name, which log records in JSON already have."""
        if line.startswith("{"):
            return line
        if logs.as_json():
            return json.dumps({"service": f"fusionkv-{self.name}", "message": line})
        return f"{self.name:8}| {line}"


class ChildEnded(Exception):
    """A service ended unexpectedly."""

    def __init__(self, child: Child, status: int) -> None:
        output = f"; its last line: {child.last}" if child.last else " without output"
        super().__init__(f"{child.name} {process.how_ended(status)}{output}")


async def serve(args: argparse.Namespace) -> int:
    """Starts cache service, worker and gateway, and stops them in the reverse order."""
    config = _gateway(args)
    with contextlib.ExitStack() as stack:
        children = _children(args, config, stack)
        running = asyncio.create_task(_run(children, config, args.json))

        def stop() -> None:
            if running.done():  # second signal
                for child in children:
                    child.signal(signal.SIGKILL)
            running.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        await asyncio.wait([running])  # no service is started again from here on
        _report(args.json, "stopping", "stopping")
        for child in reversed(children):
            await child.stop()
        if not running.cancelled() and isinstance(failure := running.exception(), ExceptionGroup):
            first = failure.exceptions[0]
            if not isinstance(first, (ChildEnded, OSError)):
                raise first
            print(f"fusionkv: {first}", file=sys.stderr)
            return 1
    return 0


async def _run(children: Sequence[Child], config: GatewayConfig, as_json: bool) -> None:
    """Starts all services at once, reports them in order, and keeps them running until one can't be started."""
    async with asyncio.TaskGroup() as group:
        for child in children:
            group.create_task(child.keep())
        for child in children:
            await child.up.wait()
            child.report()
        await _ready(children, config, as_json)


async def _ready(children: Sequence[Child], config: GatewayConfig, as_json: bool) -> None:
    """Reports the model, the endpoints, and how to go on."""
    _, worker, gateway = children
    client = WorkerClient(worker.served["fusionkv-worker"][0])
    try:
        model = await _answered(client.model)
    finally:
        await client.close()
    await _wait_for_worker(gateway, config)
    (address, *_) = gateway.served["fusionkv-gateway"]
    flag = "" if address == DEFAULT_ADDRESS else f" --gateway {address}"
    first, then = f"fusionkv ingest{flag} CORPUS FOLDER", f"fusionkv ask{flag} CORPUS QUESTION"
    lines = [
        f"  model    {model.name} ({model.dtype} on {model.device}, prompts of up to {model.max_tokens:,} tokens)",
        f"  recipe   {config.recipe}",
        *(f"  {_ENDPOINTS[name]:8} {' '.join(where)}" for name, where in gateway.served.items()),
        f"  next     {first}, then {then}; Ctrl-C stops",
    ]
    endpoints = {_ENDPOINTS[name].lower(): where for name, where in gateway.served.items()}
    values = {"model": model.name, "recipe": config.recipe, "endpoints": endpoints, "next": [first, then]}
    _report(as_json, "ready", "\n".join(["ready", *lines]), **values)


async def _wait_for_worker(gateway: Child, config: GatewayConfig) -> None:
    """Waits until the gateway, which may have started first, has found the worker. It looks once a second."""
    if config.server_tls is not None or config.auth_tokens or config.auth_jwks:
        await asyncio.sleep(1)  # Stats would need a token or a client certificate
        return
    async with AsyncClient(gateway.served["fusionkv-gateway"][0]) as client:
        while not (await _answered(client.stats)).worker:  # noqa: ASYNC110 - the gateway sends no event
            await asyncio.sleep(_LOOK_SECONDS)


async def _answered(call: Callable[[], Awaitable[T]]) -> T:
    """What a service answers, which may have ended just now and start again."""
    while True:
        try:
            return await call()
        except Unavailable:
            await asyncio.sleep(_LOOK_SECONDS)


def _gateway(args: argparse.Namespace) -> GatewayConfig:
    """Loads the gateway's settings. Raises SettingsError, and OSError if one of its ports is in use."""
    overrides = {name: getattr(args, name) for name in ("listen", "http_listen")}
    config = settings.load(GatewayConfig, "gateway", file=args.config, flags=overrides)
    for name in overrides:
        process.check_ports(getattr(config, name), f"--{name.replace('_', '-')}")
    return config


def _children(args: argparse.Namespace, gateway: GatewayConfig, stack: contextlib.ExitStack) -> list[Child]:
    data = (args.data_dir or _DATA).expanduser().absolute()
    sockets = data / "run"
    if not _SOCKETS.fullmatch(str(sockets)):
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fusionkv-", dir="/tmp")))
    try:
        data.mkdir(parents=True, exist_ok=True)
        sockets.mkdir(exist_ok=True)
        sockets.chmod(0o700)  # who can connect to a socket can read every entry
    except OSError as error:
        raise OSError(f"--data-dir {data} can't be created: {error.strerror}; choose a writable directory") from error
    cache, worker = (f"unix:{sockets / name}.sock" for name in ("kvcache", "worker"))
    # Without the flag, each service has its own setting, which is below the same folder by default.
    kept = {name: ["--data-dir", str(data / name)] if args.data_dir else [] for name in ("kvcache", "gateway")}
    config = ["--config", str(args.config.absolute())] if args.config else []
    model = ["--model", str(args.model)] if args.model else []
    # Also if a flag makes it empty: the gateway would take the file's.
    listen = ["--listen", ",".join(gateway.listen), "--http-listen", ",".join(gateway.http_listen)]
    others = ["fusionkv-gateway-http"] if gateway.http_listen else []
    modules = {
        "kvcache": ("fusionkv.kvcache_service", ["--listen", cache, *kept["kvcache"]]),
        "worker": ("fusionkv.fusion_worker", [*model, "--listen", worker, "--cache", cache]),
        "gateway": ("fusionkv.gateway", [*listen, "--workers", worker, *kept["gateway"]]),
    }
    return [
        Child(name, module, [*config, *flags], others=others if name == "gateway" else (), as_json=args.json)
        for name, (module, flags) in modules.items()
    ]


def _report(as_json: bool, event: str, line: str, **values: object) -> None:
    process.say(json.dumps({"event": event, **values}) if as_json else line, sys.stdout)
