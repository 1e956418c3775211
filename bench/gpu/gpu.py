"""Speed of the kernels on a GPU, against torch's.

Ceilings and baselines are measured in the same run.
"""

import argparse
import sys
import time
import traceback
from pathlib import Path

import torch

from fusionkv.bench.gpu.report import Machine, Report, said
from fusionkv.bench.gpu.setup import FULL, TINY, Setup
from fusionkv.bench.kernels import decode, prefill, rates, scores
from fusionkv.bench.kernels.clock import Clock

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "benchmarks" / "gpu.csv"


def _run(args: argparse.Namespace) -> int:
    """Runs all parts. A part that fails is reported and does not stop the others."""
    torch.manual_seed(0)
    if args.tiny:
        torch.set_num_threads(1)  # at toy sizes, a second thread waits longer than it computes
    device = torch.device("cpu" if args.tiny else "cuda")
    report = Report(
        Machine.of(device, args.commit or said("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")), args.out
    )
    setup = Setup(
        device=device,
        dtype=torch.float32 if args.tiny else torch.bfloat16,
        sizes=TINY if args.tiny else FULL,
        clock=Clock(device),
        end=time.perf_counter() + args.budget_seconds,
        report=report,
    )
    started = time.perf_counter()
    for part in (rates, decode, scores, prefill):
        name = part.__name__.rpartition(".")[2]
        print(f"[{time.perf_counter() - started:.0f} s] {name}", file=sys.stderr, flush=True)
        try:
            part.measure(setup)
        except Exception as error:
            traceback.print_exc()
            report.fail(f"{name} failed: {type(error).__name__}: {error}".splitlines()[0])
    print(f"\n{len(report.rows)} rows in {time.perf_counter() - started:.0f} s, written to {args.out or 'no file'}")
    for failure in report.failures:
        print(f"FAILED {failure}")
    return 1 if report.failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fusionkv.bench.gpu.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 all checks passed, 1 a check or a part failed, 2 no CUDA device.",
    )
    parser.add_argument(
        "--budget-seconds",
        type=float,
        default=440,
        metavar="S",
        help="skip rows that would end later, the longest ones first (%(default)s)",
    )
    parser.add_argument("--commit", default="", help="commit to record in every row (default: from git)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.csv",
        help=f"file to append the rows to (default: {OUT.relative_to(ROOT)}; none with --tiny)",
    )
    parser.add_argument("--tiny", action="store_true", help="run every part at toy sizes on the CPU, as a test")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        print("no CUDA device: nothing to measure (--tiny runs every part at toy sizes on the CPU)", file=sys.stderr)
        return 2
    if args.out is None and not args.tiny:
        args.out = OUT
    return _run(args)


if __name__ == "__main__":
    sys.exit(main())
