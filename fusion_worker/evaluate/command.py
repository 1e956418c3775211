"""What commands that measure share: the flags of an engine, and errors in one line."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from fusionkv.protos.runtime.errors import ServiceError, printable


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Adds --auxiliary, --device and --dtype, as of a worker."""
    add = parser.add_argument
    add("--auxiliary", type=Path, metavar="MODEL", help="small second model, for the recipe cacheclip")
    add("--device", default="auto", help="auto, cpu or cuda[:N] (default: %(default)s)")
    about = "float32, bfloat16, float16 or auto: the model's, if the device computes in it (default: %(default)s)"
    add("--dtype", default="auto", help=about)


def run(name: str, main: Callable[[], int | None], *errors: type[Exception], resumed: bool = False) -> int:
    """Runs a command; returns its status, 1 after an error that is expected or one of `errors`, or 130 after Ctrl-C.

    resumed: whether the same command continues from where it was interrupted.
    """
    expected: tuple[type[Exception], ...] = (ServiceError, ValueError, OSError, *errors)
    try:
        return main() or 0
    except expected as error:
        # It may quote what a model's or a data set's files say.
        print(f"{name}: {printable(str(error)) or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if resumed:
            print(f"{name}: interrupted; the same command continues from here", file=sys.stderr)
        return 130
