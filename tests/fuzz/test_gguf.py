"""GGUF files with any keys and values changed: a file is converted whole, or refused in one line."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from safetensors import safe_open

from fusionkv.fusion_worker.library import conversion
from fusionkv.protos.runtime.errors import FailedPrecondition
from tests.fusion_worker import gguf_files
from tests.fuzz.effort import fuzz

pytestmark = pytest.mark.hypothesis

_ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.integers(0, 600),
    st.floats(width=32),
    st.text(max_size=5),
    st.lists(st.integers(0, 9), min_size=1, max_size=9),
    st.lists(st.text(max_size=5), min_size=1, max_size=300),
)
_MORE = ("rope.scaling.type", "rope.scaling.factor", "attention.scale", "attention.sliding_window", "expert_count")
_KEYS = [
    *gguf_files.metadata_of(gguf_files.network().config, "llama", "smollm"),
    *(f"llama.{key}" for key in _MORE),
    *("general.alignment", "general.type", "tokenizer.ggml.scores", "tokenizer.ggml.add_bos_token", "split.count"),
]


def check(file: Path, into: Path) -> None:
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    try:
        conversion.convert([file], into)
    except FailedPrecondition as error:
        told = str(error)
    else:
        told = ""
    assert told.isprintable()
    if told:
        return
    with safe_open(into / "model.safetensors", "pt") as stored:
        names = set(stored.keys())
    assert {name for name, _ in gguf_files.network().named_parameters()} - names <= {"lm_head.weight"}


def test_keys_and_values(tmp_path: Path) -> None:
    def changed(also: Mapping[str, Any]) -> None:
        check(gguf_files.write(tmp_path / "some.gguf", also=also), tmp_path / "into")

    fuzz(changed, st.dictionaries(st.sampled_from(_KEYS), _ANY, min_size=1, max_size=3), 60)
