"""The network of the reference models, and its attention during training."""

from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

TRAINING_ATTENTION = "fusionkv_training"
_ROWS = 64  # rows of a block of attention in training


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Explicit matmul and softmax: on a CPU twice as fast in training as masked SDPA.

    query is [batch, head, token, head_dim]; key and value are [batch, kv_head, token, head_dim]. The additive mask
    [batch, 1, token, token] must be causal. The query heads of a KV head are folded into rows, and blocks of rows
    skip the tokens after them, which is 1.6 times less work.
    """
    batch, heads, tokens, width = query.shape
    kv_heads = key.shape[1]
    query = (query * scaling).view(batch, kv_heads, heads // kv_heads, tokens, width)
    outs = []
    for start in range(0, tokens, _ROWS):
        end = min(start + _ROWS, tokens)
        folded = query[:, :, :, start:end].reshape(batch, kv_heads, -1, width)
        scores = (folded @ key[:, :, :end].transpose(-1, -2)).view(batch, kv_heads, -1, end - start, end)
        weights = scores.add_(attention_mask[:, :, None, start:end, :end]).softmax(-1).to(value.dtype)
        out = weights.view(batch, kv_heads, -1, end) @ value[:, :, :end]
        outs.append(out.view(batch, heads, end - start, width))
    return torch.cat(outs, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(TRAINING_ATTENTION, _attention)
AttentionMaskInterface.register(TRAINING_ATTENTION, sdpa_mask)


def new_network(tokenizer: PreTrainedTokenizerFast, base: str = "") -> Qwen2ForCausalLM:
    """A network of about a million parameters for training, random or from a shipped model (`base`).

    Embeddings of tokens that the shipped model lacks start near the mean of its embeddings.
    """
    if base:
        model = Qwen2ForCausalLM.from_pretrained(Path(__file__).parent / base, dtype=torch.float32)
        model.resize_token_embeddings(len(tokenizer))
        model.set_attn_implementation(TRAINING_ATTENTION)
        return model.train()
    return _random(tokenizer, hidden_size=128, intermediate_size=384, num_hidden_layers=5)


def small_network(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """A random network of a quarter of a million parameters, for CacheClip's auxiliary model."""
    return _random(tokenizer, hidden_size=64, intermediate_size=192, num_hidden_layers=4)


def _random(tokenizer: PreTrainedTokenizerFast, **sizes: Any) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        **sizes,
        vocab_size=len(tokenizer),
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.set_attn_implementation(TRAINING_ATTENTION)
    return model
