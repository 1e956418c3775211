"""What of a model directory is loaded: each file, key and tensor is used, has no effect, or is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.library.cache import fingerprint
from fusionkv.gateway.embed.models import CrossEncoder, SentenceModel
from fusionkv.protos.runtime.errors import FailedPrecondition
from tests.fusion_worker.oracle import byte_tokenizer, saved
from tests.gateway import sentence_models

Change = Callable[[Path], None]
NESTED = {"rope_type": "default", "rope_theta": 1e4}
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SUPPORTED = "supported families: " + ", ".join(models.FAMILIES)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def directory(llama: Path, tmp_path: Path) -> Path:
    return shutil.copytree(llama, tmp_path / "tiny")


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that code of a model directory would make. The terminal answers every question with yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    return tmp_path / "ran"


def said(file: str = "config.json", without: str = "", **values: Any) -> Change:
    """Sets keys of a JSON file."""

    def change(directory: Path) -> None:
        path = directory / file
        before = json.loads(path.read_text()) if path.is_file() else {}
        before.pop(without, None)
        path.write_text(json.dumps(before | values))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def rewrite(directory: Path) -> None:
        held = load_file(directory / "model.safetensors")
        held |= change(held) or {}
        save_file(held, directory / "model.safetensors")

    return rewrite


def written(name: str, content: str = "{}") -> Change:
    def write(directory: Path) -> None:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(content)

    return write


def damaged(name: str, damage: Callable[[bytes], bytes]) -> Change:
    def change(directory: Path) -> None:
        (directory / name).write_bytes(damage((directory / name).read_bytes()))

    return change


def split(directory: Path, *, folder: str = "", other: str = "", lost: str = "", twice: str = "") -> None:
    """Writes the weights as two shards and an index."""
    held = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(held)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    (directory / folder).mkdir(exist_ok=True)
    for file, members in halves.items():
        both = {*members, *([twice] if twice else [])}
        save_file({name: held[name].clone() for name in both}, directory / folder / file)
    places = {name: f"{other or folder}{file}" for file, members in halves.items() for name in members}
    places |= {lost: "a.safetensors"} if lost else {}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


LAYER = "model.layers.0.self_attn.q_proj.weight"
CODE = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}

REFUSED: dict[str, tuple[Change, str]] = {
    # Tensors
    "of another family": (tensors(lambda held: {LAYER.replace("weight", "bias"): torch.ones(128)}), "1 tensors that"),
    "one too many": (tensors(lambda held: {"score.weight": torch.ones(2, 64)}), r"score\.weight"),
    "one too few": (tensors(lambda held: held.pop(LAYER) is None), f"lack 1 tensors: {LAYER}"),
    "another shape": (
        tensors(lambda held: {LAYER: torch.ones(96, 64)}),
        r"has the shape \[128, 64\], not \[96, 64\]",
    ),
    "another head": (said(tie_word_embeddings=True), "the head is tied to the embedding"),
    "integers": (
        tensors(lambda held: {LAYER: torch.ones(128, 64, dtype=torch.int8)}),
        "quantised in a way .*is of type I8",
    ),
    "fp8 weights": (tensors(lambda held: {LAYER: held[LAYER].to(torch.float8_e4m3fn)}), "quantised .*type F8_E4M3"),
    "more layers": (said(num_hidden_layers=4), "weights"),
    # Files
    "nothing": (shutil.rmtree, r"holds no config\.json"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "no weights in safetensors"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), r"no tokenizer\.json"),
    "half of the weights": (damaged("model.safetensors", lambda data: data[: len(data) // 2]), "tiny"),
    "weights with another head": (damaged("model.safetensors", lambda data: b"\xff" * 16 + data[16:]), "tiny"),
    "empty weights": (damaged("model.safetensors", lambda data: b""), "tiny"),
    "a part of a tokenizer": (damaged("tokenizer.json", lambda data: data[:50]), "tiny"),
    "no tokenizer's JSON": (damaged("tokenizer.json", lambda data: b'{"a": 1}'), "tiny"),
    "a part of a configuration": (damaged("config.json", lambda data: data[:50]), "tiny"),
    "an adapter": (written("adapter_config.json"), "holds an adapter .*merge it into the model"),
    "an adapter's weights": (
        lambda d: save_file({"base_model.x.lora_A": torch.ones(2)}, d / "adapter_model.safetensors"),
        "holds an adapter",
    ),
    "other weights": (lambda d: save_file({"x": torch.ones(2)}, d / "more.safetensors"), "would not be loaded"),
    "distributed weights": (
        lambda d: (d / "model.safetensors").rename(d / "shard-00001-model-00001-of-00001.safetensors"),
        "lacks model.safetensors",
    ),
    "pickles": (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "pickles are not loaded"),
    "a shard lost": (lambda d: (split(d), (d / "b.safetensors").unlink()), r"lacks b\.safetensors"),
    "a tensor lost": (lambda d: split(d, lost="gone"), "lists gone, which no file holds"),
    "a tensor twice": (lambda d: split(d, twice=LAYER), "twice"),
    "weights outside": (lambda d: split(d, other="../x/"), r"outside of its directory: '\.\./x/"),
    "no map": (written("model.safetensors.index.json"), "has no weight_map"),
    "two sets of weights": (
        lambda d: (
            shutil.copy(d / "model.safetensors", d / "c"),
            split(d),
            (d / "c").rename(d / "model.safetensors"),
        ),
        "would not be loaded",
    ),
    **{f"{name} beside": (written(name), "quantised") for name in ("quantize_config.json", "hf_quant_config.json")},
    "quantised by nothing": (said(quantization_config={"bits": 4}), "are quantised by None; supported methods"),
    "quantised by mlx": (said(quantization={"group_size": 64, "bits": 4}), "are quantised"),
    # Code
    "code of an unknown family": (said(model_type="own", auto_map=CODE), "code of a model directory is never run"),
    "code of a known family": (said(auto_map=CODE), "code of a model directory is never run"),
    "code of a tokenizer": (
        said("tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Tokenizer", None]}),
        "code of a model directory is never run",
    ),
    **{
        f"{key} {kernel}": (said(**{key: kernel}), "may be code from a hub")
        for key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
        for kernel in ("own/kernel", "own/kernel@v1:f", "paged|own/kernel", {"": "own/kernel"}, 3)
    },
    # Keys of config.json
    "another class": (said(architectures=["Qwen2ForCausalLM"]), "is a LlamaForCausalLM"),
    "a classifier": (said(architectures=["LlamaForSequenceClassification"]), "is a LlamaForCausalLM"),
    "a misspelt key": (said(rms_norm_epsilon=0.1), "rms_norm_epsilon = 0.1: this key is not supported"),
    "another file": (said(configuration_files=["config.4.0.0.json"]), "configuration_files"),
    "weights by name": (said(transformers_weights="sub/model.safetensors"), "transformers_weights"),
    "layers of their own": (said(per_layer_config={"0": {"hidden_size": 8}}), "per_layer_config"),
    "fused layers": (said(fusion_config={"patch_embeddings": True}), "fusion_config"),
    "a scale": (said(logit_scale=2.0), "logit_scale"),
    "a scale of residuals": (said(residual_multiplier=0.2), "residual_multiplier"),
    "a window": (said(sliding_window=16), "sliding_window"),
    "windows by layer": (said(layer_types=["sliding_attention"] * 3), "layer_types"),
    "rotation of pairs": (said(rope_interleaved=True), "rope_interleaved"),
    "attention that is not causal": (said(is_causal=False), "is_causal"),
    "part of the rotation": (said(rope_parameters={**NESTED, "partial_rotary_factor": 0.5}), "rope"),
    "rotation of pictures": (
        said(rope_parameters={**NESTED, "mrope_section": [8, 12, 12]}),
        "does not use all of it",
    ),
    "a factor without a type": (said(rope_parameters={**NESTED, "factor": 4.0}), "does not use all of it"),
    "too many experts": (
        said(model_type="mixtral", architectures=None, num_local_experts=10**9),
        "num_local_experts",
    ),
    "two rotations": (said(rope_scaling={"type": "linear", "factor": 2.0}), "rope_parameters says it as well"),
    # Rotations that are no function of the position.
    "dynamic rotation": (said(rope_parameters={**NESTED, "rope_type": "dynamic", "factor": 2.0}), "'dynamic' is not"),
    "rotation for long": (said(rope_parameters={**NESTED, **LONG_ROPE}), "RoPE type 'longrope' is not supported"),
    # Values of config.json
    "a family that is not served": (said(model_type="gpt2"), f"family 'gpt2' is not supported; {SUPPORTED}"),
    "no type": (said(without="model_type"), "family None is not supported"),
    "a type that is none": (said(model_type=["llama"]), "is not supported"),
    "a function": (said(hidden_act="__import__('os')"), "transformers has no such function"),
    "a dtype": (said(dtype="int8"), "use float32, bfloat16, float16"),
    "a dtype of another kind": (said(dtype=["float32"]), "use float32, bfloat16, float16"),
    "an end": (said(eos_token_id="2"), "it has to be token ids"),
    "an end below zero": (said("generation_config.json", eos_token_id=[2, -1]), "it has to be token ids"),
    **{
        f"{key} = {value}": (said(**{key: value}), f"{key} = |attention heads")
        for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size")
        for value in (0, -1, 1.5, "64", [64], True, 10**9, 10**30)
    },
    **{f"a length of {v}": (said(max_position_embeddings=v), "max_position") for v in (0, -5, "x", 2**40)},
    **{f"an epsilon of {v}": (said(rms_norm_eps=v), "rms_norm_eps") for v in (-1, "x", float("nan"), float("inf"))},
    **{
        f"a theta of {value}": (said(rope_parameters={"rope_type": "default", "rope_theta": value}), "rope")
        for value in (0, -1, "x", float("nan"), [1], {})
    },
    "a list for RoPE": (said(rope_parameters=[1]), "it has to be an object"),
    "heads that do not divide": (said(num_key_value_heads=3), "does not divide"),
    "a nest": (written("config.json", "[" * 100_000), "can't read"),
    "a list": (written("config.json", "[]"), "holds no JSON object"),
    "a key twice": (written("config.json", '{"model_type": "llama", "model_type": "qwen2"}'), "occurs twice"),
    "a long number": (written("config.json", f'{{"vocab_size": {"9" * 5000}}}'), "can't read"),
    "bytes": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe\x00"), "can't read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_lost_is_refused(name: str, directory: Path, ran: Path) -> None:
    change, message = REFUSED[name]
    (directory / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    change(directory)
    with pytest.raises(FailedPrecondition, match=message) as caught:
        models.load(directory, "cpu")
    assert "\n" not in str(caught.value)
    assert not ran.exists()


ACCEPTED: dict[str, Change] = {
    "older names": said(without="rope_parameters", rope_theta=10000.0, rope_scaling=None, torch_dtype="float32"),
    "sampling": said("generation_config.json", temperature=0.6, top_p=0.9, do_sample=True, repetition_penalty=1.1),
    "sampling of older ones": said(temperature=0.6, top_k=20, max_length=4096),
    "what SmolLM2 says": said(rope_interleaved=False, is_llama_config=True, pretraining_tp=1, use_cache=True),
    "what tools leave": said(unsloth_fixed=True, unsloth_version="2025.1", _name_or_path="x", id2label={"0": "a"}),
    "nothing": said(head_size=None, logit_scale=None, quantization_config=None, auto_map=None),
    "attention of transformers": said(_attn_implementation="flash_attention_2", _attn_implementation_autoset=True),
    "a padding that is none": said(pad_token_id=-1),
    "a padding beyond": said(pad_token_id=4000),
    "weights of Mistral's own code": lambda d: (
        save_file({"x": torch.ones(1)}, d / "consolidated.safetensors") or None
    ),
    "pickles beside": lambda d: (d / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.") and None,
    "shards": split,
    "shards in a folder": lambda d: split(d, folder="sub/"),
    "frequencies of older ones": tensors(
        lambda held: {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_changes_nothing_is_loaded(name: str, directory: Path) -> None:
    ids = torch.arange(20)[None]
    plain = models.load(directory, "cpu")
    ACCEPTED[name](directory)
    model = models.load(directory, "cpu")
    with torch.inference_mode():
        torch.testing.assert_close(model.network(ids).logits, plain.network(ids).logits, rtol=0, atol=0)
    assert model.ends == plain.ends


def test_what_has_no_effect_is_said_once_at_the_start(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Sampling of a Qwen2.5 folder, and what a tokenizer says that its tokenizer.json does not do."""
    caplog.set_level("INFO")
    models.load(directory, "cpu")
    assert "without effect" not in caplog.text
    sampling = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    neutral = {
        "do_sample": True,
        "bos_token_id": 1,
        "length_penalty": 1.0,
        "forced_bos_token_id": None,
        "num_beams": 1,
    }
    said("generation_config.json", **sampling, **neutral)(directory)
    said("tokenizer_config.json", clean_up_tokenization_spaces=True, split_special_tokens=False, novel="x")(directory)
    models.load(directory, "cpu")
    (sampled, tokenized) = [record.message for record in caplog.records if "without effect" in record.message]
    assert sampled == (
        "generation_config.json of tiny sets temperature 0.7, top_p 0.8, top_k 20, repetition_penalty 1.05, without "
        "effect here: requests say how answers are sampled"
    )
    assert tokenized == (
        "tokenizer_config.json of tiny sets clean_up_tokenization_spaces True, novel 'x', without effect here"
    )


# Some keys of the config.json of published models.
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1, "hidden_size": 2048, "kv_lora_rank": 512, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
        "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_size": 2048, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False,
        "qkv_bias": False, "rope_scaling": None, "rope_theta": 1e6, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 0, "sliding_window": None, "use_qk_norm": True,
        "use_sliding_window": False,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "max_window_layers": 28,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rope_theta": 10000,
        "sliding_window": 4096, "use_mrope": False, "use_sliding_window": False,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "num_experts_per_tok": 2,
        "num_local_experts": 8, "output_router_logits": False, "rope_theta": 1e6, "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
        "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"], "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 2, "num_key_value_heads": 8, "num_local_experts": 32,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False,
                         "original_max_position_embeddings": 4096},
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "embd_pdrop": 0.0,
        "original_max_position_embeddings": 16384, "resid_pdrop": 0.0, "rope_scaling": None, "rope_theta": 250000,
        "sliding_window": None,
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"], "layer_types": ["full_attention"] * 4, "max_window_layers": 28,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4, "pretraining_tp": 2,
        "rope_scaling": None, "rope_theta": 5e6, "sliding_window": None, "use_sliding_window": False,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None, "cache_implementation": "hybrid",
        "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 168,
        "rope_local_base_freq": 10000.0, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000.0, "sliding_window": 1024, "sliding_window_pattern": 6,
    },
}  # fmt: skip


@pytest.mark.parametrize(("kind", "published"), PUBLISHED.items())
def test_keys_of_published_models_are_known(kind: str, published: dict[str, Any], tmp_path: Path) -> None:
    said(model_type=kind, **published)(tmp_path)
    assert models.configuration(tmp_path).model_type == kind


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("norm_topk_prob", True, "this key is not supported"),
        ("scoring_func", "sigmoid", "this key is not supported"),
        ("qk_head_dim", 128, "this key is not supported"),
        ("head_dim", 128, "it has to be qk_rope_head_dim"),
    ],
)
def test_what_transformers_ignores_of_deepseek(key: str, value: Any, why: str, tmp_path: Path) -> None:
    deepseek = PUBLISHED["deepseek_v2"]
    said(model_type="deepseek_v2", **deepseek | {"qk_head_dim": 192, "head_dim": 64})(tmp_path)
    models.configuration(tmp_path)
    said(model_type="deepseek_v2", **deepseek | {key: value})(tmp_path)
    with pytest.raises(FailedPrecondition, match=f"{key} = {value!r}: {why}"):
        models.configuration(tmp_path)


@pytest.mark.parametrize("as_family", ["llama", "mistral", "qwen3"])
def test_a_checkpoint_of_another_family_is_refused(as_family: str, tmp_path: Path) -> None:
    directory = saved(tmp_path / "tiny", "qwen2")
    said(model_type=as_family, architectures=None, layer_types=None, use_sliding_window=False)(directory)
    with pytest.raises(FailedPrecondition, match=r"self_attn\.(q_norm|k_norm|k_proj)"):
        models.load(directory, "cpu")


def test_layers_with_and_without_rope_are_counted(tmp_path: Path) -> None:
    said(model_type="smollm3", **PUBLISHED["smollm3"] | {"no_rope_layers": [1, 0]})(tmp_path)
    with pytest.raises(FailedPrecondition, match=r"no_rope_layers = .* it has to be a number for each of 4 layers"):
        models.configuration(tmp_path)


def test_weights_in_a_folder_are_part_of_the_fingerprint(directory: Path) -> None:
    split(directory, folder="sub/")
    before = fingerprint(directory)
    held = load_file(directory / "sub/b.safetensors")
    name = min(held)
    held[name] += 1
    save_file(held, directory / "sub/b.safetensors")
    assert fingerprint(directory) != before


@pytest.mark.parametrize("kind", [SentenceModel, CrossEncoder])
@pytest.mark.parametrize(
    "change",
    [
        said(model_type="own", auto_map={"AutoConfig": "own.Config", "AutoModel": "own.Model"}),
        said("tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Tokenizer", None]}),
        said(_attn_implementation="own/kernel"),
        written("adapter_config.json"),
    ],
    ids=["model", "tokenizer", "kernel", "adapter"],
)
def test_no_code_of_an_embedder_or_a_reranker_runs(kind: Any, change: Change, tmp_path: Path, ran: Path) -> None:
    write = sentence_models.write if kind is SentenceModel else sentence_models.write_reranker
    directory = write(tmp_path / "tiny")
    (directory / "own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    change(directory)
    with pytest.raises(FailedPrecondition):
        kind(directory)
    assert not ran.exists()


def edited(change: Callable[[Any], None], **more: Any) -> Change:
    """Changes the tokenizer, and saves it as transformers does."""

    def edit(directory: Path) -> None:
        tokenizer = byte_tokenizer(**more)
        change(tokenizer)
        tokenizer.save_pretrained(directory)

    return edit


def value(name: str, number: float, row: int = 0) -> Change:
    def put(held: dict[str, torch.Tensor]) -> None:
        held[name][row, 0] = number

    return tensors(put)


PROBED: dict[str, tuple[Change, str]] = {
    "an added token": (edited(lambda t: t.add_tokens(["<a>", "<b>", "<c>"])), "260 rows, and none for '<c>'"),
    "a special token": (edited(lambda t: t.add_special_tokens({"pad_token": "<p>"})), ""),
    "special tokens": (edited(lambda t: t.add_tokens([f"<{i}>" for i in "abcd"], special_tokens=True)), "260 rows"),
    "a token of the configuration": (
        said("tokenizer_config.json", added_tokens_decoder={"400": {"content": "<far>", "special": True}}),
        "gives '<far>' the id 400, and tokenizer.json 258",
    ),
    "the unused token of another family": (
        edited(lambda t: t.add_tokens(["<a>", "<b>", "<image_soft_token>"], special_tokens=True)),
        "260 rows",
    ),
    "an end in config.json": (said(eos_token_id=[257, 260]), "none for 'id 260 of the end"),
    "an end in generation_config.json": (said("generation_config.json", eos_token_id=999), "none for 'id 999 of the"),
    **{
        f"{number} in {name}": (value(name, number, row), "not finite")
        for number in (float("nan"), float("inf"))
        for name, row in (("model.embed_tokens.weight", 259), ("lm_head.weight", 259), (LAYER, 3))
    },
    "a norm": (tensors(lambda held: {"model.norm.weight": torch.full((64,), float("nan"))}), "not finite"),
}


@pytest.mark.parametrize("name", PROBED)
def test_what_would_fail_each_question_ends_the_start(name: str, directory: Path) -> None:
    change, message = PROBED[name]
    change(directory)
    if not message:
        models.load(directory, "cpu")
        return
    with pytest.raises(FailedPrecondition, match=message) as caught:
        models.load(directory, "cpu")
    assert "\n" not in str(caught.value)


def test_numbers_beyond_a_dtype_name_another_dtype(directory: Path) -> None:
    tensors(lambda held: {"model.norm.weight": torch.full((64,), 1e6)})(directory)
    models.load(directory, "cpu", "float32")
    with pytest.raises(FailedPrecondition, match=r"not finite: .* need --dtype bfloat16 or float32"):
        models.load(directory, "cpu", "float16")


def test_the_image_token_of_gemma_is_no_error(tmp_path: Path) -> None:
    directory = saved(tmp_path / "tiny", "gemma3")
    tokens = ["<a>", "<b>", "<image_soft_token>"]
    edited(lambda tokenizer: tokenizer.add_tokens(tokens, special_tokens=True))(directory)
    assert models.load(directory, "cpu").tokenizer.token_to_id("<image_soft_token>") == 260


@pytest.mark.parametrize("ends", [({257}, 0, [1, 2]), (set(), None, 0)])
def test_the_ends_of_an_answer_are_those_of_all_files(ends: Any, directory: Path) -> None:
    """Token 0 as well."""
    of_tokenizer, config, generation = ends
    said(eos_token_id=config)(directory)
    said("generation_config.json", eos_token_id=generation)(directory)
    if not of_tokenizer:
        said("tokenizer_config.json", eos_token=None)(directory)
    expected = {*of_tokenizer, *([] if config is None else [config])}
    expected |= {generation} if isinstance(generation, int) else {*generation}
    assert models.load(directory, "cpu").ends == expected
