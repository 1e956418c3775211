"""Reports measurements: rows appended to a CSV file immediately, tables on standard output, and failures."""

import csv
import importlib.metadata
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

COLUMNS = (
    *("date", "commit", "gpu", "torch", "triton", "kind", "shape", "context", "r", "batch", "ms"),
    *("baseline", "baseline_ms", "ratio", "ideal", "tflops_or_gbs", "share"),
)


@dataclass(frozen=True)
class Machine:
    """The machine and the versions that the figures hold for."""

    gpu: str
    commit: str
    torch_version: str
    triton_version: str

    @classmethod
    def of(cls, device: torch.device, commit: str) -> "Machine":
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        return cls(gpu, commit, torch.__version__, _version("triton"))


@dataclass(frozen=True)
class Row:
    """A measurement, with or without a baseline.

    Attributes:
        kind: what is measured, such as prefill, decode or rate.
        shape: name of the model's shape, or of the operation.
        context: tokens of all chunks.
        r: share of the context that is recomputed.
        batch: number of requests.
        ideal: speed-up over the baseline by the number of operations.
        rate: TFLOP/s, or GB/s where memory bandwidth is the limit.
        share: rate as a share of the ceiling measured in the same run; of a worker, the share of the time in which
            the GPU computes.
    """

    kind: str
    shape: str
    ms: float
    context: int | None = None
    r: float | None = None
    batch: int | None = None
    baseline: str = ""
    baseline_ms: float | None = None
    ideal: float | None = None
    rate: float | None = None
    share: float | None = None

    @property
    def ratio(self) -> float | None:
        """Speed-up over the baseline."""
        return None if self.baseline_ms is None else self.baseline_ms / self.ms


@dataclass
class Report:
    """Collects rows. path: the CSV file, or None to write none."""

    machine: Machine
    path: Path | None
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        machine = self.machine
        versions = f"torch {machine.torch_version}, triton {machine.triton_version}, commit {machine.commit}"
        number = "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        driver = f", driver {said(*number)}, CUDA {torch.version.cuda}" if machine.gpu != "cpu" else ""
        print(f"{machine.gpu}{driver}, {versions}", flush=True)

    def add(self, row: Row) -> Row:
        """Adds a row and writes it immediately, so that an interrupted run loses no figures."""
        self.rows.append(row)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = not self.path.exists() or self.path.stat().st_size == 0
            with self.path.open("a", newline="") as stream:
                writer = csv.writer(stream, lineterminator="\n")
                if new:
                    writer.writerow(COLUMNS)
                writer.writerow(self._fields(row))
        return row

    def fail(self, message: str) -> None:
        """Records a failed check; the run continues and ends with status 1."""
        self.failures.append(message)
        print(f"FAILED {message}", flush=True)

    def notice(self, message: str) -> None:
        """Prints what was skipped, and why."""
        print(f"skipped: {message}", flush=True)

    @staticmethod
    def table(title: str, columns: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
        """Prints a table; None is an empty cell."""
        if not lines:
            return
        cells = [list(columns), *([cell(value) for value in line] for line in lines)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        print(f"\n{title}")
        for line in cells:
            print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)), flush=True)

    def _fields(self, row: Row) -> list[str]:
        machine, today = self.machine, datetime.now(UTC).date().isoformat()
        known = (today, machine.commit, machine.gpu, machine.torch_version, machine.triton_version)
        measured = (row.kind, row.shape, row.context, row.r, row.batch, row.ms, row.baseline, row.baseline_ms)
        return [cell(value) for value in (*known, *measured, row.ratio, row.ideal, row.rate, row.share)]


def cell(value: object) -> str:
    """A value as text; floats with four significant digits."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return str(value)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def said(*command: str) -> str:
    """The first line that a program prints, or `unknown`."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"
