"""Measures the start-up time of `fusionkv serve all` and the memory of its services, against goals."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from fusionkv.bench import command
from fusionkv.bench.services.process import Footing
from fusionkv.bench.worker.bench import show
from fusionkv.fusion_worker.evaluate.command import run as run_command
from fusionkv.fusion_worker.library.resolve import resolve

_SETTLING_SECONDS, _PATIENCE_SECONDS = 10.0, 120.0
_CLI = (sys.executable, "-P", "-m", "fusionkv.gateway.cli.main")
_IMPORTS = """
from fusionkv.fusion_worker.library import lean
with lean.uncompiled():
    import fusionkv.fusion_worker.servicer
"""
_LIBRARIES = (sys.executable, "-P", "-c", _IMPORTS)
_SMALLEST = Path(__file__).parents[2] / "models/eased-3"
_CACHE_BYTES, _POOL_BYTES = 64 << 20, 256 << 20
MODULES = {"kvcache_service": "kvcache", "fusion_worker": "worker", "gateway": "gateway"}


def _seconds(*argv: str, repeats: int = 3) -> float:
    """The minimum time of several runs of a command."""
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - started)
    return min(taken)


def _children(parent: int) -> dict[str, int]:
    """Process ids of the services that a process has started, by name."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            argv = (folder / "cmdline").read_text().split("\0")
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) != parent:
                continue
        except OSError:  # the process has ended
            continue
        for module, name in MODULES.items():
            if f"fusionkv.{module}" in argv:
                found[name] = int(folder.name)
    return found


def _serve(model: str, directory: str, settle: float = _SETTLING_SECONDS) -> tuple[float, dict[str, Footing]]:
    """Seconds until the services are ready, and the memory of each `settle` seconds later."""
    settings = {
        "FUSIONKV_KVCACHE_MEMORY_BYTES": str(_CACHE_BYTES),
        "FUSIONKV_WORKER_POOL_BYTES": str(_POOL_BYTES),
        "FUSIONKV_GATEWAY_EMBEDDER": "none",
    }
    serving = [*_CLI, "serve", "all", "--model", model, "--data-dir", directory, "--listen", "127.0.0.1:0"]
    started = time.perf_counter()
    running = subprocess.Popen(
        serving, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | settings
    )
    # Services that say nothing are not waited for either.
    patience = threading.Timer(_PATIENCE_SECONDS, running.terminate)
    patience.start()
    try:
        assert running.stdout is not None
        lines = []
        for line in running.stdout:
            lines.append(line)
            if line.startswith("ready"):
                break
        else:
            raise RuntimeError(f"the services ended, or took over {_PATIENCE_SECONDS:g} s:\n" + "".join(lines))
        patience.cancel()
        seconds = time.perf_counter() - started
        time.sleep(settle)
        return seconds, {name: Footing.of(pid) for name, pid in _children(running.pid).items()}
    finally:
        patience.cancel()
        running.terminate()
        running.communicate()


def measure(model: str) -> list[dict[str, object]]:
    """Rows of figures, their floors (0 without one) and their goals, in megabytes or seconds."""
    directory = resolve(model)
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    with tempfile.TemporaryDirectory() as folder:
        ready, held = _serve(str(directory), folder)
    libraries = _seconds(*_LIBRARIES)
    with tempfile.TemporaryDirectory() as folder:
        smallest, _ = _serve(str(_SMALLEST), folder, settle=0.0)
    rows = [
        ("serve all: ready, reference model", "s", smallest, libraries, 4.0),
        (f"serve all: ready, {directory.name}", "s", ready, libraries, 4.0),
        ("fusionkv --help", "s", _seconds(*_CLI, "--help"), _seconds(sys.executable, "-c", ""), 0.3),
    ]
    goals = {"worker": (weights, weights / 1e6 + 500), "gateway": (0, 300.0), "kvcache": (0, 150.0)}
    for name, (floor, goal) in goals.items():
        # Without requests, only written pages of the pool and the memory tier are resident.
        rows.append((f"{name}: memory", "MB", held[name].bytes / 1e6, floor / 1e6, goal))
    return [
        {"figure": figure, "unit": unit, "value": round(value, 2), "floor": round(floor, 2), "goal": round(goal, 2)}
        for figure, unit, value, floor, goal in rows
    ]


def main() -> None:
    parser = command.parser_of("services.start", __doc__)
    command.add_model(parser)
    args = parser.parse_args()
    show(f"Start and memory, {args.model}", measure(args.model), args.json)


if __name__ == "__main__":
    sys.exit(run_command("start", main, RuntimeError))
