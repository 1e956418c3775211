"""Speed and errors of the kernels on a CPU, each against an alternative in the same run: the best of several runs."""

import argparse
import dataclasses
import sys
import time
from functools import partial
from pathlib import Path

import torch

from fusionkv.bench import command
from fusionkv.bench.gpu.report import Report
from fusionkv.bench.gpu.workload import Shape
from fusionkv.bench.kernels import attention_cpu, linears
from fusionkv.bench.kernels.pairs import Pairs, milliseconds


def _rates(size: int) -> dict[str, float]:
    """GFLOP/s of a product of square matrices, by dtype."""
    rates = {}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(size, size, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        ms = min(milliseconds(partial(torch.matmul, a, b, out=out)) for _ in range(20))
        rates[str(dtype).removeprefix("torch.")] = 2 * size**3 / ms / 1e6
    return rates


def _run(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    started, pairs = time.perf_counter(), Pairs(0.0 if args.tiny else args.seconds)
    rates = _rates(128 if args.tiny else 2048)
    if args.tiny:
        torch.set_num_threads(1)  # at toy sizes, a second thread waits longer than it computes
        attention_cpu.measure(pairs, Shape("toy", 4, 2, 32), 128, 32)
        linears.measure(pairs, 64, 32, 128, (1, 3))
    else:
        # Qwen2.5-0.5B; 1,261 rows are 15% of 8k tokens and a question.
        attention_cpu.measure(pairs, Shape("0.5B", 14, 2, 64), 8192, 512)
        linears.measure(pairs, 896, 128, 4864, (1, 32, 1261))
    threads, seconds = torch.get_num_threads(), time.perf_counter() - started
    kind = "1 thread, CPU time" if threads == 1 else f"{threads} threads"
    print(f"torch {torch.__version__}, {kind}, measured in {seconds:.0f} s")
    Report.table("Matrix products, GFLOP/s", list(rates), [list(rates.values())])
    columns = ("what", "baseline", "ms", "here", "ms", "ratio", "error of the baseline", "error here")
    lines = [
        (row.what, row.baseline, row.baseline_ms, row.way, row.ms, row.ratio, row.baseline_error, row.error)
        for row in pairs.rows
    ]
    Report.table("Best of several, baseline and other in turn", columns, lines)
    rows = [{**dataclasses.asdict(row), "ratio": row.ratio} for row in pairs.rows]
    command.write({"threads": threads, "gflops": rates, "rows": rows}, args.json)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -P bench/kernels/cpu.py",
        description=__doc__,
        epilog="With OMP_NUM_THREADS=1, one thread is measured in CPU time, for machines with other load.",
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="minimum seconds for each pair (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="run everything at toy sizes, as a test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    args = parser.parse_args()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        print("this CPU does not compute in bfloat16, so it does not use the measured kernels", file=sys.stderr)
        return 2
    _run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
