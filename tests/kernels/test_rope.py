"""Rotation by a difference: additive, invertible, and what the model itself does at the other position."""

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama import modeling_llama

from fusionkv.kernels.segments import Rotation
from tests.examples import examples
from tests.kernels.inputs import rotary

_ORIGINAL = {"original_max_position_embeddings": 1024}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_ORIGINAL},
    "yarn": {"factor": 4.0, **_ORIGINAL},
}
shifts = st.integers(-100_000, 100_000)


@given(a=shifts, b=shifts, interleaved=st.booleans())
@settings(max_examples=examples(50), deadline=None)
def test_two_turns_are_one(a: int, b: int, interleaved: bool) -> None:
    turn = rotary(64, interleaved=interleaved).turn
    x = torch.randn(3, 2, 80, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(turn(turn(x, a), b), turn(x, a + b), atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(turn(turn(x, a), -a), x, atol=3e-6, rtol=1e-5)
    assert torch.equal(turn(x, a)[..., 64:], x[..., 64:]), "channels that are not rotary changed"


def test_no_shift_costs_nothing() -> None:
    x = torch.randn(3, 64)
    assert rotary(64).turn(x, 0) is x


@pytest.mark.parametrize("kind", [*ROPES, "partly rotary"])
@pytest.mark.parametrize(("base", "place"), [(0, 1), (5, 900), (3000, 17), (64, 4000)])
def test_as_the_model_itself_rotates(kind: str, base: int, place: int) -> None:
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    if partly := kind == "partly rotary":
        config = transformers.Glm4Config(**shape, head_dim=64, rope_parameters=rope)
        embedding, apply = modeling_glm4.Glm4RotaryEmbedding(config), modeling_glm4.apply_rotary_pos_emb
    else:
        rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
        embedding = modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**shape, rope_parameters=rope))
        apply = modeling_llama.apply_rotary_pos_emb
    x = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(base))
    at = [apply(x, x, *embedding(x, torch.tensor([[p]])))[1] for p in (base, place)]
    turned = Rotation(embedding.inv_freq, partly).turn(at[0], place - base)
    # The model's own angles are float32: at position 4000 they are off by up to 2.4e-4.
    torch.testing.assert_close(turned, at[1], atol=2e-3, rtol=0)
    assert (at[0] - at[1]).abs().max() > 0.1, "the positions look alike, so this test shows nothing"
