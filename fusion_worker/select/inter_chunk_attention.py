"""Selects tokens by their own attention to other chunks at layer 1 (Cache-Craft)."""

from dataclasses import dataclass

import torch

from fusionkv.fusion_worker.select.base import FreshLayer, Selector
from fusionkv.fusion_worker.select.fresh_states import FreshStates
from fusionkv.kernels.segments import Spans
from fusionkv.kernels.sparse_attention import sparse_attention


@dataclass(frozen=True, slots=True)
class InterChunkAttention(Selector[FreshStates]):
    """A token's attention to the chunks before its own, from fresh states at layer 1 (Cache-Craft).

    The papers give the criterion but no layer; layer 1 is the only one with fresh states of every token.
    """

    needs = FreshLayer()

    def scores(self, inputs: FreshStates) -> torch.Tensor:
        """The attention summed over heads: 0 to q_heads."""
        return inputs.placed(_to_other_chunks(inputs)[: inputs.stale])


def _to_other_chunks(inputs: FreshStates) -> torch.Tensor:
    """float32 [rows]: attention to chunks other than the row's own, summed over this rank's heads.

    The values of an attention pass are one-hot vectors of a key's chunk, so the output is the attention by chunk.
    """
    states, starts, keys = inputs.states, inputs.starts, inputs.keys()
    over = Spans([inputs.over(keys)])
    # 0 is the system prompt, followed by one number for each chunk.
    chunk = torch.bucketize(torch.arange(len(keys), device=keys.device), starts, right=True)
    own = chunk[inputs.span.positions]
    found = torch.zeros(inputs.span.rows, device=keys.device)
    channels = keys.shape[2]
    for first in range(1, len(starts), channels):
        member = chunk[:, None] == torch.arange(first, first + channels, device=keys.device)
        values = member.to(keys.dtype)[:, None].expand(-1, keys.shape[1], -1).contiguous()
        out = sparse_attention(states.q, keys, values, over, inputs.rotation, states.scale, states.window)
        mass = out.float().sum(1)
        inside = (own >= first) & (own < first + channels)
        mass[inside, own[inside] - first] = 0.0
        found += mass[:, : max(0, len(starts) - first)].sum(1)
    return found
