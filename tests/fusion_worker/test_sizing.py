"""`fusionkv size` against what a loaded model and the storage formats really take."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.evaluate import sizing
from fusionkv.kernels import quantised
from tests.commands import fusionkv
from tests.fusion_worker import gguf_files
from tests.fusion_worker.oracle import saved

LOAD = sizing.Load(documents=10, document_tokens=1000, chunk_tokens=256, prompt_chunks=8, prompts=2)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_sizes_are_those_of_the_loaded_model(reference_model: Path, dtype: str) -> None:
    model = models.load(reference_model, "cpu", dtype)
    whole = AutoModelForCausalLM.from_pretrained(reference_model, dtype=model.kv.dtype)
    size = sizing.of(sizing.measure(str(reference_model), dtype), LOAD)

    assert size.token == model.token_bytes
    assert size.weights == sum(p.nbytes for p in whole.parameters())
    assert (size.chunks, size.stored["plain"].corpus) == (40, 10_000 * model.token_bytes)
    assert size.pool == 2 * size.prompt == 2 * 2048 * model.token_bytes


@pytest.mark.parametrize("store", quantised.KINDS)
@pytest.mark.parametrize("kind", ["qwen2", "deepseek-v2"])
def test_a_quantised_chunk_takes_what_is_counted(kind: str, store: str, tmp_path: Path) -> None:
    network = sizing.measure(str(saved(tmp_path, kind)))
    shape = network.shape
    assert sizing.of(network, LOAD).token == models.load(tmp_path, "cpu").token_bytes
    kv = torch.randn(shape.layers, shape.tensors, LOAD.chunk_tokens, shape.kv_heads, shape.head_dim)
    parts = quantised.quantise(kv, quantised.KINDS[store])

    stored = sum(part.nbytes for part in (parts.numbers, parts.key_scales, parts.value_scales))
    counted = sizing.of(network, LOAD).stored
    assert (counted[store].chunk, counted[store].prompt) == (stored, 8 * stored)
    assert counted[store].corpus == round(stored / LOAD.chunk_tokens * 10_000)
    assert counted["int8"] == counted["fp8"], "they share a column"


def test_a_chunk_is_paid_for_by_what_it_saves() -> None:
    """Llama 3.1 8B: a chunk of 33.6 MB costs $0.00336 a month; four fifths of computing it $0.0000159 (29 ms)."""
    shape = models.KVShape(layers=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    size = sizing.of(sizing.Network(shape, 8_030_000_000, 13_960_000_000), LOAD)
    assert {name: stored.break_even for name, stored in size.stored.items()} == {
        "plain": 212,
        "int8": 109,
        "fp8": 109,
        "int4": 67,
    }


def test_operations_are_those_of_the_linear_layers(reference_model: Path) -> None:
    """Two for each weight; without the one of the logits, which only a prompt's last token needs."""
    whole = AutoModelForCausalLM.from_pretrained(reference_model)
    network = sizing.measure(str(reference_model))
    linear = [m for name, m in whole.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]
    assert network.operations == pytest.approx(2 * sum(m.weight.numel() for m in linear), rel=0.01)
    size = sizing.of(network, LOAD)
    assert (size.prompt_operations, size.corpus_operations) == (
        2048 * network.operations,
        10_000 * network.operations,
    )


def test_what_a_model_says_moves_and_colours_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((saved(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "\x1b[31mred\nline": 1}))
    capsys.readouterr()
    assert sizing.main([str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fusionkv size: ")
    assert "\\x1b[31mred\\nline = 1: this key is not supported" in line


@pytest.mark.long
@pytest.mark.slow
def test_the_command_prints_both_ways(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "tiny.gguf")
    flags = (str(file), "--documents", "20000")
    env = {"FUSIONKV_MODELS": str(tmp_path / "models")}

    said = fusionkv("size", *flags, env=env).stdout
    assert "20,000 documents" in said
    assert "int8, fp8" in said
    assert "ms at 100 TFLOP/s, in place of loading it" in said
    assert json.loads(fusionkv("size", *flags, "--json", env=env).stdout)["chunks"] == 80_000
    failed = fusionkv("size", str(file), "--dtype", "int4", env=env, status=1)
    assert "unknown dtype 'int4'" in failed.stderr
