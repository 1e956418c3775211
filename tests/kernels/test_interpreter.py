"""The tests of the Triton kernels without a GPU: in processes where Triton's interpreter runs them.

Triton chooses its interpreter when it is imported.
"""

import pytest

from tests.commands import run_python
from tests.examples import ALL, FEW, every
from tests.kernels.inputs import HAS_KERNEL

ATTENTION = (
    "test_ragged_batches",
    # MOST_ROWS is a bound of the CPU's kernel: of Triton's, one row and more than a tile are enough.
    "(test_every_path and scattered and not (-8-torch or -9-torch))",
    *("test_a_chunk_twice", "test_the_tables", "test_channels"),
)
OTHERS = "triton", "same_slots", "TestKernel", "TestGraphs"
FILES = (
    *("kernels/test_checksum.py", "kernels/test_quantised.py", "kernels/test_shared_decode.py"),
    *("fusion_worker/test_rotary.py", "fusion_worker/test_step_graphs.py"),
)


@pytest.mark.compile
@pytest.mark.skipif(HAS_KERNEL, reason="this run has the kernels already")
@pytest.mark.parametrize(
    ("files", "chosen", "passed"), [(("kernels/test_attention.py",), ATTENTION, 17), (FILES, OTHERS, 52)]
)
def test_in_the_interpreter(files: tuple[str, ...], chosen: tuple[str, ...], passed: int) -> None:
    pytest.importorskip("triton")
    profile = ALL if every() else FEW
    flags = ("-q", "-p", "no:cacheprovider", "-m", "not weights", "--hypothesis-profile", profile)
    # Any of them may take long.
    env = {"TRITON_INTERPRET": "1", "FUSIONKV_TEST_SLOWER": "100"}
    given = ("-k", " or ".join(chosen), *(f"tests/{file}" for file in files))
    assert f"{passed} passed" in run_python("-m", "pytest", *flags, *given, env=env, timeout=580).stdout
