"""The setup that every part of the GPU benchmark receives: device, sizes, clock, end, report and ceilings."""

import time
from dataclasses import dataclass

import torch

from fusionkv.bench.gpu.report import Report
from fusionkv.bench.gpu.workload import Shape
from fusionkv.bench.kernels.clock import Clock


@dataclass(frozen=True)
class Sizes:
    """Sizes of all measurements, in tokens unless stated. The full shapes are those of Qwen2.5-7B and Llama-3.1-8B.

    Attributes:
        matrix: rows of the square matrices for the matrix rate.
        copied: bytes of the copies.
    """

    shapes: tuple[Shape, ...]
    contexts: tuple[int, ...]
    ratios: tuple[float, ...]
    chunk: int
    decode_contexts: tuple[int, ...]
    batches: tuple[int, ...]
    scores_context: int
    matrix: int
    copied: int


FULL = Sizes(
    shapes=(Shape("7B", 28, 4, 128), Shape("8B", 32, 8, 128)),
    contexts=(8 << 10, 16 << 10, 32 << 10, 64 << 10),
    ratios=(0.0, 0.05, 0.15, 0.3, 1.0),
    chunk=512,
    decode_contexts=(8 << 10, 32 << 10),
    batches=(1, 8, 32),
    scores_context=32 << 10,
    matrix=8192,
    copied=4 << 30,
)
TINY = Sizes(
    shapes=(Shape("toy", 4, 2, 32),),
    contexts=(64, 128),
    ratios=(0.0, 0.15, 1.0),
    chunk=32,
    decode_contexts=(128,),
    batches=(1, 2),
    scores_context=128,
    matrix=128,
    copied=1 << 20,
)


@dataclass
class Setup:
    """A benchmark run. end: on `time.perf_counter`. matrix_tflops, copy_gbs: ceilings, 0 before `rates`."""

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    clock: Clock
    end: float
    report: Report
    matrix_tflops: float = 0.0
    copy_gbs: float = 0.0

    def allows(self, what: str, seconds: float) -> bool:
        """Whether a row that takes about `seconds` fits the time budget; prints a notice if it does not."""
        if time.perf_counter() + seconds <= self.end:
            return True
        self.report.notice(f"{what}: fewer than {seconds:.0f} s of the time budget are left")
        return False


def share(rate: float, ceiling: float) -> float | None:
    """`rate` as a share of its ceiling; None without a ceiling."""
    return rate / ceiling if ceiling else None
