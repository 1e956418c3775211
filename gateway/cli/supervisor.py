"""`fusionkv serve all`: the three services as child processes of one, on one machine."""

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
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.gateway.client.client import AsyncClient
from fusionkv.gateway.config import GatewayConfig
from fusionkv.protos.runtime import process, rpc, settings

_SERVING = re.compile(r"^(\S+) serving on (.+)$")
# Lines of a log that may be what a service ended with.
_TRACEBACK = re.compile(r"^\s|^Traceback|^$")
# A unix socket's path has at most 107 bytes.
_LONGEST_SOCKET = 107
_LONGEST_LINE = 16 << 20
_HEALTH_SECONDS = 10.0
_LOOK_SECONDS = 1.0
_ENDPOINTS = {"fusionkv-gateway": "gRPC", "fusionkv-gateway-http": "HTTP", "fusionkv-gateway-admin": "pages"}


class Child:
    """One service process. Its output goes to standard error, each line under its name.

    listeners: what it says is serving, beside itself. plain: without TLS.
    """

    def __init__(
        self, name: str, module: str, flags: Sequence[str], *, listeners: Sequence[str] = (), plain: bool = True
    ) -> None:
        self.name = name
        self._plain = plain
        self._awaited = {f"fusionkv-{name}", *listeners}
        self._argv = [sys.executable, "-P", "-m", module, *flags]
        self._process: asyncio.subprocess.Process | None = None
        self._addresses: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._reading: asyncio.Task[None] | None = None
        self.served: dict[str, list[str]] = {}
        """Addresses by what listens there, as the service has said so far."""
        self.last = ""
        """What the service printed last."""

    async def start(self) -> list[str]:
        """Starts the process and waits until it reports itself healthy; returns its addresses.

        Raises:
            ChildEnded: the process ended before.
        """
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_LONGEST_LINE,
            # Ctrl-C reaches the parent alone, which ends the children in order.
            start_new_session=True,
            # A killed parent leaves no orphans that hold ports and data.
            preexec_fn=lambda: process.end_with_parent(signal.SIGTERM),
        )
        self._reading = asyncio.create_task(self._read())
        ended = asyncio.create_task(self.ended())
        futures: list[asyncio.Future[Any]] = [self._addresses, ended]
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not self._addresses.done():
            raise ChildEnded(self, await ended)
        ended.cancel()
        addresses = self._addresses.result()
        # With TLS nobody says here whose certificate to trust: that the service says it serves has to do.
        if self._plain:
            await _healthy(addresses[0])
        return addresses

    async def ended(self) -> int:
        """Waits for the end of the process and its output; returns its exit status."""
        assert self._process is not None
        assert self._reading is not None
        status = await self._process.wait()
        await asyncio.shield(self._reading)
        return status

    async def stop(self) -> None:
        """SIGTERM, on which the service drains, and waits for the end."""
        if self._process is not None:
            self.signal(signal.SIGTERM)
            await self.ended()

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            match = _SERVING.match(line)
            if match:
                self.served[match[1]] = match[2].split()
                if self._awaited <= self.served.keys() and not self._addresses.done():
                    self._addresses.set_result(self.served[f"fusionkv-{self.name}"])
                continue
            if not _TRACEBACK.match(line):
                self.last = line
            # JSON names its service itself, and stays JSON.
            shown = line if line.startswith("{") else f"{self.name:8}| {line}"
            print(shown, file=sys.stderr, flush=True)


class ChildEnded(Exception):
    """A service ended that should run on."""

    def __init__(self, child: Child, status: int) -> None:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        said = f"; its last line: {child.last}" if child.last else ", and had printed nothing"
        super().__init__(f"{child.name} {how}{said}")


async def serve(args: argparse.Namespace) -> int:
    """Starts cache service, worker and gateway, and stops them in the reverse order."""
    stop = asyncio.Event()
    children: list[Child] = []

    def stopped() -> None:
        if stop.is_set():  # asked twice
            for child in children:
                child.signal(signal.SIGKILL)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped)
    config = _gateway(args)
    with contextlib.ExitStack() as stack:
        children.extend(_children(args, config, stack))
        running = asyncio.create_task(_run(children, config, args.json))
        asked = asyncio.create_task(stop.wait())
        await asyncio.wait([running, asked], return_when=asyncio.FIRST_COMPLETED)
        failure = running.exception() if running.done() else None
        asked.cancel()
        running.cancel()
        _report(args.json, "stopping", "stopping")
        for child in reversed(children):
            await child.stop()
        if failure is not None:
            if not isinstance(failure, (ChildEnded, OSError)):
                raise failure
            print(f"fusionkv: {failure}", file=sys.stderr)
            return 1
    return 0


async def _run(children: Sequence[Child], config: GatewayConfig, as_json: bool) -> None:
    """Starts all at once, reports them in their order, then waits for one to end, which is a failure."""
    began = time.monotonic()
    starting: dict[asyncio.Task[list[str]], Child] = {asyncio.create_task(c.start()): c for c in children}
    watched: dict[asyncio.Task[int], Child] = {}
    told: dict[Child, dict[str, Any]] = {}
    unreported = list(children)
    try:
        while starting:
            await asyncio.wait({*starting, *watched}, return_when=asyncio.FIRST_COMPLETED)
            _raise_if_ended(watched)
            for up in [task for task in starting if task.done()]:
                child = starting.pop(up)
                told[child] = {"addresses": up.result(), "seconds": round(time.monotonic() - began, 1)}
                watched[asyncio.create_task(child.ended())] = child
            while unreported and unreported[0] in told:
                child = unreported.pop(0)
                line = "{0:8}up on {1} after {seconds} s"
                line = line.format(child.name, " ".join(told[child]["addresses"]), **told[child])
                _report(as_json, "up", line, service=child.name, **told[child])
        await _ready(children, config, as_json)
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        _raise_if_ended(watched)
    finally:
        for task in (*watched, *starting):
            task.cancel()


async def _ready(children: Sequence[Child], config: GatewayConfig, as_json: bool) -> None:
    """Says what can be asked where, and what to do next."""
    _, worker, gateway = children
    client = WorkerClient(worker.served["fusionkv-worker"][0])
    try:
        model = await client.model()
    finally:
        await client.close()
    await _reached(gateway, config)
    lines = [
        f"  model    {model.name} ({model.dtype} on {model.device}, prompts of up to {model.max_tokens:,} tokens)",
        f"  recipe   {config.recipe}",
        *(f"  {_ENDPOINTS[name]:8} {' '.join(where)}" for name, where in gateway.served.items()),
        "  next     fusionkv ingest CORPUS FOLDER, then fusionkv ask CORPUS QUESTION; Ctrl-C stops",
    ]
    endpoints = {_ENDPOINTS[name].lower(): where for name, where in gateway.served.items()}
    _report(
        as_json, "ready", "\n".join(["ready", *lines]), model=model.name, recipe=config.recipe, endpoints=endpoints
    )


async def _reached(gateway: Child, config: GatewayConfig) -> None:
    """Waits until the gateway, which may have been up first, has found its worker. It looks once a second."""
    if config.server_tls is not None or config.auth_tokens or config.auth_jwks:
        await asyncio.sleep(_LOOK_SECONDS)  # it answers nobody without a token, or whom it does not trust
        return
    async with AsyncClient(gateway.served["fusionkv-gateway"][0]) as client:
        while not (await client.stats()).worker:  # noqa: ASYNC110 - only the gateway knows
            await asyncio.sleep(_LOOK_SECONDS / 20)


def _raise_if_ended(watched: dict["asyncio.Task[int]", Child]) -> None:
    for task, child in watched.items():
        if task.done():
            raise ChildEnded(child, task.result())


def _gateway(args: argparse.Namespace) -> GatewayConfig:
    """What the gateway will be told. Raises SettingsError, and OSError where another program has one of its ports."""
    flags = {name: getattr(args, name) for name in ("listen", "http_listen", "admin_listen")}
    config = settings.load(GatewayConfig, "gateway", file=args.config, flags=flags)
    for name in flags:
        process.check_ports(getattr(config, name), f"--{name.replace('_', '-')}")
    return config


def _children(args: argparse.Namespace, gateway: GatewayConfig, stack: contextlib.ExitStack) -> list[Child]:
    data = args.data_dir.expanduser().absolute()
    sockets = data / "run"
    if len(bytes(sockets / "kvcache.sock")) > _LONGEST_SOCKET:
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fusionkv-")))
    sockets.mkdir(parents=True, exist_ok=True)
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
            plain=gateway.server_tls is None,
        ),
    ]


async def _healthy(address: str) -> None:
    channel = rpc.dial(address)
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_SECONDS, wait_for_ready=True)
        if reply.status != health_pb2.HealthCheckResponse.SERVING:
            raise OSError(f"{address} accepts calls but does not report itself healthy")
    finally:
        await channel.close()


def _report(as_json: bool, event: str, line: str, **values: object) -> None:
    print(json.dumps({"event": event, **values}) if as_json else line, flush=True)
