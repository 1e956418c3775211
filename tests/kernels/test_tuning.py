"""Measured tiles are kept for the next process; without a usable Triton a GPU computes by the reference."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fusionkv.bench.gpu.tuning import candidates, remember
from fusionkv.kernels.gpu.tile_shapes import ROOM, Tile, default, recall, shared_bytes
from tests.commands import run_python

TILE = Tile(64, 32, 4, 2)


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file, in a cache folder that is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    return tmp_path / "new" / "fusionkv" / "tiles.json"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [*range(16, 128, 16), *range(128, 257, 32)])
def test_a_tile_without_a_measurement_fits_every_gpu(head_dim: int, dtype: torch.dtype) -> None:
    """test_ptx.py holds the compiler to these bytes."""
    tile = default(head_dim, dtype)
    assert shared_bytes(tile, head_dim, dtype) <= ROOM == 99 << 10
    assert min(tile.rows, tile.keys) >= 16, "the smallest matrix product"


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_what_is_measured(head_dim: int) -> None:
    """The tile without a measurement too, and not so many that compiling them takes minutes."""
    tiles = [*candidates(head_dim)]
    assert default(head_dim, torch.bfloat16) in tiles
    assert len({*tiles}) == len(tiles) <= 21


def test_what_is_remembered_is_recalled() -> None:
    assert recall("a") is None
    for name, tile in (("a", TILE), ("b", Tile(128, 64, 8, 3)), ("a", Tile(16, 16, 4, 1))):
        remember(name, tile)
        assert recall(name) == tile
    assert (recall("b"), recall("c")) == (Tile(128, 64, 8, 3), None)


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\xff\x00",
        b'{"a": ',
        b"[1]",
        b"null",
        b'{"a": 3}',
        b'{"a": {"rows": 64}}',
        b'{"a": {"rows": 64, "keys": 32, "warps": 4, "stages": 2, "more": 1}}',
        b'{"a": {"rows": "64", "keys": 32, "warps": 4, "stages": 2}}',
    ],
)
def test_junk_is_as_good_as_nothing_and_is_written_over(junk: bytes, store: Path) -> None:
    store.parent.mkdir(parents=True)
    store.write_bytes(junk)
    assert recall("a") is None
    remember("a", TILE)
    assert recall("a") == TILE


def test_two_writers_lose_nothing(store: Path) -> None:
    # Each opens the lock's file anew, so threads exclude each other as processes do.
    tiles = {str(number): Tile(16, number, 4, 2) for number in range(40)}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(remember, tiles, tiles.values()))
    assert {name: recall(name) for name in tiles} == tiles
    assert {path.name for path in store.parent.iterdir()} == {"tiles.json", "tiles.lock"}


SCRIPT = """
import logging, sys
logging.basicConfig(format="%(levelname)s %(message)s")
sys.modules["triton"] = {module}
from fusionkv.kernels import gpu as backend
print([backend.has_triton() for _ in range(3)])
"""


@pytest.mark.parametrize("module", ["None", "type(sys)('triton')"], ids=["missing", "too old"])
def test_no_triton(module: str) -> None:
    run = run_python("-c", SCRIPT.format(module=module))
    assert run.stdout.strip() == "[False, False, False]"
    warning = "WARNING Triton 3.6 or later is not available; attention on the GPU is dense and slow: "
    assert run.stderr.count(warning) == 1
