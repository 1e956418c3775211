"""Latency of List and of answers under hostile documents: `python -P bench/services/hostile.py [SECONDS]`.

Runs the services with default settings and a reference model, while another tenant sends hostile documents one after
another. Rounds with and without them alternate, so that both see the same load on the machine.
"""

import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path

import numpy as np

from fusionkv.bench.services.process import MODEL, running
from fusionkv.gateway.client.client import Client
from fusionkv.protos.runtime.errors import ServiceError

ROUNDS, PAUSE = 5, 0.005
_SENDERS = 2
DOCUMENTS = {
    "none": b"",
    "one harmless line": b"<p>a b</p>",
    "spaces in a row": b"<p>a" + b" " * 60_000 + b"b</p>",
    "lines in <pre>": b"<pre>a" + b"\n " * 60_000 + b"b</pre>",
    "tags that do not end": b"<a" * 200_000,
    "cells over 1000 columns": b"<table><tr>" + b"<td colspan=1000>x</td>" * 16_600,
    "elements, a million": b"<p><b>x</b>" * 1_000_000,
}
TENANTS = ("hostile", "other")
CALLS: dict[str, Callable[[Client], object]] = {
    "List": lambda client: client.list(),
    "answer": lambda client: client.ask("c", "What is on the page?", max_tokens=4),
}


def _sender(
    address: str, content: bytes, sends: threading.Event, ends: threading.Event, in_work: threading.Semaphore
) -> tuple[list[float], Callable[[], None]]:
    """Returns a list of seconds that documents took, and a function that sends documents while `sends` is set."""
    took: list[float] = []

    def run() -> None:
        with Client(address, token="hostile", timeout=120) as client:
            for number in itertools.count():
                while not sends.wait(0.1):
                    if ends.is_set():
                        return
                began = time.perf_counter()
                with in_work, suppress(ServiceError):
                    client.ingest("c", f"{number % 4}.html", content)
                took.append(time.perf_counter() - began)

    return took, run


def _calls(call: Callable[[Client], object], client: Client, seconds: float) -> list[float]:
    found, end = [], time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        call(client)
        found.append(time.perf_counter() - began)
        time.sleep(PAUSE)
    return found


def _measure(address: str, content: bytes, call: Callable[[Client], object], seconds: float) -> dict[str, float]:
    """Milliseconds of a call, with and without concurrent ingestion of the document."""
    sends, ends = threading.Event(), threading.Event()
    in_work = threading.Semaphore(_SENDERS)
    took, run = _sender(address, content, sends, ends, in_work)
    # If a call fails, `ends` is not set, and they go on until the process ends.
    senders = [threading.Thread(target=run, daemon=True) for _ in range(_SENDERS if content else 0)]
    for sender in senders:
        sender.start()
    times: dict[bool, list[float]] = {False: [], True: []}
    with Client(address, token="other", timeout=120) as client:
        for _ in range(ROUNDS):
            for hostile in (False, True):
                if hostile:
                    sends.set()
                    time.sleep(0.3)
                times[hostile] += _calls(call, client, seconds / ROUNDS)
                sends.clear()
                # Waits for running ingestions, including a parser's restart after it was killed.
                for _ in range(_SENDERS):
                    in_work.acquire()
                in_work.release(_SENDERS)
                if hostile:
                    time.sleep(3.0)
    ends.set()
    for sender in senders:
        sender.join()
    found: dict[str, float] = {"calls": len(times[True]), "documents": len(took)}
    for name, percent in (("p50", 50), ("p99", 99)):
        without, beside = (float(np.percentile(times[hostile], percent)) * 1e3 for hostile in (False, True))
        found |= {f"{name}_without_ms": without, f"{name}_with_ms": beside, f"{name}_ratio": beside / without}
    found["most_with_ms"] = max(times[True]) * 1e3
    found["document_s"] = statistics.median(took) if took else 0.0
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        tokens = Path(folder, "tokens")
        tokens.write_text(
            "\n".join(
                f'[[token]]\nname = "{t}"\nrole = "app"\ntenant = "{t}"\nsha256 = "{sha256(t.encode()).hexdigest()}"'
                for t in TENANTS
            )
        )
        (worker,), _ = stack.enter_context(running("fusion_worker", "--model", str(MODEL), "--threads", "1"))
        flags = ("--workers", worker, "--data-dir", f"{folder}/gateway", "--auth-tokens", str(tokens))
        (address,), _ = stack.enter_context(running("gateway", *flags, "--parse-seconds", "5"))
        with Client(address, token="other") as client:
            client.ingest("c", "d.txt", "A page.")
        for name, content in DOCUMENTS.items():
            for called, call in CALLS.items():
                row = {"document": name, "call": called, **_measure(address, content, call, seconds)}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
