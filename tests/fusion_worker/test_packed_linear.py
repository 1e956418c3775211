"""The forward pass: packed linear layers, and rows that go no further than the last layer's keys and values."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from fusionkv.fusion_worker.compute import packed_linear
from fusionkv.fusion_worker.compute.packed_linear import PackedLinear, pack
from tests.fusion_worker.oracle import oracle, random_ids, whole

_SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=48, **_SHAPE)
needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU does not compute in bfloat16"
)


def packed(network: torch.nn.Module) -> list[str]:
    return [name for name, module in network.named_modules() if isinstance(module, PackedLinear)]


@needs_bfloat16
@pytest.mark.parametrize("computed_in", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 33, 700])
def test_the_same_product(rows: int, bias: bool, computed_in: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever dtype is faster on this CPU."""
    monkeypatch.setattr(packed_linear, "compute_dtype", lambda _: computed_in)
    linear = torch.nn.Linear(96, 80, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(1, rows, 96, dtype=torch.bfloat16)
    expected = linear.double()(x.double())
    found = PackedLinear(linear.bfloat16())(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, atol=1e-2, rtol=2**-8)


@needs_bfloat16
def test_every_layer_of_a_bfloat16_model_but_its_head() -> None:
    torch.manual_seed(0)
    network = Qwen2ForCausalLM(CONFIG).to(torch.bfloat16).eval()
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        before = network(ids).logits
        pack(network)
        after = network(ids).logits
    layers = packed(network)
    assert len(layers) == 7 * CONFIG.num_hidden_layers
    assert not any("lm_head" in name for name in layers)
    torch.testing.assert_close(after, before, atol=2e-2, rtol=2**-7)


@needs_bfloat16
def test_packed_weights_are_the_only_ones_in_memory(tmp_path: Path) -> None:
    Qwen2ForCausalLM(CONFIG).to(torch.bfloat16).save_pretrained(tmp_path)
    network = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    pack(network)
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_float32_model_stays_as_it_is() -> None:
    network = Qwen2ForCausalLM(CONFIG)
    pack(network)
    assert not packed(network)


def count_rows(network: Any) -> list[int]:
    """Rows that each layer's MLP is given from now on, all steps together."""
    rows = [0] * len(network.model.layers)
    for number, layer in enumerate(network.model.layers):

        def counted(_: Any, given: tuple[Any, ...], number: int = number) -> None:
            rows[number] += given[0].shape[1]

        layer.mlp.register_forward_pre_hook(counted)
    return rows


@pytest.mark.parametrize("recipe", ["full_attention", "fusionrag", "prophetkv"])
async def test_one_row_of_a_prefill_goes_through_the_last_layer(recipe: str, varied: str, start: Any) -> None:
    rig, plain = await start(varied), oracle(varied)
    parts = random_ids(6, 1), [random_ids(40, 2), random_ids(30, 3)], random_ids(9, 4)
    rows = count_rows(rig.model.network)
    await rig.ask(*parts, recipe=recipe, ratio=1.0, expected=plain.full_attention(parts))
    assert rows[0] >= len(whole(parts))
    # Encoded chunks leave keys and values alone.
    assert rows[-1] == 1
    # All rows of a step that decodes are looked at.
    more = await rig.ask(*parts, recipe=recipe, ratio=1.0, max_tokens=4)
    assert rows[-1] == 1 + len(more.logits)
