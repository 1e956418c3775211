"""KV in one byte a number: how far off it is, block by block, and the corners."""

import itertools

import pytest
import torch

from fusionkv.fusion_worker.config import STORES
from fusionkv.kernels.quantised import GROUP, KINDS, quantise, restore


@pytest.fixture
def kv() -> torch.Tensor:
    chance = torch.Generator().manual_seed(1)
    made = torch.randn(3, 2, 150, 2, 8, generator=chance)
    made[:, 0, :, 1, 3] *= 200  # a channel of the keys that is large at every token
    made[:, 1, 70] *= 500  # a token of the values
    return made


def blocks(kv: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each number's block, by loops."""
    found = torch.zeros_like(kv)
    layers, _, tokens, heads, dim = map(range, kv.shape)
    for layer, head in itertools.product(layers, heads):
        for low, channel in itertools.product(tokens[::GROUP], dim):
            block = layer, 0, slice(low, low + GROUP), head, channel
            found[block] = kv[block].abs().max()
        for token in tokens:
            found[layer, 1, token, head] = kv[layer, 1, token, head].abs().max()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_is_within_half_a_step(kv: torch.Tensor, dtype: torch.dtype) -> None:
    kv = kv.to(dtype)
    back = restore(quantise(kv, torch.int8), dtype)
    assert back.dtype == dtype
    # Half a step of 1/127, and what rounding the scale and the result to few bits adds.
    allowed = blocks(kv.float()) * (0.5 / 127 + 2**-8) + 1e-30
    assert bool(((back.float() - kv.float()).abs() <= allowed).all())


def test_fp8_is_within_its_precision(kv: torch.Tensor) -> None:
    back = restore(quantise(kv, torch.float8_e4m3fn), torch.float32)
    # Three bits of mantissa; the smallest step is 2^-9 of what the scale makes of 448.
    allowed = kv.abs() * (2**-4 + 2**-8) + blocks(kv) * 2**-9 / 448
    assert bool(((back - kv).abs() <= allowed).all())


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("tokens", [1, GROUP - 1, GROUP, GROUP + 1])
def test_corners(kind: torch.dtype, tokens: int) -> None:
    zeros = torch.zeros(1, 2, tokens, 1, 4)
    assert restore(quantise(zeros, kind), torch.float32).equal(zeros)
    one = zeros.clone()
    one[0, :, -1, 0, 2] = -3.0
    for scale in (1.0, 1e-30):
        back = restore(quantise(one * scale, kind), torch.float32)
        assert back.count_nonzero() == 2
        torch.testing.assert_close(back, one * scale, rtol=2**-8, atol=0.0)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_twice_is_once(kv: torch.Tensor, kind: torch.dtype) -> None:
    once = restore(quantise(kv, kind), torch.float32)
    torch.testing.assert_close(restore(quantise(once, kind), torch.float32), once, rtol=0.08, atol=1e-3)


def test_settings_name_the_same_kinds() -> None:
    assert set(STORES) == {"plain", *KINDS}
