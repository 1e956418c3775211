"""What every part of the benchmark is given: the device, sizes, clock, budget and report, and the ceilings."""

from dataclasses import dataclass

import torch

from fusionkv.bench.gpu.report import Report
from fusionkv.bench.gpu.workload import Shape
from fusionkv.bench.kernels.clock import Budget, Clock


@dataclass(frozen=True)
class ModelShape:
    """A Qwen2 model, without its weights."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int


@dataclass(frozen=True)
class Sizes:
    """How large everything is. Tokens, unless said otherwise.

    matrix: rows of the square matrices of the matrix rate. copied: bytes of the copies. cut: what the lengths of the
    checks' prompts are divided by. The shapes are those of Qwen2.5-7B and Llama-3.1-8B.
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
    cut: int
    model: ModelShape
    model_context: int


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
    cut=1,
    model=ModelShape("qwen2-7b", 28, 3584, 18944, 28, 4, 152064),
    model_context=27 << 10,
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
    cut=16,
    model=ModelShape("toy", 2, 64, 128, 4, 2, 512),
    model_context=128,
)


@dataclass
class Setup:
    """One run. matrix_tflops, copy_gbs, host_gbs: ceilings, known once `rates` has measured them; 0 before."""

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    clock: Clock
    budget: Budget
    report: Report
    matrix_tflops: float = 0.0
    copy_gbs: float = 0.0
    host_gbs: float = 0.0

    def allows(self, what: str, seconds: float) -> bool:
        """Whether a row that takes about so long still fits the budget; says so when it does not."""
        if self.budget.allows(seconds):
            return True
        self.report.notice(f"{what}: the time budget has no {seconds:.0f} s left")
        return False


def share(rate: float, ceiling: float) -> float | None:
    """`rate` over its ceiling; None where no ceiling was measured."""
    return rate / ceiling if ceiling else None
