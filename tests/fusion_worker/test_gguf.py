"""What a GGUF file says is what a converted model computes; what can't be said otherwise is refused by its name."""

import math
import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize, quantize
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.library import cache, conversion, gguf_file
from fusionkv.fusion_worker.library.resolve import resolve
from fusionkv.protos.runtime.errors import FailedPrecondition
from tests.fusion_worker import gguf_files
from tests.fusion_worker.gguf_files import HEADS, HIDDEN, TOKENS, network_of

IDS = torch.arange(500)[None] * 7 % len(TOKENS)
THETA = {"rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128} | THETA
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | THETA


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of models."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "models"))
    return tmp_path / "models"


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS).logits
    return found


def converted(file: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(resolve(file), dtype=torch.float32)


def check_same(file: Path, network: Any) -> None:
    torch.testing.assert_close(logits(converted(file)), logits(network), atol=2e-4, rtol=1e-5)


def refusal(file: Path) -> str:
    """Errors are one line, and nothing is left behind."""
    with pytest.raises(FailedPrecondition) as caught:
        resolve(file)
    assert "\n" not in str(caught.value)
    assert not [found for found in cache.root().rglob("*") if found.is_file() and found.suffix != ".lock"]
    return str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "model_type", "config", "also"),
    [
        ("llama", "llama", {"attention_bias": True, "tie_word_embeddings": True}, {}),
        ("llama", "llama", {"head_dim": 24, "mlp_bias": True}, {"llama.vocab_size": None}),
        ("llama", "llama", {"num_key_value_heads": HEADS}, {"llama.attention.head_count_kv": None}),
        ("llama", "llama", {"rms_norm_eps": 0.3}, {"llama.attention.key_length": None, "llama.rope.freq_base": None}),
        ("qwen2", "qwen2", {"tie_word_embeddings": True}, {}),
        ("qwen3", "qwen3", {"head_dim": 32}, {}),
        (
            "gemma3",
            "gemma3_text",
            {"num_hidden_layers": 7, "sliding_window": 40, "query_pre_attn_scalar": 16}
            | {"rope_parameters": {"full_attention": {"rope_type": "default"} | THETA}},
            {"gemma3.attention.sliding_window": 40},
        ),
    ],
)
def test_every_family_and_size(architecture: str, model_type: str, config: Any, also: Any, tmp_path: Path) -> None:
    network = network_of(model_type, **config)
    file = gguf_files.write(tmp_path / "some.gguf", architecture, also=also, made_of=network)
    check_same(file, network)
    assert models.load(resolve(file), "cpu").family == model_type


def test_gemmas_own_keys(tmp_path: Path) -> None:
    """Each is another number than what transformers would choose."""
    rope = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    local = {"rope_type": "default", "rope_theta": 3000.0}
    network = network_of(
        "gemma3_text",
        num_hidden_layers=4,
        sliding_window=40,
        query_pre_attn_scalar=100,
        tie_word_embeddings=True,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={"full_attention": rope, "sliding_attention": local},
    )
    also = {
        "attention.sliding_window": 40,
        "attention.sliding_window_pattern": [False, True, True, False],
        "attention.scale": 0.1,
        "rope.freq_base": 5e5,
        "rope.freq_base_swa": 3000.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    }
    also = {f"gemma3.{key}": value for key, value in also.items()}
    check_same(gguf_files.write(tmp_path / "some.gguf", "gemma3", also=also, made_of=network), network)


ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "yarn": ({"type": "yarn", "factor": 4.0, "original_context_length": 128}, YARN),
    "yarn, all": (
        {"type": "yarn", "factor": 4.0, "original_context_length": 128, "yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0}
        | {"attn_factor": 1.5, "finetuned": True},
        YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.5 * (0.1 * math.log(4) + 1)},
    ),
    "yarn, original length unsaid": (
        {"type": "yarn", "factor": 4.0},
        YARN | {"original_max_position_embeddings": 512},
    ),
    "linear": ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0} | THETA),
    "a factor without a type": ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0} | THETA),
    "the old name of linear": ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0} | THETA),
    "none": ({"type": "none", "factor": 4.0}, {"rope_type": "default"} | THETA),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_scaling(name: str, tmp_path: Path) -> None:
    said, rope = ROPES[name]
    also = {f"llama.rope.{key if key == 'scale_linear' else f'scaling.{key}'}": value for key, value in said.items()}
    check_same(gguf_files.write(tmp_path / "some.gguf", also=also), network_of("llama", rope_parameters=rope))


@pytest.mark.parametrize("original", [100, 400])
def test_llama3_comes_as_a_tensor_of_factors(original: int, tmp_path: Path) -> None:
    network = network_of("llama", rope_parameters=LLAMA3 | {"original_max_position_embeddings": original})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](network.config)
    plain = 1 / 10000 ** (torch.arange(0, HIDDEN // HEADS, 2) / (HIDDEN // HEADS))
    assert len({round(float(f), 5) for f in plain / scaled}) > 2
    tensors = {"rope_freqs.weight": (plain / scaled).numpy()}
    file = gguf_files.write(tmp_path / "some.gguf", tensors=tensors)
    check_same(file, network)
    loaded = models.load(resolve(file), "cpu", "float32")
    torch.testing.assert_close(loaded.rotations[0].inv_freq, scaled, rtol=1e-5, atol=0)


def test_factors_of_any_kind(tmp_path: Path) -> None:
    factors = np.array([1, 1, 2, 4, 8, 8, 8, 0.5], np.float32)
    file = gguf_files.write(tmp_path / "some.gguf", tensors={"rope_freqs.weight": factors})
    network = network_of("llama")
    network.model.rotary_emb.inv_freq /= torch.tensor(factors)
    check_same(file, network)
    file = gguf_files.write(tmp_path / "ones.gguf", tensors={"rope_freqs.weight": np.ones(8, np.float32)})
    assert converted(file).config.rope_parameters["rope_type"] == "default"


REFUSED: dict[str, Any] = {
    "llama.rope.scaling.type": ["longrope", "dynamic", 3],
    "llama.rope.scaling.factor": [-2.0, math.nan, math.inf, "4"],
    "llama.rope.scaling.attn_factor": [1.5],
    "llama.rope.scaling.yarn_ext_factor": [0.5],
    "llama.rope.scaling.yarn_log_multiplier": [0.1],
    "llama.rope.scaling.alpha": [1000.0],
    "llama.rope.freq_base": [0.0, math.nan],
    "llama.rope.freq_base_swa": [10000.0],
    "llama.rope.dimension_count": [8],
    "llama.rope.dimension_sections": [[4, 4, 0, 0]],
    "llama.attention.sliding_window": [256],
    "llama.attention.scale": [0.1],
    "llama.attention.value_length": [24],
    "llama.attention.causal": [False],
    "llama.attention.clamp_kqv": [8.0],
    "llama.attention.max_alibi_bias": [8.0],
    "llama.attention.head_count": [0, [4, 4], 4.0, True],
    "llama.attention.head_count_kv": [[2, 4]],
    "llama.attention.layer_norm_epsilon": [1e-5],
    "llama.attn_logit_softcapping": [50.0],
    "llama.final_logit_softcapping": [30.0],
    "llama.expert_count": [8],
    "llama.expert_used_count": [2],
    "llama.logit_scale": [0.5],
    "llama.embedding_scale": [12.0],
    "llama.residual_scale": [0.22],
    "llama.use_parallel_residual": [True],
    "llama.block_count": [1 << 31],
    "llama.vocab_size": [300],
    "llama.something_new": [0],
    "qwen2.rope.scaling.type": ["yarn"],
    "clip.projector_type": ["mlp"],
    "general.type": ["adapter", "mmproj"],
    "general.quantization_version": [1],
    "general.architecture": ["bert", 3],
    "tokenizer.ggml.model": ["bert", "t5"],
    "tokenizer.ggml.pre": ["default", "something-new"],
    "tokenizer.ggml.add_eos_token": [True],
    "tokenizer.ggml.add_space_prefix": [True],
    "tokenizer.ggml.remove_extra_whitespaces": [True],
    "tokenizer.ggml.eos_token_id": [len(TOKENS), "2"],
    "tokenizer.ggml.precompiled_charsmap": [[1, 2, 3]],
    "tokenizer.ggml.something_new": [1],
    "tokenizer.ggml.token_type": [[1, 1]],
    "tokenizer.ggml.merges": [["h e x"], ["h 東"]],
    "general.alignment": [[1]],
    "tokenizer.ggml.tokens": [["a", "a"]],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in REFUSED.items() for value in values])
def test_what_changes_the_computation_and_cannot_be_said_otherwise(key: str, value: Any, tmp_path: Path) -> None:
    told = refusal(gguf_files.write(tmp_path / "some.gguf", also={key: value}))
    assert key in told
    if not isinstance(value, list):
        said = float(np.float32(value)) if isinstance(value, float) else value
        assert f"{key} = {said!r}: " in told


REQUIRED = (
    *("llama.block_count", "llama.context_length", "llama.embedding_length", "llama.feed_forward_length"),
    *("llama.attention.head_count", "llama.attention.layer_norm_rms_epsilon"),
    *("tokenizer.ggml.tokens", "tokenizer.ggml.pre"),
)


@pytest.mark.parametrize("key", REQUIRED)
def test_keys_that_are_missing(key: str, tmp_path: Path) -> None:
    assert f"it lacks {key}" in refusal(gguf_files.write(tmp_path / "some.gguf", also={key: None}))


HARMLESS = {
    "general.name": "some",
    "general.file_type": 15,
    "general.quantization_version": 2,
    "general.type": "model",
    "general.base_model.0.name": "other",
    "quantize.imatrix.entries_count": 3,
    "tokenizer.ggml.fim_pre_token_id": 4,
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.ggml.padding_token_id": 0,
    "llama.attention.scale": (HIDDEN // HEADS) ** -0.5,
    "llama.attention.sliding_window": 512,
    "llama.expert_count": 0,
    "llama.attn_logit_softcapping": 0.0,
    "llama.rope.scaling.type": "none",
    "llama.rope.scaling.original_context_length": 512,
    "llama.logit_scale": 1.0,
}


def test_what_changes_nothing_is_accepted(tmp_path: Path) -> None:
    check_same(gguf_files.write(tmp_path / "some.gguf", also=HARMLESS), network_of("llama"))


def names(file: Path) -> list[str]:
    return [tensor.name for tensor in GGUFReader(file).tensors]


def test_no_tensor_may_be_missing_or_left_over(tmp_path: Path) -> None:
    said: dict[str, Any] = {"made_of": network_of("llama", num_hidden_layers=1)}
    for name in names(gguf_files.write(tmp_path / "whole.gguf", **said)):
        file = gguf_files.write(tmp_path / "some.gguf", **said, tensors={name: None})
        if name == "output.weight":
            assert converted(file).config.tie_word_embeddings
            shutil.rmtree(cache.root())
        else:
            assert name in refusal(file)
    some = np.zeros(HIDDEN, np.float32)
    for name in ("blk.0.attn_k.something", "blk.1.attn_norm.weight", "blk.0.attn_output.bias"):
        assert name in refusal(gguf_files.write(tmp_path / "some.gguf", **said, tensors={name: some}))
    wrong = np.zeros((HIDDEN, 95), np.float32)
    told = refusal(gguf_files.write(tmp_path / "some.gguf", **said, tensors={"blk.0.ffn_down.weight": wrong}))
    assert "blk.0.ffn_down.weight has the shape [64, 95]" in told


def test_two_conversions_are_the_same_and_kept_for_their_converter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = gguf_files.write(tmp_path / "some.gguf")
    found = [resolve(file)]
    assert resolve(file) == found[0]
    installed = conversion.importlib.metadata.version
    for package in ("transformers", "gguf"):
        monkeypatch.setattr(
            conversion.importlib.metadata, "version", lambda name, p=package: "9" if name == p else installed(name)
        )
        found.append(resolve(file))
    monkeypatch.setattr(conversion, "VERSION", conversion.VERSION + 1)
    found.append(resolve(file))
    assert len({*found}) == 4
    assert len({cache.fingerprint(directory) for directory in found}) == 1


def test_a_split_file_is_read_whole(tmp_path: Path) -> None:
    """Whichever part is named. Its head is in the last one."""
    first = gguf_files.write(tmp_path / "some.gguf", parts=3)
    assert "output.weight" not in names(first)
    directory = resolve(first)
    check_same(first.with_name("some-00003-of-00003.gguf"), network_of("llama"))
    assert directory.name == "some"
    assert directory == resolve(first.with_name("some-00002-of-00003.gguf"))
    assert cache.fingerprint(directory) == cache.fingerprint(resolve(gguf_files.write(tmp_path / "whole.gguf")))


def test_links_to_the_parts_of_a_split_file(tmp_path: Path) -> None:
    """As the Hugging Face cache has them."""
    (tmp_path / "snapshot").mkdir()
    first = gguf_files.write(tmp_path / "some.gguf", parts=2)
    for number, part in enumerate(sorted(tmp_path.glob("some-*.gguf"))):
        (tmp_path / "snapshot" / part.name).symlink_to(part.rename(tmp_path / f"blob{number}"))
    check_same(tmp_path / "snapshot" / first.name, network_of("llama"))


def other_model(folder: Path) -> None:
    for part in folder.glob("some-0000[13]*"):
        part.unlink()
    other = gguf_files.write(folder / "other.gguf", parts=3, also={"llama.rope.freq_base": 5000.0})
    shutil.copy(other, folder / "some-00001-of-00003.gguf")
    shutil.copy(other.with_name("other-00002-of-00003.gguf"), folder / "some-00003-of-00003.gguf")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda f: (f / "some-00002-of-00003.gguf").unlink(), r"lacks some-00002-of-00003\.gguf: put all parts"),
        (lambda f: shutil.copy(f / "some-00002-of-00003.gguf", f / "some-00003-of-00003.gguf"), "holds part 2 of 3"),
        (other_model, "holds part 2 of 3"),
        (
            lambda f: gguf_files.write(f / "some-00001-of-00003.gguf"),
            "holds part 1 of 1 .*, but is not named so",
        ),
        (lambda f: (f / "some-00003-of-00003.gguf").write_bytes(b"GGUF"), "some-00003.* is damaged"),
    ],
    ids=["second missing", "second twice", "of another model", "whole", "damaged"],
)
def test_split_files_that_are_refused(spoil: Any, told: str, tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "some.gguf", parts=3)
    spoil(tmp_path)
    assert re.search(told, refusal(tmp_path / "some-00001-of-00003.gguf"))


def test_a_part_by_another_name(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "some.gguf", parts=3).rename(tmp_path / "model.gguf")
    assert "model.gguf holds part 1 of 3 (split.no, split.count), but is not named so" in refusal(file)
    for name in ("some-00000-of-00003.gguf", "some-00004-of-00003.gguf"):
        file = file.rename(tmp_path / name)
        assert "parts are counted from 1" in refusal(file)


def test_parts_that_hold_too_little(tmp_path: Path) -> None:
    """All parts are there, but one of another splitting."""
    gguf_files.write(tmp_path / "some.gguf", parts=3, tensors={"output.weight": None})
    short = (tmp_path / "some-00003-of-00003.gguf").rename(tmp_path / "short")
    gguf_files.write(tmp_path / "some.gguf", parts=3)
    short.rename(tmp_path / "some-00003-of-00003.gguf")
    assert "split.tensors.count" in refusal(tmp_path / "some-00001-of-00003.gguf")


def template_of(file: Path) -> Any:
    return AutoTokenizer.from_pretrained(resolve(file))


@pytest.mark.parametrize(
    ("also", "begins", "bos"),
    [
        ({"tokenizer.ggml.add_bos_token": True}, True, 1),
        ({"tokenizer.ggml.add_bos_token": False}, False, 1),
        ({}, False, 1),
        ({"tokenizer.chat_template": None}, False, 1),
        ({"tokenizer.chat_template": None, "tokenizer.ggml.pre": "llama-bpe"}, True, 1),
        ({"tokenizer.ggml.bos_token_id": None}, False, None),
    ],
)
def test_the_first_token(also: Any, begins: bool, bos: int | None, tmp_path: Path) -> None:
    directory = resolve(gguf_files.write(tmp_path / "some.gguf", also=also))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    assert (tokenizer.bos_token_id, tokenizer("he").input_ids[0] == 1) == (bos, begins)
    assert Tokenizer.from_file(str(directory / "tokenizer.json")).encode("he").ids[0] == (
        1 if begins else TOKENS.index("he")
    )


def test_all_tokens_that_end_an_answer(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "some.gguf", also={"tokenizer.ggml.eot_token_id": 0})
    assert models.load(resolve(file), "cpu").ends == {0, 2}
    assert (template_of(file).eos_token_id, template_of(file).chat_template) == (2, gguf_files.CHAT)


def test_tokens_that_stand_whole(tmp_path: Path) -> None:
    """A control token of characters that byte-level BPE does not have, and a user-defined one."""
    tokens = [*TOKENS[:-4], "<end\u2581of>", "<think>", *TOKENS[-2:]]
    kinds = [3] * 3 + [1] * (len(tokens) - 7) + [3, 4, 1, 1]
    also: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    also["tokenizer.ggml.eos_token_id"] = control = len(tokens) - 4
    tokenizer = template_of(gguf_files.write(tmp_path / "some.gguf", also=also))
    ids = tokenizer("he<think><end\u2581of>").input_ids
    assert ids == [len(tokens) - 2, control + 1, control]
    assert (tokenizer.decode(ids, skip_special_tokens=True), len(tokenizer)) == ("he<think>", len(tokens))


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("qwen2", False)])
def test_words_that_no_merges_lead_to(pre: str, whole: bool, tmp_path: Path) -> None:
    """Llama 3 takes them as they are."""
    also = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": ["h e"], "tokenizer.chat_template": None}
    ids = template_of(gguf_files.write(tmp_path / "some.gguf", also=also))(" he", add_special_tokens=False).input_ids
    assert (ids == [len(TOKENS) - 1]) == whole


def test_a_tokenizer_of_pieces(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁h", "e"]
    pieces = [*pieces[: len(TOKENS) - 3], "▁", "h", "▁h"]
    also = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * (len(pieces) - 3) + [-2.0, -3.0, -1.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * (len(pieces) - 6) + [1, 1, 1],
        "tokenizer.ggml.merges": None,
        "tokenizer.chat_template": None,
    }
    with_prefix = template_of(gguf_files.write(tmp_path / "some.gguf", also=also))
    last = len(pieces) - 1
    assert with_prefix("h").input_ids == [1, last]
    also["tokenizer.ggml.add_space_prefix"] = False
    assert template_of(gguf_files.write(tmp_path / "some.gguf", also=also))("h").input_ids == [1, last - 1]
    # Numbers of other counts than the tokens', and pairs of what is no token.
    for wrong in ({"scores": [0.0]}, {"token_type": [1, 1]}, {"merges": ["h x"]}):
        shutil.rmtree(cache.root())
        spoilt = also | {f"tokenizer.ggml.{key}": value for key, value in wrong.items()}
        told = refusal(gguf_files.write(tmp_path / "some.gguf", also=spoilt))
        assert "merges" in wrong or f"tokenizer.ggml.{min(wrong)} has " in told


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 123456\n"
    file = tmp_path / "some.gguf"
    file.write_text(pointer)
    assert "some.gguf is a pointer of Git LFS, not the file itself: run `git lfs pull`" in refusal(file)
    directory = resolve(gguf_files.write(tmp_path / "other.gguf"))
    for name in ("model.safetensors", "tokenizer.json"):
        shutil.copytree(directory, tmp_path / name / "some")
        (tmp_path / name / "some" / name).write_text(pointer)
        with pytest.raises(FailedPrecondition, match=f"{name} is a pointer of Git LFS"):
            models.load(tmp_path / name / "some")


def test_files_that_are_cut_or_missing(tmp_path: Path) -> None:
    file = gguf_files.write(tmp_path / "some.gguf")
    data = file.read_bytes()
    for end in (9000, -9000):
        file.write_bytes(data[:end])
        assert "some.gguf is not a GGUF file, or is damaged" in refusal(file)
    file.unlink()
    assert f"there is no file {file}" in refusal(file)


def hostile(*numbers: int, tail: bytes = b"") -> bytes:
    """The head of a GGUF file with these counts, and something behind it."""
    return b"GGUF" + np.array([3], "<u4").tobytes() + np.array(numbers, "<u8").tobytes() + tail


KEY = np.array([1], "<u8").tobytes() + b"k"
U32 = np.array([9, 4], "<u4").tobytes()  # an array of 32-bit numbers


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<html>The page was not found.</html>",
        hostile(0, 1 << 60, tail=bytes(70)),
        hostile(0, 1, tail=np.array([1 << 62], "<u8").tobytes() + bytes(70)),
        hostile(0, 1, tail=KEY + U32 + np.array([1 << 40], "<u8").tobytes() + bytes(33)),
        hostile(0, 1, tail=KEY + np.array([13], "<u4").tobytes() + bytes(60)),
        hostile(1, 0, tail=KEY + np.array([1 << 31], "<u4").tobytes() + bytes(60)),
        hostile(1, 0, tail=KEY + np.array([1, 0], "<u4").tobytes() + bytes(60)),
        hostile(1, 0, tail=KEY + np.array([4], "<u4").tobytes() + np.full(4, 1 << 62, "<u8").tobytes() + bytes(60)),
    ],
)
def test_counts_beyond_the_end_of_a_file(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "some.gguf"
    file.write_bytes(data)
    gguf_file.np.zeros(1)
    tracemalloc.start()
    try:
        told = refusal(file)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "is not a GGUF file, or is damaged" in told
    assert most < 2 << 20


def test_tensors_that_share_their_bytes(tmp_path: Path) -> None:
    """A few bytes that many tensors share could fill a disk."""
    file = gguf_files.write(tmp_path / "some.gguf")
    data, at = bytearray(file.read_bytes()), {}
    for tensor in GGUFReader(file).tensors:
        offset = tensor.field.parts[-1]
        at[tensor.name] = int(tensor.field.offset + sum(part.nbytes for part in tensor.field.parts) - offset.nbytes)
    one, two = at["blk.0.ffn_gate.weight"], at["blk.0.ffn_up.weight"]
    data[two : two + 8] = data[one : one + 8]
    file.write_bytes(data)
    assert "overlaps another" in refusal(file)


def test_names_that_would_reach_a_terminal(tmp_path: Path) -> None:
    for also, tensors in (({"llama.\x1b[31mname": "x"}, {}), ({}, {"blk.0.\nsome": np.zeros(1, np.float32)})):
        assert refusal(gguf_files.write(tmp_path / "some.gguf", also=also, tensors=tensors)).isprintable()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_weights_of_other_types(kind: str, tmp_path: Path) -> None:
    """They are what the package gguf reads in them, here of a row of a multiple of 32 numbers."""
    name, number = "blk.0.ffn_gate.weight", GGMLQuantizationType[kind]
    network = network_of("llama")
    weights = network.model.layers[0].mlp.gate_proj.weight
    packed = quantize(weights.detach().numpy(), number)
    file = gguf_files.write(tmp_path / "some.gguf", tensors={name: (packed, number)})
    weights.data = torch.from_numpy(dequantize(packed, number)).bfloat16().float()
    check_same(file, network)


def test_weights_of_a_type_that_nobody_reads(tmp_path: Path) -> None:
    weights = np.zeros((96, HIDDEN), np.int8)
    told = refusal(gguf_files.write(tmp_path / "some.gguf", tensors={"blk.0.ffn_gate.weight": weights}))
    assert "blk.0.ffn_gate.weight is of type I8, which the package gguf can't read" in told


def test_templates_of_which_none_is_the_default(tmp_path: Path) -> None:
    also = {"tokenizer.chat_template": None, "tokenizer.chat_template.rag": gguf_files.CHAT}
    assert "it has tokenizer.chat_template.rag, but no" in refusal(
        gguf_files.write(tmp_path / "some.gguf", also=also)
    )
