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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain
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
# A unix socket's path has at most 107 bytes. Lists of addresses are split at commas and spaces.
_SOCKET_PATH = re.compile(r"[\w./-]{1,107}", re.ASCII)
_MAX_LINE = 16 << 20
_POLL_SECONDS = 1.0
# Before a service that has ended is started again: at first, and at most, with twice the last time between. After so
# many seconds of serving, an end counts as the first.
_WAIT_SECONDS, _MAX_WAIT_SECONDS, _SOUND_SECONDS = 0.5, 30.0, 60.0
_TRIES = 5
# A process that has ended may leave children behind, which hold its output open.
_LAST_LINES_SECONDS = 1.0
_NONE: Mapping[str, str] = {}
_ENDPOINTS = {"fusionkv-gateway": "gRPC", "fusionkv-gateway-http": "HTTP"}


class Child:
    """One service, started again whenever its process ends. Its output goes to standard error, after its name.

    Args:
        listeners: flags that set the addresses of its servers, by the name that each reports. The service is up once
            all of them serve; it starts again with the same addresses.
    """

    def __init__(
        self,
        name: str,
        module: str,
        flags: Sequence[str],
        *,
        listeners: Mapping[str, str] = _NONE,
        as_json: bool = False,
    ) -> None:
        self.name = name
        self._listeners, self._as_json = listeners, as_json
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
        """Starts the service, and again after a wait when it has ended, however often it serves and ends.

        Raises ChildEnded if it exits before it has ever served, as with a setting that can't be, or if `_TRIES`
        processes in a row ended before they served.
        """
        unserved, wait = 0, _WAIT_SECONDS / 2
        while True:
            await self.start()
            assert self.ended is not None
            status = await asyncio.shield(self.ended)
            seconds = time.monotonic() - self._served_since if self._served_since else 0.0
            unserved = 0 if seconds else unserved + 1
            if unserved == _TRIES or (status >= 0 and not self.up.is_set()):
                raise ChildEnded(self, status, unserved)
            wait = _WAIT_SECONDS if seconds > _SOUND_SECONDS else min(2 * wait, _MAX_WAIT_SECONDS)
            line = f"{ChildEnded(self, status)}; it starts again in {wait:g} s"
            _report(self._as_json, "ended", line, service=self.name, exit_code=status, restart_seconds=wait)
            await asyncio.sleep(wait)

    async def start(self) -> None:
        """Starts a process. Its output is printed until it ends, and `ended` then holds its exit status."""
        again = [(flag, ",".join(self.served[name])) for name, flag in self._listeners.items() if self.up.is_set()]
        self.last, self._served_since, self._began = "", None, time.monotonic()
        # Not a pipe of asyncio's: with one, a process that has ended counts as running while a child of it goes on.
        reading, writing = os.pipe()
        output = asyncio.StreamReader(limit=_MAX_LINE)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(reading, "rb")
        )
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(*self._argv, *chain.from_iterable(again)),
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
        self.ended = asyncio.create_task(self._wait(self._process, asyncio.create_task(self._read(output))))

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

    async def _wait(self, running: asyncio.subprocess.Process, reading: "asyncio.Task[None]") -> int:
        status = await running.wait()
        await asyncio.wait([reading], timeout=_LAST_LINES_SECONDS)
        return status

    async def _read(self, output: asyncio.StreamReader) -> None:
        awaited = {f"fusionkv-{self.name}", *self._listeners}
        async for raw in output:
            line = raw.decode(errors="replace").rstrip("\n")
            if match := _SERVING.match(line):
                self.served[match[1]] = shlex.split(match[2])
                if match[1] in awaited:  # others, such as the data plane of a cache service, are not waited for
                    awaited.remove(match[1])
                    if not awaited:
                        self._serves()
                continue
            if not _TRACEBACK.match(line):
                self.last = line
            process.say(self._shown(line), sys.stderr)

    def _serves(self) -> None:
        self._served_since = time.monotonic()
        if self.up.is_set():
            self.report()
        self.up.set()

    def _shown(self, line: str) -> str:
        """The line with the service's name, which log records in JSON already have."""
        if line.startswith("{"):
            return line
        if logs.as_json():
            return json.dumps({"service": f"fusionkv-{self.name}", "message": line})
        return f"{self.name:8}| {line}"


class ChildEnded(Exception):
    """A service ended unexpectedly, for the last of so many `tries` to start it."""

    def __init__(self, child: Child, status: int, tries: int = 0) -> None:
        output = f"; its last line: {child.last}" if child.last else " without output"
        often = f"; none of {tries} tries to start it led to a service" if tries > 1 else ""
        super().__init__(f"{child.name} {process.how_ended(status)}{output}{often}")


async def serve(args: argparse.Namespace) -> int:
    """Starts cache service, worker and gateway, and stops them in the reverse order."""
    stop = asyncio.Event()
    children: list[Child] = []

    def request_stop() -> None:
        if stop.is_set():  # second signal
            for child in children:
                child.signal(signal.SIGKILL)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, request_stop)
    config = _gateway(args)
    with contextlib.ExitStack() as stack:
        children.extend(_children(args, config, stack))
        running = asyncio.create_task(_run(children, config, args.json))
        stop_requested = asyncio.create_task(stop.wait())
        await asyncio.wait([running, stop_requested], return_when=asyncio.FIRST_COMPLETED)
        failure = running.exception() if running.done() else None
        stop_requested.cancel()
        running.cancel()
        await asyncio.wait([running])  # no service is started again from here on
        _report(args.json, "stopping", "stopping")
        for child in reversed(children):
            await child.stop()
        if isinstance(failure, ExceptionGroup):
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
        await asyncio.sleep(_POLL_SECONDS)  # Stats would need a token or a client certificate
        return
    async with AsyncClient(gateway.served["fusionkv-gateway"][0]) as client:
        while not (await _answered(client.stats)).worker:  # noqa: ASYNC110 - the gateway sends no event
            await asyncio.sleep(_POLL_SECONDS / 20)


async def _answered(call: Callable[[], Awaitable[T]]) -> T:
    """What a service answers, which may have ended just now and start again."""
    while True:
        try:
            return await call()
        except Unavailable:
            await asyncio.sleep(_POLL_SECONDS / 20)


def _gateway(args: argparse.Namespace) -> GatewayConfig:
    """Loads the gateway's settings. Raises SettingsError, and OSError if one of its ports is in use."""
    overrides = {name: getattr(args, name) for name in ("listen", "http_listen")}
    config = settings.load(GatewayConfig, "gateway", file=args.config, flags=overrides)
    for name in overrides:
        process.check_ports(getattr(config, name), f"--{name.replace('_', '-')}")
    return config


def _children(args: argparse.Namespace, gateway: GatewayConfig, stack: contextlib.ExitStack) -> list[Child]:
    data = args.data_dir.expanduser().absolute()
    sockets = data / "run"
    if not _holds_sockets(sockets):
        # TMPDIR may be as odd, or as long.
        place = next((place for place in (tempfile.gettempdir(), "/tmp", "/dev/shm") if _holds_sockets(place)), None)
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fusionkv-", dir=place)))
    try:
        data.mkdir(parents=True, exist_ok=True)
        sockets.mkdir(exist_ok=True)
        sockets.chmod(0o700)  # who can connect to a socket can read every entry
    except OSError as error:
        raise OSError(f"--data-dir {data} can't be created: {error.strerror}; choose a writable directory") from error
    cache, worker = (f"unix:{sockets / name}.sock" for name in ("kvcache", "worker"))
    config = ["--config", str(args.config.absolute())] if args.config else []
    model = ["--model", str(args.model)] if args.model else []
    listen = ["--listen", ",".join(gateway.listen)]
    listeners = {"fusionkv-gateway": "--listen"}
    if gateway.http_listen:
        listeners["fusionkv-gateway-http"] = "--http-listen"
        listen += ["--http-listen", ",".join(gateway.http_listen)]
    modules = {
        "kvcache": ("fusionkv.kvcache_service", ["--listen", cache, "--data-dir", str(data / "kvcache")]),
        "worker": ("fusionkv.fusion_worker", [*model, "--listen", worker, "--cache", cache]),
        "gateway": ("fusionkv.gateway", [*listen, "--workers", worker, "--data-dir", str(data / "gateway")]),
    }
    return [
        Child(name, module, [*config, *flags], listeners=listeners if name == "gateway" else {}, as_json=args.json)
        for name, (module, flags) in modules.items()
    ]


def _holds_sockets(folder: Path | str) -> bool:
    """Whether the path of a folder, or of one made in it, suits unix sockets."""
    return _SOCKET_PATH.fullmatch(f"{folder}/fusionkv-12345678/kvcache.sock.segments") is not None


def _report(as_json: bool, event: str, line: str, **values: object) -> None:
    process.say(json.dumps({"event": event, **values}) if as_json else line, sys.stdout)
