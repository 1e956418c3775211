"""The files of a model directory: what each says is used, has no effect here, or is refused by name."""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fusionkv.fusion_worker.library import quantised
from fusionkv.protos.runtime.errors import FailedPrecondition, first_line

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Attention of transformers itself, which the worker replaces by its own; any other name may be code of a hub.
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
_SIZES = (
    *("head_dim", "hidden_size", "intermediate_size", "kv_lora_rank", "moe_intermediate_size", "n_routed_experts"),
    *("num_attention_heads", "num_experts", "num_hidden_layers", "num_key_value_heads", "num_local_experts"),
    *("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "shared_expert_intermediate_size", "v_head_dim"),
    "vocab_size",
)
_DTYPES = ("float32", "bfloat16", "float16")
_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# Keys of RoPE by type; transformers ignores others, such as those of multimodal models.
_ROPE_KEYS = {
    "default": _ROPE,
    "linear": {*_ROPE, "factor"},
    "llama3": {*_ROPE, "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        *(*_ROPE, "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        *("original_max_position_embeddings", "finetuned"),
    },
    "longrope": {
        *(*_ROPE, "factor", "attention_factor", "short_factor", "long_factor"),
        "original_max_position_embeddings",
    },
}
# Families in which a part of the channels may be rotary.
_PARTIAL = ("glm4", "phi3")
# Older names of RoPE's parameters, which transformers translates.
_OLDER = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
_OLDER_GEMMA = {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"}
# Keys of config.json that change nothing that is computed here, with any value: names, training, sampling, outputs.
_HARMLESS = re.compile(
    r"_attn_implementation_autoset|_commit_hash|_from_model_config|_?name_or_path|architectures|attention_dropout"
    r"|aux_loss_alpha|bad_words_ids|begin_suppress_tokens|bos_token_id|cache_implementation|decoder_start_token_id"
    r"|diversity_penalty|do_sample|dtype|early_stopping|encoder_no_repeat_ngram_size|eos_token_id|ep_size"
    r"|exponential_decay_length_penalty|finetuning_task|forced_(bos|eos)_token_id|gradient_checkpointing"
    r"|(hidden|embd|resid|residual|classifier|embedding)_dropout(_prob)?|id2label|initializer_range"
    r"|is_decoder|is_llama_config|label2id|length_penalty|max_length|max_window_layers|min_length|model_type"
    r"|no_repeat_ngram_size|num_(beams|beam_groups|labels|return_sequences)|output_(attentions|hidden_states|router_logits|scores)"
    r"|pad_token_id|prefix|pretraining_tp|problem_type|remove_invalid_values|repetition_penalty"
    r"|return_dict(_in_generate)?|router_(aux_loss_coef|jitter_noise)|sep_token_id|seq_aux|suppress_tokens|task_specific_params|temperature|tokenizer_class"
    r"|top_[kp]|torch_dtype|torchscript|training|transformers_version|transformers\.js_config|typical_p"
    r"|unk_token_id|unsloth_\w+|use_bfloat16|use_cache|use_reentrant|_unsloth_\w+"
)
# Keys that a family's configuration does not have, with the values that say what the family does anyway.
_OFF = (
    *("add_cross_attention", "is_encoder_decoder", "mlp_bias", "qk_layernorm", "rope_interleaved"),
    *("tie_encoder_decoder", "use_bidirectional_attention", "use_mrope", "use_sliding_window"),
)
_SAYS_SO: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_OFF, (False,)),
    **dict.fromkeys(("attn_logit_softcapping", "chunk_size_feed_forward", "final_logit_softcapping"), (0,)),
    **dict.fromkeys(("is_causal", "use_rotary_emb"), (True,)),
    "pruned_heads": ({},),
}
_FAMILY_SAYS_SO: dict[tuple[str, str], Any] = {
    ("qwen2", "attention_bias"): True,
    ("mistral", "attention_bias"): False,
    ("mixtral", "attention_bias"): False,
    ("phi3", "attention_bias"): False,
    ("deepseek_v2", "moe_layer_freq"): 1,
    ("deepseek_v2", "norm_topk_prob"): False,
    ("deepseek_v2", "scoring_func"): "softmax",
    ("gpt_oss", "experts_per_token"): 4,
    ("gpt_oss", "initial_context_length"): 4096,
    ("qwen2", "use_qk_norm"): False,
    ("qwen3", "use_qk_norm"): True,
    ("qwen3_moe", "qkv_bias"): False,
    ("qwen3_moe", "shared_expert_intermediate_size"): 0,
    ("qwen3_moe", "use_qk_norm"): True,
    ("llama", "use_qk_norm"): False,
}
# Keys of other files that are read, or that change no answer with any value.
_READ = {
    "generation_config.json": re.compile(
        r"_from_model_config|_commit_hash|(bos|eos|pad|decoder_start)_token_id|transformers_version|trust_remote_code"
        r"|cache_implementation|max_length|max_new_tokens|do_sample|use_cache|chat_format|(max_)?window_size"
        r"|output_\w+|return_dict_in_generate"
    ),
    "tokenizer_config.json": re.compile(
        r"chat_template|added_tokens_decoder|(additional|extra)_special_tokens|(bos|eos|unk|pad|cls|sep|mask)_token"
        r"|\w*_token_id|add_(bos|eos)_token|add_prefix_space|legacy|model_max_length|max_length|(padding|truncation)_side"
        r"|truncation(_strategy)?|stride|pad_to_multiple_of|pad_token_type_id|tokenizer_(class|file)|vocab_file|merges_file"
        r"|sp_model_kwargs|use_default_system_prompt|errors|backend|is_local|local_files_only|from_slow|name_or_path"
        r"|special_tokens_map_file|processor_class|model_input_names|model_specific_special_tokens|spaces_between_\w+"
        r"|\w*(image|audio|video|vision|boi|eoi|vlm)\w*"
    ),
}
# Files beside the weights that say that they are quantised, or not all of the model.
_QUANTISED = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object of a model directory; empty if there is no such file. Raises FailedPrecondition."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes(), object_pairs_hook=_once)
    except (ValueError, RecursionError, OSError) as error:
        raise FailedPrecondition(f"can't read {file}: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise FailedPrecondition(f"{file} holds no JSON object")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(key for key in content if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return content


def check_code(directory: Path) -> None:
    """Raises FailedPrecondition if a directory asks for code that is not part of transformers.

    To be called before transformers reads the directory: for some models it asks the terminal whether to run code.
    """
    for name in ("config.json", "tokenizer_config.json"):
        said = read_json(directory / name)
        if said.get("auto_map"):
            raise FailedPrecondition(
                f"{directory / name} names code in its auto_map, and code of a model directory is never run: use a "
                "model that transformers knows, or remove auto_map if its own class computes the same"
            )
        for nested in (said, *(value for value in said.values() if isinstance(value, dict))):
            for key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
                if (value := nested.get(key)) is not None and value not in _ATTENTION:
                    raise FailedPrecondition(
                        f"{directory / name} sets {key} to {_short(value)}, which may be code from a hub: remove it"
                    )


def unused(directory: Path) -> list[str]:
    """Sentences that name the keys of files, other than config.json, that could have an effect and have none here.

    Values that ask for nothing (null, false, 0, 1, empty) are left out.
    """
    warnings = []
    for name, read in _READ.items():
        said = read_json(directory / name)
        asks = (key for key, value in said.items() if value is True or value not in (None, 0, 1, "", [], {}))
        others = [key for key in asks if not read.fullmatch(key)]
        if keys := [f"{key} {_short(said[key])}" for key in others]:
            hint = ": requests say how answers are sampled" if name == "generation_config.json" else ""
            warnings.append(f"{name} of {directory.name} sets {', '.join(keys)}, without effect here{hint}")
    return warnings


def check_whole(directory: Path) -> None:
    """Raises FailedPrecondition for an adapter, or for quantised weights of which config.json does not speak."""
    if adapters := [file.name for file in directory.glob("adapter_*") if file.suffix in (".json", ".safetensors")]:
        raise FailedPrecondition(
            f"{directory} holds an adapter ({min(adapters)}), which is not applied: merge it into the model "
            "(merge_and_unload() of peft) and save that, or remove it to serve the model without it"
        )
    for name in _QUANTISED:
        if (directory / name).is_file() and not _is_quantised(directory):
            raise quantised.refused(directory / name, "in a way that config.json does not say")


def _is_quantised(directory: Path) -> bool:
    return read_json(directory / "config.json").get("quantization_config") is not None


def shards(directory: Path) -> list[Path]:
    """The files of a directory's weights, as transformers chooses them; they may not exist.

    Raises FailedPrecondition for an index that can't be used.
    """
    if not (directory / INDEX).is_file():
        return [directory / SINGLE]
    index = read_json(directory / INDEX)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places or not isinstance(index.get("metadata"), dict):
        raise FailedPrecondition(f"{directory / INDEX} has no weight_map, or no metadata")
    for name in places.values():
        if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            raise FailedPrecondition(f"{directory / INDEX} names a file outside of its directory: {_short(name)}")
    return [directory / name for name in sorted(set(places.values()))]


def weights(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype, as safetensors names it, and the shape of each tensor of a model directory.

    Raises FailedPrecondition if there are no weights in safetensors format; some file, or some tensor of the index,
    is missing; weights beside them would not be loaded; or a tensor is quantised without a word in config.json.
    """
    files = shards(directory)
    _check_files(directory, files)
    tensors = _tensors(directory, files)
    if listed := read_json(directory / INDEX).get("weight_map"):
        if missing := listed.keys() - tensors.keys():
            raise FailedPrecondition(f"{directory / INDEX} lists {min(missing)}, which no file holds")
        if missing := tensors.keys() - listed.keys():
            raise FailedPrecondition(f"{directory / INDEX} does not list the tensor {min(missing)}")
    for name, (dtype, _) in tensors.items():
        if dtype not in ("F64", "F32", "F16", "BF16") and not _is_quantised(directory):
            raise quantised.refused(directory, f"in a way that config.json does not say ({name} is of type {dtype})")
    return tensors


def _check_files(directory: Path, files: Sequence[Path]) -> None:
    """Raises FailedPrecondition unless the files of weights, as `shards` finds them, are all that there are."""
    stored = {file.name for file in directory.glob("*.safetensors") if not file.name.startswith("consolidated")}
    if not stored and not any(file.is_file() for file in files):
        raise FailedPrecondition(
            f"{directory} holds no weights in safetensors format: convert them; pickles are not loaded"
        )
    if lacking := [file.name for file in files if not file.is_file()]:
        raise FailedPrecondition(f"{directory} lacks {lacking[0]}: fetch the model again")
    if extra := stored - {file.name for file in files if file.parent == directory}:
        raise FailedPrecondition(
            f"{directory / min(extra)} is not among the model's weights ({files[0].name}, ...) and would not be "
            f"loaded: remove it, or correct {INDEX}"
        )


def _tensors(directory: Path, files: Sequence[Path]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and the shape of each tensor of the files. Raises FailedPrecondition for a tensor twice."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no dictionary
                    if name in tensors:
                        raise FailedPrecondition(f"{directory} holds the tensor {name} twice")
                    part = opened.get_slice(name)
                    tensors[name] = part.get_dtype(), tuple(part.get_shape())
        except (SafetensorError, OSError, ValueError) as error:
            raise FailedPrecondition(f"can't read {file}: {first_line(error)}") from error
    return tensors


def config_values(directory: Path, families: Collection[str]) -> dict[str, Any]:
    """What config.json says of a model's computation: keyword arguments of AutoConfig.for_model.

    Raises FailedPrecondition if a key is not known and may change what is computed, or a value can't be used.
    """
    file = directory / "config.json"
    if not file.is_file():
        raise FailedPrecondition(f"{directory} holds no config.json: give the directory of a Hugging Face model")
    check_code(directory)
    said = read_json(file)
    for key in ("quantization", "compression_config"):
        if said.get(key) is not None:
            raise quantised.refused(file, f"({key}) in another way than by a quantization_config")
    family = said.get("model_type")
    if not isinstance(family, str) or family not in families:
        supported = ", ".join(sorted(families))
        raise FailedPrecondition(
            f"{file}: model family {_short(family)} is not supported; supported families: {supported}"
        )
    settings = said.pop("quantization_config", None)
    values = _Checked(file, family, said).values()
    return values if settings is None else values | {"quantization_config": quantised.settings(file, settings)}


class _Checked:
    """A config.json of which every key is used, has no effect, or is refused."""

    def __init__(self, file: Path, family: str, said: dict[str, Any]) -> None:
        self._file, self._family, self._said = file, family, said

    def values(self) -> dict[str, Any]:
        from transformers import CONFIG_MAPPING, PreTrainedConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        fields = (
            CONFIG_MAPPING[self._family].__dataclass_fields__.keys() - PreTrainedConfig.__dataclass_fields__.keys()
        )
        # Those of `attribute_map` are other names of fields, such as num_local_experts.
        used = fields - {"output_router_logits", "pad_token_id", "use_cache"}
        used |= {"head_dim", *_OLDER, *CONFIG_MAPPING[self._family].attribute_map.values()}
        used |= _OLDER_GEMMA if self._family == "gemma3_text" else set()
        # transformers' code of the family does not read it.
        used -= {"norm_topk_prob"} if self._family == "deepseek_v2" else set()
        expected = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self._family]
        if self._said.get("architectures") not in (None, [expected]):
            raise self._refused("architectures", f"a model of the family {self._family} is a {expected}")
        for key, value in self._said.items():
            if value is not None and key not in used and not _HARMLESS.fullmatch(key):
                self._check_unused(key, value)
        values = {key: value for key, value in self._said.items() if key in used}
        self._check_values({key: value for key, value in values.items() if value is not None})
        # Without these, transformers takes ids of the family's first model.
        ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        key = "dtype" if self._said.get("dtype") is not None else "torch_dtype"
        dtype = str(self._said.get(key) or "float32").removeprefix("torch.")
        if dtype not in _DTYPES:
            raise self._refused(key, f"use {', '.join(_DTYPES)}")
        return ids | values | {"dtype": dtype, "model_type": self._family}

    def _refused(self, key: str, why: str) -> FailedPrecondition:
        return FailedPrecondition(f"{self._file}: {key} = {_short(self._said[key])}: {why}")

    def _check_unused(self, key: str, value: Any) -> None:
        if key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
            return  # check_code has seen it
        allowed = _SAYS_SO.get(key, ())
        if (self._family, key) in _FAMILY_SAYS_SO:
            allowed = (_FAMILY_SAYS_SO[self._family, key],)
        if key == "qk_head_dim":  # transformers adds the two itself
            allowed = (self._said.get("qk_nope_head_dim", 0) + self._said.get("qk_rope_head_dim", 0),)
        if key == "layer_types" and isinstance(value, list) and set(map(str, value)) == {"full_attention"}:
            return
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise self._refused(
                key, "this key is not supported, and may change what is computed; remove it if it does not"
            )

    def _check_values(self, values: Mapping[str, Any]) -> None:
        from transformers.activations import ACT2FN

        counts = {*_SIZES, "max_position_embeddings", "query_pre_attn_scalar", "sliding_window", *_OLDER_GEMMA}
        if self._family == "qwen2_moe" and not values.get("use_sliding_window") and values.get("sliding_window") == 0:
            counts -= {"sliding_window"}  # as transformers writes that there is none
        for key, value in values.items():
            if key in counts - {"rope_local_base_freq"}:
                self._check(key, value, _is_count, "it has to be a positive integer below 2**31")
            elif key in ("rms_norm_eps", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"):
                self._check(key, value, _is_positive, "it has to be a positive number")
            elif key in ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"):
                self._check(key, value, lambda v: isinstance(v, bool), "it has to be true or false")
            elif key in ("bos_token_id", "eos_token_id"):
                token_ids(value, f"{self._file}: {key}")
            elif key in ("rope_parameters", "rope_scaling"):
                self._check_rope(key, value)
            elif key in ("hidden_act", "hidden_activation"):
                self._check(
                    key, value, lambda v: isinstance(v, str) and v in ACT2FN, "transformers has no such function"
                )
        if {"rope_parameters", "rope_scaling"} <= values.keys():
            raise self._refused("rope_scaling", "rope_parameters says it as well: remove one")
        self._check_shape(values)
        self._check_share("partial_rotary_factor", values.get("partial_rotary_factor", 1))

    def _check(self, key: str, value: Any, right: Callable[[Any], bool], why: str) -> None:
        if not right(value):
            raise self._refused(key, why)

    def _check_shape(self, values: Mapping[str, Any]) -> None:
        heads = values.get("num_attention_heads", 1)
        if heads % values.get("num_key_value_heads", heads):
            raise self._refused("num_key_value_heads", f"it does not divide {heads} attention heads")
        if "head_dim" not in values and values.get("hidden_size", heads) % heads:
            raise self._refused("hidden_size", f"it can't be divided by {heads} attention heads")
        dim = values.get("head_dim", 0)
        if values.get("qk_rope_head_dim", dim) != dim and dim:
            raise self._refused("head_dim", "it has to be qk_rope_head_dim, which transformers takes for it")
        count = values.get("num_hidden_layers")
        unturned = values.get("no_rope_layers")
        if unturned is not None and not (isinstance(unturned, list) and len(unturned) == (count or 0)):
            raise self._refused("no_rope_layers", f"it has to be a number for each of {count} layers")
        layers = values.get("layer_types")
        if layers is not None and (
            not isinstance(layers, list)
            or len(layers) != values.get("num_hidden_layers", len(layers))
            or not all(each in ("full_attention", "sliding_attention") for each in layers)
        ):
            raise self._refused("layer_types", "it has to be full_attention or sliding_attention for each layer")

    def _check_share(self, key: str, share: Any) -> None:
        if share != 1 and (self._family not in _PARTIAL or share > 1):
            raise self._refused(key, f"a model of the family {self._family} can't rotate a part of the channels")

    def _check_rope(self, key: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise self._refused(key, "it has to be an object")
        nested = [each for name, each in value.items() if name.endswith("_attention")]
        for rope in [each or {} for each in nested] or [value]:
            if not isinstance(rope, dict):
                raise self._refused(key, "it has to be an object")
            kind = rope.get("rope_type", rope.get("type", "default"))
            said = {name: each for name, each in rope.items() if each is not None}
            if rope.get("type", kind) != kind or (kind in _ROPE_KEYS and said.keys() - _ROPE_KEYS[kind]):
                raise self._refused(key, f"RoPE of type {kind} does not use all of it")
            for name in said.keys() - {"rope_type", "type", "truncate", "finetuned"}:
                lists = name in ("short_factor", "long_factor") and isinstance(said[name], list)
                if not all(map(_is_positive, said[name] if lists else [said[name]])):
                    raise self._refused(key, "its values have to be positive numbers")
            self._check_share(key, said.get("partial_rotary_factor", 1))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def check_sizes(values: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]], file: Path) -> None:
    """Raises FailedPrecondition for sizes that the tensors can't have, before memory is allocated for them."""
    widest = max((side for _, shape in tensors.values() for side in shape), default=0)
    for key in _SIZES:
        if (values.get(key) or 0) > (len(tensors) if key == "num_hidden_layers" else widest):
            raise FailedPrecondition(
                f"{file}: {key} = {values[key]}: the weights are {len(tensors)} tensors with sides up to {widest}"
            )


def token_ids(value: Any, what: str) -> frozenset[int]:
    """Token ids that are given as one, as a list, or as None. Raises FailedPrecondition, which begins with `what`."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(each) is int and 0 <= each < 1 << 31 for each in ids):
        raise FailedPrecondition(f"{what} = {_short(value)}: it has to be token ids")
    return frozenset(ids)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 100 else f"{text[:100]}..."
