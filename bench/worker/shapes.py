"""Models with random weights, which do not affect speed, in the shapes of real ones."""

from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from fusionkv.fusion_worker import models


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a Qwen2 model."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False  # whether the embeddings are also the output layer


SHAPES = {
    "shape": ModelShape("qwen2.5-0.5b-shape", 24, 896, 4864, 14, 2, 151936, tied=True),
    "shape-7b": ModelShape("qwen2-7b", 28, 3584, 18944, 28, 4, 152064),
}


def build(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> models.Model:
    """A model with random weights, created on its device."""
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=shape.tied,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        network: Any = Qwen2ForCausalLM(config)
    network = network.to(dtype=dtype).to_empty(device=device)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for module in network.modules():
        if module.__class__.__name__.endswith("RMSNorm"):
            torch.nn.init.ones_(module.weight)
    network.tie_weights()
    # Buffers are uninitialised after `to_empty`: create them again.
    network.model.rotary_emb = type(network.model.rotary_emb)(config).to(device)
    words = Tokenizer(WordLevel({str(i): i for i in range(1000)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    return models.wrap(shape.name, network.eval(), tokenizer, b"\0" * 32, config.max_position_embeddings)
