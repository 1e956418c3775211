"""Without a usable Triton a GPU computes by the reference, and says so once."""

import pytest

from tests.commands import run_python

SCRIPT = """
import logging, sys
logging.basicConfig(format="%(levelname)s %(message)s")
sys.modules["triton"] = {module}
from fusionkv.kernels import backend
print([backend.has_triton() for _ in range(3)])
"""


@pytest.mark.parametrize("module", ["None", "type(sys)('triton')"], ids=["missing", "too old"])
def test_no_triton(module: str) -> None:
    run = run_python("-c", SCRIPT.format(module=module))
    assert run.stdout.strip() == "[False, False, False]"
    warning = "WARNING Triton 3.6 or later is not available; attention on the GPU is dense and slow: "
    assert run.stderr.count(warning) == 1
