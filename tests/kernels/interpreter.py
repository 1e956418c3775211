"""Tests of a file run in Triton's interpreter, which Triton chooses at its import: in a process of its own."""

import os
import subprocess
import sys

from tests.examples import ALL


def interpreted(file: str, chosen: str) -> str:
    """Runs the tests of `file` that `-k chosen` picks; returns what pytest printed.

    Raises:
        AssertionError: one of them failed.
    """
    flags = ("-q", "-p", "no:cacheprovider", "-m", "not weights", "--hypothesis-profile", ALL, "-k", chosen)
    run = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", file, *flags],
        # Any of them may take long.
        env={**os.environ, "TRITON_INTERPRET": "1", "FUSIONKV_TEST_SLOWER": "100"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
