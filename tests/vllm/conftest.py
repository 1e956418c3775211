"""A slow machine has longer to start vLLM, which imports for a minute of processor time."""

import pytest

from fusionkv.bench.services import vllm
from tests.stopwatch import SLOWER


@pytest.fixture(scope="session", autouse=True)
def patience() -> None:
    vllm._START_SECONDS *= SLOWER
