"""A worker that can't serve says why in one line, and exits with 1."""

import pytest

from tests.commands import run_python
from tests.services import HERE


@pytest.mark.system
def test_a_model_that_is_none() -> None:
    ended = run_python("-m", "fusionkv.fusion_worker", *HERE, "--model", "/no/such/model", status=1)
    (line,) = ended.stderr.splitlines()
    assert "/no/such/model is no model: give the directory of a Hugging Face model" in line
    assert ended.stdout == ""
