"""A worker that can't serve says why in one line, and exits with 1."""

import pytest

from tests.commands import run_python
from tests.services import HERE


def start(*flags: str) -> tuple[int, list[str]]:
    """Exit status and lines on standard error of a worker that is expected to end by itself."""
    ended = run_python("-m", "fusionkv.fusion_worker", *HERE, "--device", "cpu", *flags, status=None)
    assert ended.stdout == ""
    return ended.returncode, ended.stderr.splitlines()


@pytest.mark.system
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "/no/such/model"), "/no/such/model is no model: give the directory of a Hugging Face model"),
        (("--pool-bytes", "3"), "pool_bytes must be 0 or at least 1MiB, not 3"),
        (("--config", "/no/such/file"), "can't read the configuration /no/such/file"),
    ],
    ids=["model", "pool", "file"],
)
def test_settings_that_make_no_sense(flags: tuple[str, ...], message: str) -> None:
    status, lines = start(*flags)
    assert (status, len(lines)) == (1, 1)
    assert message in lines[0]
