"""`fusionkv serve all`: runs the three services as child processes on one machine."""

import argparse
import asyncio
import contextlib
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.gateway.cli.launch import launched
from fusionkv.gateway.client import DEFAULT_ADDRESS
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.gateway.config import GatewayConfig
from fusionkv.protos.observe import logs
from fusionkv.protos.runtime import process, settings

_SERVING = re.compile(r"^(\S+) serving on (.+)$")
# Lines of a traceback before its last one, which states the error.
_TRACEBACK = re.compile(r"^\s|^Traceback|^$")
# A unix socket's path has at most 107 bytes.
_MAX_SOCKET_PATH = 107
_MAX_LINE = 16 << 20
_POLL_SECONDS = 1.0
_ENDPOINTS = {"fusionkv-gateway": "gRPC", "fusionkv-gateway-http": "HTTP", "fusionkv-gateway-admin": "pages"}


class Child:
    """One service process. Its output goes to standard error, each line with the service's name.

    Args:
        listeners: names of further servers that the service must report as serving.
    """

    def __init__(self, name: str, module: str, flags: Sequence[str], *, listeners: Sequence[str] = ()) -> None:
        self.name = name
        self._awaited = {f"fusionkv-{name}", *listeners}
        self._argv = launched(f"serve {name}", module, flags)
        self._process: asyncio.subprocess.Process | None = None
        self.up: asyncio.Future[tuple[list[str], float]] = asyncio.get_running_loop().create_future()
        """Addresses of the service once it serves, and the time of its report."""
        self.ended: asyncio.Task[int] | None = None
        self.served: dict[str, list[str]] = {}
        """Addresses by server name, as far as the service has reported them."""
        self.last = ""
        """The last line that the service printed, tracebacks aside."""

    async def start(self) -> None:
        """Starts the process. Its output is printed until it ends, and `ended` then holds its exit status."""
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_MAX_LINE,
            # Ctrl-C then reaches only the parent, which stops the children in order.
            start_new_session=True,
            # If the parent is killed, no children remain that hold ports and data.
            preexec_fn=lambda: process.end_with_parent(signal.SIGTERM),
        )
        self.ended = asyncio.create_task(self._read(self._process))

    async def watch(self) -> None:
        """Waits for the end of the process. Raises ChildEnded."""
        assert self.ended is not None
        raise ChildEnded(self, await asyncio.shield(self.ended))

    async def stop(self) -> None:
        """Sends SIGTERM, on which the service drains, and waits for the process to end."""
        if self.ended is not None:
            self.signal(signal.SIGTERM)
            await self.ended

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _read(self, running: asyncio.subprocess.Process) -> int:
        assert running.stdout is not None
        async for raw in running.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            if match := _SERVING.match(line):
                self.served[match[1]] = match[2].split()
                if self._awaited <= self.served.keys() and not self.up.done():
                    self.up.set_result((self.served[f"fusionkv-{self.name}"], time.monotonic()))
                continue
            if not _TRACEBACK.match(line):
                self.last = line
            print(self._shown(line), file=sys.stderr, flush=True)
        return await running.wait()

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
        cause = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        output = f"; its last line: {child.last}" if child.last else " without output"
        super().__init__(f"{child.name} {cause}{output}")


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
    """Starts all services at once, reports them in order, and waits until one ends, which is an error."""
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for child in children:
            await child.start()
            group.create_task(child.watch())
        for child in children:
            addresses, since = await child.up
            seconds = round(since - began, 1)
            line = f"{child.name:8}up on {' '.join(addresses)} after {seconds} s"
            _report(as_json, "up", line, service=child.name, addresses=addresses, seconds=seconds)
        await _ready(children, config, as_json)


async def _ready(children: Sequence[Child], config: GatewayConfig, as_json: bool) -> None:
    """Reports the model, the endpoints, and how to go on."""
    _, worker, gateway = children
    client = WorkerClient(worker.served["fusionkv-worker"][0])
    try:
        model = await client.model()
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
        while not (await client.stats()).worker:  # noqa: ASYNC110 - the gateway sends no event
            await asyncio.sleep(_POLL_SECONDS / 20)


def _gateway(args: argparse.Namespace) -> GatewayConfig:
    """Loads the gateway's settings. Raises SettingsError, and OSError if one of its ports is in use."""
    overrides = {name: getattr(args, name) for name in ("listen", "http_listen", "admin_listen")}
    config = settings.load(GatewayConfig, "gateway", file=args.config, flags=overrides)
    for name in overrides:
        process.check_ports(getattr(config, name), f"--{name.replace('_', '-')}")
    return config


def _children(args: argparse.Namespace, gateway: GatewayConfig, stack: contextlib.ExitStack) -> list[Child]:
    data = args.data_dir.expanduser().absolute()
    sockets = data / "run"
    if len(bytes(sockets / "kvcache.sock")) > _MAX_SOCKET_PATH:
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fusionkv-")))
    try:
        sockets.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--data-dir {data} can't be created: {error.strerror}; choose a writable directory") from error
    cache, worker = (f"unix:{sockets / name}.sock" for name in ("kvcache", "worker"))
    config = ["--config", str(args.config.absolute())] if args.config else []
    model = ["--model", str(args.model)] if args.model else []
    listen = ["--listen", ",".join(gateway.listen)]
    names = {"fusionkv-gateway-http": gateway.http_listen, "fusionkv-gateway-admin": gateway.admin_listen}
    listen += ["--http-listen", ",".join(gateway.http_listen)] if gateway.http_listen else []
    listen += ["--admin-listen", ",".join(gateway.admin_listen)] if gateway.admin_listen else []
    return [
        Child(
            "kvcache", "fusionkv.kvcache_service", [*config, "--listen", cache, "--data-dir", str(data / "kvcache")]
        ),
        Child("worker", "fusionkv.fusion_worker", [*config, *model, "--listen", worker, "--cache", cache]),
        Child(
            "gateway",
            "fusionkv.gateway",
            [*config, *listen, "--workers", worker, "--data-dir", str(data / "gateway")],
            listeners=[name for name, addresses in names.items() if addresses],
        ),
    ]


def _report(as_json: bool, event: str, line: str, **values: object) -> None:
    print(json.dumps({"event": event, **values}) if as_json else line, flush=True)
