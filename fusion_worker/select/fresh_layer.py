"""Selectors by the states of stale tokens at layer 1 under full attention (CacheBlend, KVShare, Cache-Craft, A3).

Keys and values of layer 0 depend only on the token, so cached ones are correct there. After layer 0 a token has seen
the whole prompt, so its query, key and value at layer 1 are fresh and can be compared with the cached ones.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fusionkv.fusion_worker.select.base import scores
from fusionkv.kernels.attention import attention_scores, sparse_attention
from fusionkv.kernels.segments import KVSegment, QuerySpan, Spans
from fusionkv.protos.contract.selectors import (
    AttendedDeviation,
    InterChunkAttention,
    ShallowQuestionAttention,
    ValueDeviation,
)

if TYPE_CHECKING:  # they load transformers, which a table of recipes does not need
    from fusionkv.fusion_worker.compute.model_runner import States
    from fusionkv.fusion_worker.models import Ranks


@dataclass(frozen=True, slots=True)
class FreshStates:
    """Rows at layer 1: every stale token, then the question.

    Tensors hold this rank's heads. `placed` and `attention` are all-reduced, so all ranks must call them in the same
    order.

    Attributes:
        states: The inputs of layer 1's attention: q [rows, q_heads, head_dim], k and v [rows, kv_heads, head_dim].
        kv: [tensors, slots, kv_heads, head_dim], layer 1 of the pool, stale.
        span: The rows and all keys that they see in layer 0.
        starts: int64, ascending: first position of the context, of every chunk after the first, and of the question.
        ranks: The tensor-parallel ranks.
    """

    states: "States"
    kv: torch.Tensor
    span: QuerySpan
    starts: torch.Tensor
    ranks: "Ranks"

    @property
    def stale(self) -> int:
        """Number of rows of stale tokens; the other rows are the question's."""
        return int((self.span.positions < self.starts[-1]).sum())

    def values_away(self) -> torch.Tensor:
        """float32 [stale tokens, kv_heads, channels]: fresh minus cached values."""
        device, stale = self.kv.device, self.stale
        rows = self.span.positions_on(device)[:stale]
        rotation = self.states.spec.rotation
        cached = self.kv[-1].index_select(0, self.span.in_order(rotation, device).slots[rows])
        # Of latents, the first channels are the rotary key.
        first = rotation.rotary_dim if len(self.kv) == 1 else 0
        return (self.states.v[:stale].float() - cached.float())[..., first:]

    def keys(self) -> torch.Tensor:
        """[positions, kv_heads, head_dim]: rotated keys in prompt order; fresh where a row has one, else cached."""
        keys = self.span.in_order(self.states.spec.rotation, self.kv.device).keys(self.kv[0])
        return keys.index_copy_(0, self.span.positions_on(keys.device), self.states.k.to(keys.dtype))

    def over(self, keys: torch.Tensor, first_row: int = 0) -> QuerySpan:
        """The span of the rows from `first_row` on, over `keys` as `keys()` returns them."""
        positions = self.span.positions[first_row:]
        return QuerySpan(0, len(positions), positions, (KVSegment(0, len(keys), 0),))

    def attention(self, first_row: int = 0) -> torch.Tensor:
        """float32 [positions]: attention of rows from `first_row` into each position, summed over rows and heads."""
        keys = self.keys()
        over = self.over(keys, first_row)
        return self.ranks.total(attention_scores(self.states.q[first_row:], keys, over, self.states.spec))

    def placed(self, each: torch.Tensor) -> torch.Tensor:
        """Puts a number for each stale token at its position, and all-reduces over ranks.

        each: float32 [stale tokens], summed over this rank's heads. Returns float32 [positions]; 0 where there is no
        stale token.
        """
        out = torch.zeros(int(self.span.positions[-1]) + 1, device=each.device)
        out[self.span.positions_on(each.device)[: len(each)]] = each
        return self.ranks.total(out)


@scores.register
def value_deviation(selector: ValueDeviation, inputs: FreshStates) -> torch.Tensor:
    """The distance summed over heads and channels."""
    return inputs.placed(inputs.values_away().square().sum((1, 2)))


@scores.register
def attended_deviation(selector: AttendedDeviation, inputs: FreshStates) -> torch.Tensor:
    """Distance summed over heads and channels, times attention summed over all rows and heads."""
    return inputs.placed(inputs.values_away().abs().sum((1, 2))) * inputs.attention()


@scores.register
def shallow_question_attention(selector: ShallowQuestionAttention, inputs: FreshStates) -> torch.Tensor:
    """The attention summed over the question's rows and heads."""
    return inputs.attention(first_row=inputs.stale)


@scores.register
def inter_chunk_attention(selector: InterChunkAttention, inputs: FreshStates) -> torch.Tensor:
    """The attention summed over heads: 0 to q_heads."""
    return inputs.placed(_to_other_chunks(inputs)[: inputs.stale])


def _to_other_chunks(inputs: FreshStates) -> torch.Tensor:
    """float32 [rows]: attention to chunks other than the row's own, summed over this rank's heads.

    The values of an attention pass are one-hot vectors of a key's chunk, so the output is the attention by chunk.
    """
    states, starts, keys = inputs.states, inputs.starts, inputs.keys()
    over = Spans([inputs.over(keys)])
    # 0 is the system prompt, followed by one number for each chunk.
    chunk = torch.bucketize(torch.arange(len(keys), device=keys.device), starts.to(keys.device), right=True)
    row_chunks = chunk[inputs.span.positions_on(keys.device)]
    received = torch.zeros(inputs.span.rows, device=keys.device)
    channels = keys.shape[2]
    for first in range(1, len(starts), channels):
        member = chunk[:, None] == torch.arange(first, first + channels, device=keys.device)
        values = member.to(keys.dtype)[:, None].expand(-1, keys.shape[1], -1).contiguous()
        out = sparse_attention(states.q, keys, values, over, states.spec)
        mass = out.float().sum(1)
        inside = (row_chunks >= first) & (row_chunks < first + channels)
        mass[inside, row_chunks[inside] - first] = 0.0
        received += mass[:, : max(0, len(starts) - first)].sum(1)
    return received
