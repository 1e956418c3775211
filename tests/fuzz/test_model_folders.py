"""Model folders with any keys, values and bytes changed: a model is loaded and computes, or refused in one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from fusionkv.fusion_worker import models
from fusionkv.protos.runtime.errors import FailedPrecondition
from tests.fusion_worker.oracle import saved
from tests.fuzz.effort import fuzz
from tests.fuzz.wire import JSON

pytestmark = pytest.mark.hypothesis

_NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 64, 2**31, 2**70, 0.0, 1e-9, 1e308, float("nan"), float("inf")])
_VALUES = st.one_of(JSON, _NUMBERS, st.sampled_from([None, True, "x", [], {}, [0], {"a": 1}]))
_MORE = {
    "config.json": ["rope_scaling", "quantization_config", "auto_map", "num_experts", "layer_types", "novel"],
    "generation_config.json": ["eos_token_id", "temperature", "novel"],
    "tokenizer_config.json": ["added_tokens_decoder", "chat_template", "bos_token", "eos_token", "novel"],
    "tokenizer.json": ["normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens"],
}


@pytest.fixture(params=["llama", "qwen2", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved(tmp_path / "whole", request.param)


def check(directory: Path) -> None:
    """A model that is loaded has computed a prompt (`models._probe`)."""
    try:
        models.load(directory, "cpu")
    except FailedPrecondition as error:
        told = str(error)
    else:
        told = ""
    assert told.isprintable(), told


def test_keys_and_values(folder: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    said = {name: json.loads(path.read_text()) if (path := folder / name).exists() else {} for name in _MORE}
    places = [(name, key) for name, also in _MORE.items() for key in {*said[name], *also}]

    def with_other_values(given: list[tuple[tuple[str, str], Any]]) -> None:
        shutil.rmtree(changed, ignore_errors=True)
        shutil.copytree(folder, changed)
        for (name, key), value in given:
            now = json.loads((changed / name).read_text()) if (changed / name).exists() else {}
            (changed / name).write_text(json.dumps(now | {key: value}))
        check(changed)

    changes = st.tuples(st.sampled_from(sorted(places)), _VALUES)
    fuzz(with_other_values, st.lists(changes, min_size=1, max_size=2), 60)


def test_bytes(folder: Path, tmp_path: Path) -> None:
    """Of the files of JSON, and of the head of the weights."""
    changed, names = tmp_path / "changed", [*_MORE, "model.safetensors"]

    def with_other_bytes(given: tuple[str, list[tuple[int, int]], int]) -> None:
        name, places, cut = given
        shutil.rmtree(changed, ignore_errors=True)
        shutil.copytree(folder, changed)
        data = bytearray((folder / name).read_bytes()) if (folder / name).exists() else bytearray(b"{}")
        head = min(len(data), 4000)
        for place, byte in places:
            data[place % head] = byte
        (changed / name).write_bytes(data[: len(data) - cut % len(data)] if cut else data)
        check(changed)

    bytes_ = st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=3)
    fuzz(with_other_bytes, st.tuples(st.sampled_from(names), bytes_, st.sampled_from([0, 0, 0, 1, 100, 9999])), 60)
