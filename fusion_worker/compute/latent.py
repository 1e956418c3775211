"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1) over the latents themselves.

The model's own code expands a token's latent to a key and a value for each head: 5,120 numbers in DeepSeek-V2-Lite,
where latent and rotary key are 576. But a query's product with a head's key, `[w_key @ latent, rotary key]`, is that
of `[rotary query, query @ w_key]` with `[rotary key, latent]`: attention with one KV head, whose values are the
latents. For many rows that takes 3.6 times the products of the expanded form.
"""

from typing import Any

import torch


class Latent:
    """Takes the place of an attention module's `expand_kv`.

    A token's key is `[rotary key, latent]`, and its value is the same row, of which `output` drops the rotary part:
    so it is kept once, and kernels see heads of one size.
    """

    @torch.inference_mode()
    def __init__(self, attention: Any) -> None:
        """attention: a DeepseekV2Attention."""
        rank, self._nope = attention.kv_lora_rank, attention.qk_nope_head_dim
        norm = attention.kv_a_layernorm.weight
        # A product with the identity gives the weights of any kind of linear layer, packed and quantised ones too.
        expanded = attention.kv_b_proj(torch.eye(rank, dtype=norm.dtype, device=norm.device))
        by_head = expanded.unflatten(1, (-1, self._nope + attention.v_head_dim)).transpose(0, 1)
        self._rank = rank
        self._keys = by_head[..., : self._nope].transpose(1, 2).contiguous()  # [q_heads, nope, rank]
        self._values = by_head[..., self._nope :].contiguous()  # [q_heads, rank, v_head_dim]

    def __call__(self, latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value [1, 1, rows, head_dim] of latents [1, 1, rows, rank] and rotary keys [1, 1, rows, rotary]."""
        row = torch.cat([rotary, latent], -1)
        return row, row

    def query(self, query: torch.Tensor) -> torch.Tensor:
        """Queries [q_heads, rows, head_dim] of the model's own, [q_heads, rows, nope + rotary]."""
        plain, rotary = query[..., : self._nope], query[..., self._nope :]
        return torch.cat([rotary, plain @ self._keys], -1)

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """The model's own output [rows, q_heads, v_head_dim] of attended rows [rows, q_heads, head_dim]."""
        return (attended[..., -self._rank :].transpose(0, 1) @ self._values).transpose(0, 1)


def install(network: Any) -> None:
    """Makes a network's attention modules compute over latents, where they have any and do not yet."""
    for layer in network.model.layers:
        if hasattr(layer.self_attn, "kv_lora_rank") and "expand_kv" not in vars(layer.self_attn):
            layer.self_attn.expand_kv = Latent(layer.self_attn)
