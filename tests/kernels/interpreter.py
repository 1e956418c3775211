"""Tests of a file run in Triton's interpreter, which Triton chooses at its import: in a process of its own."""

from tests.commands import run_python
from tests.examples import ALL


def interpreted(file: str, chosen: str) -> str:
    """Runs the tests of `file` that `-k chosen` picks; returns what pytest printed.

    Raises:
        AssertionError: one of them failed.
    """
    flags = ("-q", "-p", "no:cacheprovider", "-m", "not weights", "--hypothesis-profile", ALL, "-k", chosen)
    # Any of them may take long.
    env = {"TRITON_INTERPRET": "1", "FUSIONKV_TEST_SLOWER": "100"}
    return run_python("-m", "pytest", file, *flags, env=env, timeout=580).stdout
