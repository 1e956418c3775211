"""Speed and correctness on one GPU: the kernels against reference and rivals, and time to first token of a 7B model.

Needs torch and triton, and for the time to first token what a fusion worker imports (transformers, grpcio, jinja2);
no installation of this package. Ceilings and baselines are measured in the same run.
"""

import argparse
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "benchmarks" / "gpu.csv"


def _name_packages() -> None:
    """Makes the folders of this checkout importable as `fusionkv.<folder>`, as pyproject.toml maps them."""
    package = ModuleType("fusionkv")
    package.__path__ = [str(ROOT)]
    sys.modules["fusionkv"] = package


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _run(args: argparse.Namespace) -> int:
    """All parts, the short ones first. A part that breaks is told of and does not stop the others."""
    from fusionkv.bench.gpu import disk, ttft
    from fusionkv.bench.gpu.report import Machine, Report
    from fusionkv.bench.gpu.setup import FULL, TINY, Setup
    from fusionkv.bench.kernels import accuracy, decode, flex, prefill, rates, scores
    from fusionkv.bench.kernels.clock import Budget, Clock

    torch.manual_seed(0)
    if args.tiny:
        torch.set_num_threads(1)  # toy shapes: a second thread costs more in waiting than it saves
    device = torch.device("cpu" if args.tiny else "cuda")
    report = Report(Machine.of(device, args.commit or _commit()), args.out)
    setup = Setup(
        device=device,
        dtype=torch.float32 if args.tiny else torch.bfloat16,
        sizes=TINY if args.tiny else FULL,
        clock=Clock(device),
        budget=Budget(args.budget_seconds),
        report=report,
    )
    started = time.perf_counter()
    for part in (rates, accuracy, decode, scores, disk, ttft, prefill, flex):
        name = part.__name__.rpartition(".")[2]
        print(f"[{time.perf_counter() - started:.0f} s] {name}", file=sys.stderr, flush=True)
        try:
            part.measure(setup)
        except Exception as error:
            traceback.print_exc()
            report.fail(f"{name} broke: {type(error).__name__}: {error}".splitlines()[0])
    print(f"\n{len(report.rows)} rows in {time.perf_counter() - started:.0f} s, written to {args.out or 'no file'}")
    for failure in report.failures:
        print(f"FAILED {failure}")
    return 1 if report.failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -P bench/gpu/gpu.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 all checks passed, 1 a check failed or a part broke, 2 no CUDA device.",
    )
    parser.add_argument(
        "--budget-seconds",
        type=float,
        default=440,
        metavar="S",
        help="rows that would end later are left out and named, the longest first (%(default)s)",
    )
    parser.add_argument("--commit", default="", help="recorded with every row (what git says)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.csv",
        help=f"append the rows there ({OUT.relative_to(ROOT)}; nowhere with --tiny)",
    )
    parser.add_argument("--tiny", action="store_true", help="every part at toy sizes on the CPU: tests this script")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        print("no CUDA device: nothing to measure (--tiny runs every part at toy sizes on the CPU)", file=sys.stderr)
        return 2
    if args.out is None and not args.tiny:
        args.out = OUT
    _name_packages()
    return _run(args)


if __name__ == "__main__":
    sys.exit(main())
