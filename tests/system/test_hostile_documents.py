"""Documents made to stop a gateway: others' calls go on, and no parser outlives its gateway."""

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fusionkv.gateway.client.client import Client
from fusionkv.protos.runtime.errors import ServiceError
from tests.processes import cpu_seconds, descendants, ended
from tests.services import Launch, start_gateway, start_worker, token_entry, token_flags
from tests.waiting import wait_until

pytestmark = [pytest.mark.system, pytest.mark.slow]
# What an expression of a library took the square of, with the interpreter's lock held for a whole call.
SPACES = b"<p>a" + b" " * 60_000 + b"b</p>"
# A token for each byte: half a minute of splitting, whatever is done about the others.
LONG = "".join(f"word{i} " for i in range(1_400_000)).encode()


def used(gateway: Any) -> dict[psutil.Process, float]:
    """CPU seconds of each process that parses for a gateway."""
    found = {}
    for parser in descendants(gateway.process.pid, ".ingest.parser"):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[parser] = cpu_seconds(parser.pid)
    return found


@pytest.fixture(scope="module")
def flags(launch_module: Launch, reference_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a gateway with two tenants, `acme` and `other`, whose tokens are their names."""
    entries = (token_entry(tenant, "app", tenant) for tenant in ("acme", "other"))
    worker = start_worker(launch_module, reference_model)
    limits = ("--parse-seconds", "3", "--max-document-chunks", "1000000")
    return ["--workers", worker.address, *token_flags(tmp_path_factory.mktemp("tokens"), *entries), *limits]


@pytest.fixture(scope="module")
def gateway(launch_module: Launch, flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return start_gateway(launch_module, tmp_path_factory.mktemp("hostile"), None, *flags)


@contextlib.contextmanager
def during(call: Callable[[], Any]) -> Iterator[threading.Event]:
    """While `call` runs again and again in another thread; the event is set when it has come back twice."""
    ends, twice = threading.Event(), threading.Event()

    def run() -> None:
        number = 0
        while not ends.is_set():
            with contextlib.suppress(ServiceError):
                call()
            number += 1
            if number == 2:
                twice.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield twice
    finally:
        ends.set()
        thread.join()


@pytest.mark.long
@pytest.mark.parametrize("content", [SPACES, LONG], ids=["spaces", "long"])
def test_others_are_answered_meanwhile(gateway: Any, content: bytes) -> None:
    kind = "text/plain" if content is LONG else "text/html"
    with Client(gateway.address, token="acme", timeout=60) as acme, Client(gateway.address, token="other") as other:
        other.ingest("c", "d.txt", "The code of Bervek is 5.")
        acme.ingest("c", "d.txt", "x")
        seconds = []
        with during(lambda: acme.ingest("c", "hostile", content, media_type=kind)) as twice:
            while not twice.is_set() or len(seconds) < 50:
                began = time.monotonic()
                assert [item.name for item in other.list()] == ["c"]
                seconds.append(time.monotonic() - began)
            # Nor are their documents kept waiting: a parser is left for them.
            other.ingest("c", "e.txt", "The code of Kolvim is 6.")
            assert other.ask("c", "code of Bervek?", max_tokens=1).summary.tokens_generated == 1
        # A frozen interpreter answered nobody for 10 to 20 s.
        assert max(seconds) < 1, (statistics.median(seconds), max(seconds))


@pytest.mark.long
@pytest.mark.parametrize("how", ["in order", "killed", "killed while it is idle"])
def test_parsers_end_with_their_gateway(launch: Launch, flags: list[str], tmp_path: Path, how: str) -> None:
    gateway = start_gateway(launch, tmp_path, None, *flags)
    with Client(gateway.address, token="acme", timeout=60) as acme:
        acme.ingest("c", "d.txt", "x")
        running = used(gateway)
        assert running

        def send() -> None:
            with contextlib.suppress(ServiceError):
                acme.ingest("c", "long.txt", LONG)

        thread = threading.Thread(target=send)
        if how != "killed while it is idle":
            thread.start()
            # On a busy machine, a parser may be replaced before it has had its time.
            wait_until(lambda: any(spent > running.get(one, 0) + 0.3 for one, spent in used(gateway).items()))
        running = used(gateway)
        if how == "in order":
            began = time.monotonic()
            assert gateway.stop(30) == 0
            # The call in flight is waited for, so parse_seconds at most.
            assert time.monotonic() - began < 15
        else:
            gateway.kill9()
        wait_until(lambda: all(map(ended, running)), 10)
        acme.close()
        if thread.ident is not None:
            thread.join()
