"""Quantised KV: how far off it is, block by block, and the corners; by every implementation."""

import pytest
import torch

from fusionkv.fusion_worker.config import STORES
from fusionkv.kernels import quantised
from fusionkv.kernels.dequantise import restore_to
from fusionkv.kernels.quantised import KINDS, Quantised, quantise, restore, sizes
from tests.kernels.inputs import DEVICE, HAS_KERNEL

GROUP = sizes(torch.int8, 8).group


@pytest.fixture
def kv() -> torch.Tensor:
    chance = torch.Generator().manual_seed(1)
    made = torch.randn(3, 2, 150, 2, 8, generator=chance)
    made[:, 0, :, 1, 3] *= 200  # a channel of the keys that is large at every token
    made[:, 1, 70] *= 500  # a token of the values
    return made


def extremes(kv: torch.Tensor, group: int, width: int) -> list[torch.Tensor]:
    """The minimum and the maximum of each number's block: `group` tokens of keys, `width` channels of values."""
    found = []
    for name in ("amin", "amax"):
        keys = [getattr(part, name)(1, keepdim=True).expand_as(part) for part in kv[:, 0].split(group, 1)]
        values = kv[:, 1].unflatten(-1, (-1, width))
        values = getattr(values, name)(-1, keepdim=True).expand_as(values).flatten(-2)
        found.append(torch.stack([torch.cat(keys, 1), values], 1))
    return found


def blocks(kv: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each number's block."""
    return extremes(kv.abs(), GROUP, kv.shape[-1])[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_is_within_half_a_step(kv: torch.Tensor, dtype: torch.dtype) -> None:
    kv = kv.to(dtype)
    back = restore(quantise(kv, torch.int8), dtype)
    assert back.dtype == dtype
    # Half a step of 1/127, and what rounding the scale and the result to few bits adds.
    allowed = blocks(kv.float()) * (0.5 / 127 + 2**-8) + 1e-30
    assert bool(((back.float() - kv.float()).abs() <= allowed).all())


@pytest.mark.parametrize("kind", KINDS.values())
def test_keys_alone(kv: torch.Tensor, kind: torch.dtype) -> None:
    alone = quantise(kv[:, :1], kind)
    assert alone.value_scales.numel() == 0
    assert torch.equal(restore(alone, kv.dtype), restore(quantise(kv, kind), kv.dtype)[:, :1])


@pytest.mark.parametrize("dim", [8, 64, 80])
def test_int4_is_within_half_a_step(dim: int) -> None:
    kv = torch.randn(2, 2, 70, 3, dim, generator=torch.Generator().manual_seed(2))
    kv[:, 0, :, 1, 3] += 100  # a channel of the keys that is far from 0, as biases make it
    kv[:, 1, 50] *= 500
    back = restore(quantise(kv, torch.uint8), torch.float32)
    low, high = extremes(kv, sizes(torch.uint8, dim).group, quantised.value_width(dim))
    # What rounding the minimum and the scale to eight bits adds.
    allowed = (high - low) * (0.5 / 15 + 2**-8) + low.abs() * 2**-8 + 1e-30
    assert bool(((back - kv).abs() <= allowed).all())


def test_int4_keeps_what_a_large_bias_leaves() -> None:
    """Of a channel at 100 with a range of 1, by a scale alone nothing would be left."""
    kv = torch.rand(1, 2, 64, 1, 4, generator=torch.Generator().manual_seed(3)) + 100
    off = (restore(quantise(kv, torch.uint8), torch.float32) - kv)[:, 0]
    assert float(off.abs().mean()) < 0.2


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
        # With a minimum, a block that spans 0 has it only as exactly as the scale is rounded.
        exact = kind != torch.uint8
        assert back.count_nonzero() == 2 or not exact
        torch.testing.assert_close(back, one * scale, rtol=2**-8, atol=0.0 if exact else 3 * scale * 2**-8)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_pool_s_runs_are_filled_and_nothing_else(kv: torch.Tensor, kind: torch.dtype) -> None:
    stored, pool = quantise(kv, kind), torch.full((3, 2, 400, 2, 8), 7.0)
    runs = [slice(300, 364), slice(16, 96), slice(100, 106)]
    restore_to(stored, [pool[:, :, run] for run in runs])
    assert torch.cat([pool[:, :, run] for run in runs], dim=2).equal(restore(stored, torch.float32))
    assert bool((pool[:, :, 106:300] == 7).all() & (pool[:, :, :16] == 7).all())


@pytest.mark.skipif(not HAS_KERNEL, reason="needs a GPU or Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tensors", "heads", "dim", "tokens"),
    [(2, 1, 64, 1), (2, 2, 8, 150), (2, 3, 80, 33), (2, 2, 128, 70), (1, 1, 72, 33)],
)
def test_triton_gives_the_same(dtype: torch.dtype, tensors: int, heads: int, dim: int, tokens: int) -> None:
    from fusionkv.kernels.gpu import quantised_triton

    kv = torch.randn(2, tensors, tokens, heads, dim, generator=torch.Generator().manual_seed(tokens)) * 9
    stored = quantise(kv, torch.uint8)
    expected, pool = (
        restore(stored, dtype),
        torch.full((2, tensors, 300, heads, dim), 7.0, dtype=dtype, device=DEVICE),
    )
    there = Quantised(*(part.to(DEVICE) for part in (stored.numbers, stored.key_scales, stored.value_scales)))
    cut = tokens // 3
    quantised_triton.restore_to(there, 0, pool[:, :, 200 : 200 + cut])
    quantised_triton.restore_to(there, cut, pool[:, :, 9 : 9 + tokens - cut])
    found = torch.cat([pool[:, :, 200 : 200 + cut], pool[:, :, 9 : 9 + tokens - cut]], dim=2).cpu()
    # A GPU multiplies and adds in one rounding.
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype != torch.float32 else 1e-5, atol=1e-4)
    assert int((pool == 7).sum()) >= pool.numel() - kv.numel()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_twice_is_once(kv: torch.Tensor, kind: torch.dtype) -> None:
    once = restore(quantise(kv, kind), torch.float32)
    torch.testing.assert_close(restore(quantise(once, kind), torch.float32), once, rtol=0.08, atol=1e-3)


def test_settings_name_the_same_kinds() -> None:
    assert set(STORES) == {"plain", *KINDS}
