"""Quantised weights: dequantised to what their numbers say, loaded by their package, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.library import quantised
from fusionkv.protos.runtime.errors import FailedPrecondition
from tests.fusion_worker.oracle import saved

Tensors = dict[str, torch.Tensor]
BLOCK = 16
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
# The numbers of FP4 (OCP Microscaling 1.0), by their four bits.
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def fp8(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The tensors of a weight in FP8, with a scale for each block, and what they say."""
    scale = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).abs().amax((1, 3)) / 448
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    numbers = (weight / wide).to(torch.float8_e4m3fn)
    return {name: numbers, f"{name}_scale_inv": scale}, numbers.float() * wide


def mxfp4(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The tensors of experts [experts, in, out] with random numbers in MXFP4, and what they say."""
    experts, rows, columns = weight.shape
    random = torch.Generator().manual_seed(len(name))
    codes = torch.randint(0, 16, (experts, columns, rows // 32, 32), generator=random)
    exponents = torch.randint(122, 126, (experts, columns, rows // 32), generator=random)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    said = torch.tensor([*FP4, *(-x for x in FP4)])[codes] * (exponents - 127.0).exp2()[..., None]
    stored = {f"{name}_blocks": packed, f"{name}_scales": exponents.to(torch.uint8)}
    return stored, said.flatten(2).transpose(1, 2)


def quantise(
    directory: Path, family: str, quantiser: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]], **said: Any
) -> Tensors:
    """Writes a model of which the weights of layers are quantised; returns what its numbers say, by name."""
    file = saved(directory, family) / "model.safetensors"
    kept, expected = Tensors(), Tensors()
    for name, weight in load_file(file).items():
        experts = quantiser is mxfp4 and name.endswith(("experts.down_proj", "experts.gate_up_proj"))
        linear = quantiser is fp8 and weight.dim() == 2 and "layers" in name and "mlp.gate.weight" not in name
        stored, expected[name] = quantiser(name, weight) if experts or linear else ({name: weight}, weight)
        kept |= stored
    save_file(kept, file)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "quantiser", "said"), [("qwen3", fp8, FP8), ("qwen3-moe", fp8, FP8), ("gpt-oss", mxfp4, MXFP4)]
)
def test_weights_are_dequantised(
    kind: str, quantiser: Any, said: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    expected = quantise(tmp_path / "quantised", kind, quantiser, **said)
    model = models.load(tmp_path / "quantised", "cpu", str(dtype).removeprefix("torch."))
    plain = saved(tmp_path / "plain", kind)
    save_file({name: weight.contiguous() for name, weight in expected.items()}, plain / "model.safetensors")
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        found, meant = (each.network(ids).logits for each in (model, models.load(plain, "cpu", str(dtype)[6:])))
    assert {parameter.dtype for parameter in model.network.model.layers[0].mlp.parameters()} <= {dtype}
    assert model.kv.dtype == dtype
    assert torch.equal(found, meant)


def test_weights_of_four_bits(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    import transformers

    four = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    given: dict[str, Any] = {"quantization_config": four, "device_map": {"": "cpu"}, "dtype": torch.float32}
    network = transformers.AutoModelForCausalLM.from_pretrained(saved(tmp_path), **given)
    network.save_pretrained(tmp_path)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(models.load(tmp_path, "cpu", "float32").network(ids).logits, network(ids).logits)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
            "awq, which needs pip install nowhere",
        ),
        ({"bits": 4}, "by None; supported methods"),
        ({**FP8, "kv_cache_scheme": {}}, "by fp8, with the key 'kv_cache_scheme', which transformers ignores"),
        ({"quant_method": "fp8", "load_in_8bit": True}, "8 bits, with which tokens change the products of other"),
        ({**FP8, "fmt": "e5m2"}, "with the format 'e5m2', which transformers takes for e4m3"),
    ],
)
def test_quantised_weights_that_are_refused(said: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantised.PACKAGES, "awq", ("nowhere",))
    with pytest.raises(FailedPrecondition, match=message):
        quantised.settings(Path("config.json"), said)


def test_quantised_weights_are_not_split(tmp_path: Path) -> None:
    quantise(tmp_path, "qwen3", fp8, **FP8)
    with pytest.raises(FailedPrecondition, match="can't be split over ranks: its weights are quantised"):
        models.check_shareable(tmp_path, 2)
