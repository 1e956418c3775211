"""A transformers configuration from a GGUF file's metadata; each key is used, has no effect here, or is refused."""

import math
import re
from typing import Any

import numpy as np

from fusionkv.fusion_worker.library.gguf_file import GgufModel
from fusionkv.protos.runtime.errors import FailedPrecondition

# Architecture of a GGUF file -> model_type of transformers. Llama's covers Mistral's.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
ROPE_FACTORS = "rope_freqs.weight"
# Keys that tell where a file comes from, or that only llama.cpp needs.
_HARMLESS = re.compile(r"(general|quantize\.imatrix|mradermacher)\..*|\w+\.rope\.scaling\.finetuned")
_ELSEWHERE = ("general.", "tokenizer.")  # architecture_of and gguf_tokenizer account for these
# Keys of the architecture that are accepted with values that change nothing.
_ZERO = (
    *("attention.clamp_kqv", "attention.max_alibi_bias", "attention.shared_kv_layers", "attn_logit_softcapping"),
    *("expert_count", "expert_shared_count", "expert_used_count", "final_logit_softcapping", "nextn_predict_layers"),
    *("leading_dense_block_count", "pooling_type", "rope.scaling.yarn_log_multiplier"),
)
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ZERO, (0,)),
    **dict.fromkeys(("embedding_scale", "logit_scale", "residual_scale"), (1,)),
    "attention.causal": (True,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
# llama.cpp scales Gemma 3 27B, known by its layers, by the hidden size, and other sizes by the head's.
_GEMMA_27B_LAYERS = 62


class Keys:
    """Metadata of which every key is taken once, or refused at the end.

    All methods raise FailedPrecondition, with the key and its value, for values of other types or that can't be used.
    """

    def __init__(self, metadata: dict[str, Any], prefix: str) -> None:
        self._metadata, self._prefix, self._taken = metadata, prefix, set[str]()

    def get(self, key: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
        """A value of one of some types; `default` if there is none. Without default, the key has to be there."""
        name = self._prefix + key
        self._taken.add(name)
        if name not in self._metadata:
            if default is None:
                raise FailedPrecondition(f"it lacks {name}")
            return default
        value = self._metadata[name]
        # To Python, True is an integer.
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise self.refused(key, "a value of this type can't be used")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value: int = self.get(key, int, default)
        if value < 1:
            raise self.refused(key, "it has to be positive")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = float(self.get(key, (int, float), default))
        if not math.isfinite(value):
            raise self.refused(key, "it has to be finite")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Takes a key that is missing or has one of these values, up to the rounding of float32."""
        name = self._prefix + key
        self._taken.add(name)
        if name in self._metadata and not any(_same(self._metadata[name], each) for each in allowed):
            raise self.refused(key, f"only {' or '.join(map(repr, allowed))} is supported")

    def refused(self, key: str, why: str) -> FailedPrecondition:
        value = repr(self._metadata.get(self._prefix + key))
        return FailedPrecondition(
            f"{self._prefix}{key} = {value if len(value) < 100 else value[:100] + '...'}: {why}"
        )

    def finish(self, harmless: re.Pattern[str]) -> None:
        """Raises FailedPrecondition for a key that was not taken, and that is not known to be harmless."""
        for name in self._metadata:
            if name.startswith(self._prefix) and name not in self._taken and not harmless.fullmatch(name):
                raise self.refused(
                    name.removeprefix(self._prefix), "this key is not supported, and may change what is computed"
                )


def _same(value: Any, allowed: Any) -> bool:
    if isinstance(allowed, str | bool) or isinstance(value, str | bool) or not isinstance(value, int | float):
        return type(value) is type(allowed) and bool(value == allowed)
    return math.isclose(value, allowed, rel_tol=1e-6)


def architecture_of(model: GgufModel) -> str:
    """The architecture of a file. Raises FailedPrecondition if it is not supported, or is no language model."""
    keys = Keys(model.metadata, "general.")
    keys.only("type", "model")
    # Older versions laid blocks out differently.
    keys.only("quantization_version", 2)
    architecture: str = keys.get("architecture", str)
    if architecture not in ARCHITECTURES:
        raise keys.refused("architecture", f"supported architectures are {', '.join(sorted(ARCHITECTURES))}")
    return architecture


def config_of(model: GgufModel) -> Any:
    """The configuration. Raises FailedPrecondition if the file says something that it can't express."""
    from transformers import AutoConfig

    architecture = architecture_of(model)
    keys = Keys(model.metadata, f"{architecture}.")
    tensors = model.tensors
    if "token_embd.weight" not in tensors:
        raise FailedPrecondition("it lacks the tensor token_embd.weight")
    rows = tensors["token_embd.weight"].shape[0]
    keys.only("vocab_size", rows)
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", hidden // heads)
    keys.only("attention.value_length", head_dim)
    keys.only("rope.dimension_count", head_dim)
    context, layers = keys.count("context_length"), keys.count("block_count")
    # A configuration of a billion layers has to be refused before its model is built.
    if layers * 2 > len(tensors):
        raise keys.refused("block_count", f"the file has only {len(tensors)} tensors")
    for key, allowed in _WITHOUT_EFFECT.items():
        keys.only(key, *allowed)
    rope = _rope(keys, model, head_dim, context)
    config: dict[str, Any] = {
        "vocab_size": rows,
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "bfloat16",
    }
    if architecture == "gemma3":
        config |= _gemma(keys, config)
    else:
        keys.only("attention.scale", head_dim**-0.5)
        if 0 < keys.get("attention.sliding_window", int, 0) < context:
            raise keys.refused("attention.sliding_window", f"an architecture {architecture} with it is not supported")
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    keys.finish(_HARMLESS)
    others = {
        key: value for key, value in model.metadata.items() if not key.startswith((*_ELSEWHERE, f"{architecture}."))
    }
    Keys(others, "").finish(_HARMLESS)
    return AutoConfig.for_model(ARCHITECTURES[architecture], **config)


def _gemma(keys: Keys, config: dict[str, Any]) -> dict[str, Any]:
    """What only Gemma 3 has: layers with a window, which have a RoPE of their own, and a scale of attention."""
    layers = config["num_hidden_layers"]
    width = config["hidden_size"] // config["num_attention_heads"]
    usual = width if layers == _GEMMA_27B_LAYERS else config["head_dim"]
    scale = keys.number("attention.scale", usual**-0.5)
    scalar = round(scale**-2) if scale > 0 else 0
    if not _same(scale, max(1, scalar) ** -0.5):
        raise keys.refused("attention.scale", "it is not the inverse root of an integer")
    period = keys.get("attention.sliding_window_pattern", (int, np.ndarray), 6)
    if isinstance(period, int):
        windowed = [period > 0 and bool((layer + 1) % period) for layer in range(layers)]
    else:
        windowed = [bool(value) for value in period]
    if len(windowed) != layers:
        raise keys.refused("attention.sliding_window_pattern", f"the model has {layers} layers")
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)}
    return {
        "query_pre_attn_scalar": scalar,
        "sliding_window": keys.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
        "attention_bias": False,
    }


def _rope(keys: Keys, model: GgufModel, head_dim: int, context: int) -> dict[str, Any]:
    """RoPE as llama.cpp reads it: a factor without a type is linear, and a factor of 0 is none."""
    theta = keys.number("rope.freq_base", 10000.0)
    kind = keys.get("rope.scaling.type", str, "linear")
    legacy = keys.number("rope.scale_linear", 0.0)
    factor = keys.number("rope.scaling.factor", legacy) or 1.0
    original = keys.count("rope.scaling.original_context_length", context)
    if theta <= 0:
        raise keys.refused("rope.freq_base", "it has to be positive")
    if factor <= 0 or (kind == "yarn" and factor < 1):
        raise keys.refused("rope.scaling.factor", "it can't be used")
    if kind == "yarn":
        keys.only("rope.scaling.yarn_ext_factor", 1)
        attention = keys.number("rope.scaling.attn_factor", 1.0) * keys.number("rope.scaling.yarn_attn_factor", 1.0)
        rope = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": attention * (1 + 0.1 * math.log(factor)),
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    elif kind in ("linear", "none"):
        for key in ("attn_factor", "yarn_attn_factor"):
            keys.only(f"rope.scaling.{key}", 1)
        keys.only("rope.scaling.yarn_ext_factor", 0)
        scaled = kind == "linear" and factor != 1
        rope = {"rope_type": "linear", "factor": factor} if scaled else {"rope_type": "default"}
    else:
        raise keys.refused("rope.scaling.type", "only none, linear and yarn are supported")
    if ROPE_FACTORS in model.tensors:
        factors = model.tensors[ROPE_FACTORS]
        if factors.kind != 0 or factors.shape != (head_dim // 2,):
            raise FailedPrecondition(f"{ROPE_FACTORS} is not a vector of {head_dim // 2} numbers in float32")
        if rope["rope_type"] != "default":
            raise keys.refused("rope.scaling.type", f"it can't be combined with {ROPE_FACTORS}")
        rope = _divided(factors.data.view("<f4"), context)
    return rope | {"rope_theta": theta}


def _divided(factors: np.ndarray, context: int) -> dict[str, Any]:
    """RoPE with its frequencies divided by factors, as Llama 3 has it in a GGUF file.

    That is the longrope of transformers with the same factors for short and long prompts.
    """
    if not (np.isfinite(factors).all() and factors.min() > 0):
        raise FailedPrecondition(f"{ROPE_FACTORS} = {factors.tolist()}: factors have to be positive")
    if (factors == 1).all():
        return {"rope_type": "default"}
    divided = {"short_factor": factors.tolist(), "long_factor": factors.tolist()}
    whole = {"factor": 1.0, "attention_factor": 1.0, "original_max_position_embeddings": context}
    return {"rope_type": "longrope"} | divided | whole
