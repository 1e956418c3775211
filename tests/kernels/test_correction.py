"""The correction of a chunk's KV by every implementation, against its definition in float64."""

from typing import Any

import pytest
import torch

from fusionkv.kernels import correction
from tests.kernels.inputs import DEVICE, HAS_KERNEL, interpreted, rotary, rotation_matrix

CORRECT = {"torch": correction.correct}
if HAS_KERNEL:
    from fusionkv.kernels.gpu import correction_triton

    CORRECT["triton"] = correction_triton.correct
LAYERS, HEADS, PLACES, BASE, SHARE = 2, 3, 8, 11, 0.625
# Of the largest number; bfloat16 rounds a number once, and its inputs to the map before.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def expected(kv: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, rotation: Any) -> torch.Tensor:
    """The definition, a token at a time: turned back to position 0, mapped, and turned again."""
    out, dim = kv.double().clone(), kv.shape[-1]
    for layer in range(LAYERS):
        for token in range(kv.shape[2]):
            turn = rotation_matrix(rotation.inv_freq, BASE + token, dim, rotation.interleaved)
            for head in range(HEADS):
                key, value = out[layer, :, token, head]
                change = torch.cat([turn.T @ key, value, places[token].double()]) @ weights[layer, head].double()
                out[layer, 0, token, head] += SHARE * turn @ change[:dim]
                out[layer, 1, token, head] += SHARE * change[dim:]
    return out


@pytest.mark.parametrize("implementation", CORRECT)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("dim", "tokens", "partial", "interleaved"),
    [(64, 45, False, False), (32, 1, True, True), (96, 33, True, False), (128, 32, False, True)],
)
def test_the_definition(
    implementation: str, dtype: torch.dtype, in_place: bool, dim: int, tokens: int, partial: bool, interleaved: bool
) -> None:
    torch.manual_seed(dim)
    rotation, inputs = rotary(dim, partial, interleaved), 2 * dim + PLACES
    # A chunk in a pool, whose other slots stay as they are.
    pool = torch.randn(LAYERS, 2, tokens + 5, HEADS, dim).to(dtype)
    weights = (torch.randn(LAYERS, HEADS, inputs, 2 * dim) / inputs**0.5).to(dtype)
    places = torch.rand(tokens, PLACES).to(dtype)
    kv = pool[:, :, 3 : 3 + tokens]
    right = expected(kv, weights, places, rotation)
    there = pool.to(DEVICE) if implementation == "triton" else pool.clone()
    part = there[:, :, 3 : 3 + tokens]
    out = part if in_place else torch.full_like(part, float("nan"))
    factors = rotation.factors(torch.arange(BASE, BASE + tokens))
    weights, places, cos, sin = (x.to(there.device) for x in (weights, places, *factors))
    CORRECT[implementation](part, out, weights, places, rotation, cos, sin, SHARE)
    assert float((out.cpu().double() - right).abs().max() / right.abs().max()) < CLOSE[dtype]
    for rest in (slice(3), slice(3 + tokens, None)):
        assert torch.equal(there[:, :, rest].cpu(), pool[:, :, rest])
    if not in_place:
        assert torch.equal(part.cpu(), kv)


@pytest.mark.compile
@pytest.mark.skipif(HAS_KERNEL, reason="these are the tests with the kernel")
def test_the_kernel_in_the_interpreter() -> None:
    assert "16 passed" in interpreted(__file__, "triton")
