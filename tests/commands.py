"""Commands that tests run to their end."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def run_python(
    *arguments: object,
    status: int | None = 0,
    env: Mapping[str, str] | None = None,
    timeout: float | None = 180,
    **more: Any,
) -> "subprocess.CompletedProcess[str]":
    """Runs Python with these arguments, and `env` beside this process's environment; what it prints is text.

    Raises:
        AssertionError: it ended with another exit status; None takes any.
    """
    # -P: the working directory holds a folder `kernels`, which transformers would take for another package.
    argv = [sys.executable, "-P", *map(str, arguments)]
    known = {**os.environ, **(env or {})}
    done = subprocess.run(argv, env=known, capture_output=True, text=True, timeout=timeout, **more)
    assert status in (None, done.returncode), done.stdout + done.stderr
    return done


def fusionkv(*arguments: object, **more: Any) -> "subprocess.CompletedProcess[str]":
    """The command line, as `run_python` runs it."""
    return run_python("-m", "fusionkv.gateway.cli.main", *arguments, **more)
