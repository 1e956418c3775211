"""`fusionkv size` against what a loaded model and the storage formats really take."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.evaluate import sizing
from fusionkv.kernels import quantised
from fusionkv.protos.runtime.errors import FailedPrecondition
from tests.commands import fusionkv
from tests.fusion_worker import gguf_files

LOAD = sizing.Load(documents=10, document_tokens=1000, chunk_tokens=256, prompt_chunks=8, prompts=2)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_sizes_are_those_of_the_loaded_model(reference_model: Path, dtype: str) -> None:
    model = models.load(reference_model, "cpu", dtype)
    whole = AutoModelForCausalLM.from_pretrained(reference_model, dtype=model.kv.dtype)
    shape, parameters = sizing.measure(str(reference_model), dtype)
    size = sizing.of(shape, parameters, LOAD)

    assert size.token == model.token_bytes
    assert size.weights == sum(p.nbytes for p in whole.parameters())
    assert (size.chunks, size.disk) == (40, 10_000 * model.token_bytes)
    assert size.pool == 2 * size.prompt == 2 * 2048 * model.token_bytes


@pytest.mark.parametrize("store", quantised.KINDS)
def test_a_quantised_chunk_takes_what_is_counted(reference_model: Path, store: str) -> None:
    shape, parameters = sizing.measure(str(reference_model))
    kv = torch.randn(shape.layers, 2, LOAD.chunk_tokens, shape.kv_heads, shape.head_dim)
    parts = quantised.quantise(kv, quantised.KINDS[store])

    stored = sum(part.nbytes for part in (parts.numbers, parts.key_scales, parts.value_scales))
    assert sizing.of(shape, parameters, LOAD, store).chunk == stored


def test_what_has_no_sizes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="holds no config"):
        sizing.measure(str(tmp_path))
    with pytest.raises(FailedPrecondition, match="is no model"):
        sizing.measure("nothing")


@pytest.mark.long
@pytest.mark.slow
def test_the_command_prints_both_ways(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf")
    flags = (str(file), "--documents", "20000")
    env = {"FUSIONKV_MODELS": str(tmp_path / "models")}

    assert "20,000 documents" in fusionkv("size", *flags, env=env).stdout
    assert json.loads(fusionkv("size", *flags, "--json", env=env).stdout)["chunks"] == 80_000
    failed = fusionkv("size", str(file), "--dtype", "int4", env=env, status=1)
    assert "unknown dtype 'int4'" in failed.stderr
