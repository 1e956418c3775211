"""How tests start each service, in processes and in the test's own, and the files of tokens that gateways get."""

import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from fusionkv.protos.runtime.tls import ServerTLS

Launch = Callable[..., Any]
HERE = ("--listen", "127.0.0.1:0")


@asynccontextmanager
async def listening(handler: Any, address: str = "", tls: ServerTLS | None = None) -> AsyncIterator[str]:
    """Serves a servicer's handler in this process, on port 0 unless an address is given; yields the address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    at = address or "127.0.0.1:0"
    port = server.add_insecure_port(at) if tls is None else server.add_secure_port(at, tls.credentials())
    await server.start()
    try:
        yield address or f"127.0.0.1:{port}"
    finally:
        await server.stop(1)


def start_cache(launch: Launch, folder: Path, *flags: str, **more: Any) -> Any:
    """A cache service whose data lie in a folder of their own below `folder`."""
    return launch("fusionkv.kvcache_service", *HERE, "--data-dir", str(folder / "kvcache"), *flags, **more)


def start_worker(launch: Launch, model: Path, *flags: str, cache: Any = None, **more: Any) -> Any:
    """A worker of one thread; cache: the service that it uses, by default none."""
    own = ("--model", str(model), "--threads", "1", "--pool-bytes", "64MiB")
    used = ("--cache", cache.address) if cache is not None else ()
    return launch("fusionkv.fusion_worker", *HERE, *own, *used, *flags, **more)


def pool_bytes(model: Path, tokens: int) -> str:
    """The size of a worker's pool, in float32, of so many tokens of the model in a directory."""
    shape = json.loads((model / "config.json").read_text())
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    return str(tokens * shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * head * 4)


def start_gateway(launch: Launch, folder: Path, workers: Any, *flags: str, **more: Any) -> Any:
    """A gateway whose data lie below `folder`; workers: one, a list, or None: then its calls to them fail."""
    each = workers if isinstance(workers, list) else [workers]
    addresses = ",".join(worker.address for worker in each) if workers else "127.0.0.1:1"
    data = ("--workers", addresses, "--data-dir", str(folder / "gateway"))
    return launch("fusionkv.gateway", *HERE, *data, *flags, **more)


def token_entry(token: str, role: str = "operator", tenant: str = "acme") -> str:
    """Of a file of tokens."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    return f'[[token]]\nname = "{role}"\nrole = "{role}"\ntenant = "{tenant}"\nsha256 = "{digest}"\n'


def token_flags(folder: Path, *entries: str) -> tuple[str, str]:
    """Writes a file of tokens; returns the flags by which a gateway takes it."""
    file = folder / "tokens"
    file.write_text("".join(entries))
    return "--auth-tokens", str(file)
