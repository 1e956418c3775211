"""The selectors: the scores by which each published method chooses the tokens that it recomputes."""

from dataclasses import dataclass

import torch

from fusionkv.fusion_worker.compute.batch import States
from fusionkv.fusion_worker.select.base import (
    ALL_LAYERS,
    CachedAttention,
    ChunkPlaces,
    FreshLayer,
    Nothing,
    SecondModel,
    Selector,
)
from fusionkv.fusion_worker.tensor_parallel.ranks import ALONE, Ranks
from fusionkv.kernels.attention_scores import attention_scores
from fusionkv.kernels.gpu.segment_table import Spans
from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segments import KVSegment, QuerySpan
from fusionkv.kernels.sparse_attention import sparse_attention


@dataclass(frozen=True, slots=True)
class DistanceToStart(Selector[ChunkPlaces]):
    """Tokens at the start of a chunk first, because they act as attention sinks (EPIC, LegoLink)."""

    needs = Nothing()

    def scores(self, inputs: ChunkPlaces) -> torch.Tensor:
        """The negated distance of a token to its chunk's start, in tokens; -inf outside chunks."""
        scores = torch.full((inputs.length,), float("-inf"))
        for start, stop in zip(inputs.starts, inputs.stops, strict=True):
            scores[start:stop] = -torch.arange(stop - start, dtype=torch.float32)
        return scores


@dataclass(frozen=True, slots=True)
class QuestionAttention(Selector[torch.Tensor]):
    """Attention of the question's rows into each token over reused KV, summed over rows and heads.

    Attributes:
        needs: The layers: all, the sum of which orders tokens like the mean (ProphetKV 4.3, eq. 7), the last one
            (FusionRAG 3.2), or others.
    """

    needs: CachedAttention = ALL_LAYERS

    def scores(self, inputs: torch.Tensor) -> torch.Tensor:
        """The attention, unchanged."""
        return inputs


@dataclass(frozen=True, slots=True)
class AuxiliaryAttention(Selector[torch.Tensor]):
    """Last-layer attention of the question into each token in a small auxiliary model (CacheClip 3.3)."""

    needs = SecondModel()

    def scores(self, inputs: torch.Tensor) -> torch.Tensor:
        """The attention, unchanged."""
        return inputs


@dataclass(frozen=True, slots=True)
class FreshStates:
    """Rows at layer 1 under full attention: every stale token, then the question; for comparison with cached states.

    Keys and values of layer 0 depend only on the token, so cached ones are correct there. After layer 0 a token has
    seen the whole prompt, so its query, key and value at layer 1 are fresh and can be compared with the cached ones.
    Tensors hold this rank's heads. `placed` and `attention` are all-reduced, so all ranks must call them in the same
    order.

    Attributes:
        states: The inputs of layer 1's attention: q [rows, q_heads, head_dim], k and v [rows, kv_heads, head_dim].
        kv: [2, slots, kv_heads, head_dim], layer 1 of the pool, stale.
        span: The rows and all keys that they see in layer 0.
        starts: int64, ascending: first position of the context, of every chunk after the first, and of the question.
    """

    states: States
    kv: torch.Tensor
    span: QuerySpan
    rotation: Rotation
    starts: torch.Tensor
    ranks: Ranks = ALONE

    @property
    def stale(self) -> int:
        """Number of rows of stale tokens; the other rows are the question's."""
        return int((self.span.positions < self.starts[-1]).sum())

    def values_away(self) -> torch.Tensor:
        """float32 [stale tokens, kv_heads, head_dim]: fresh minus cached values."""
        rows = self.span.positions[: self.stale]
        cached = self.kv[1].index_select(0, self.span.in_order(self.rotation).slots[rows])
        return self.states.v[: self.stale].float() - cached.float()

    def keys(self) -> torch.Tensor:
        """[positions, kv_heads, head_dim]: rotated keys in prompt order; fresh where a row has one, else cached."""
        slots, cos, sin = self.span.in_order(self.rotation)
        cached = self.kv[0].index_select(0, slots).transpose(0, 1)
        keys = self.rotation.apply(cached, cos, sin).transpose(0, 1).contiguous()
        return keys.index_copy_(0, self.span.positions, self.states.k.to(keys.dtype))

    def over(self, keys: torch.Tensor, first_row: int = 0) -> QuerySpan:
        """The span of the rows from `first_row` on, over `keys` as `keys()` returns them."""
        positions = self.span.positions[first_row:]
        return QuerySpan(0, len(positions), positions, (KVSegment(0, len(keys), 0),))

    def attention(self, first_row: int = 0) -> torch.Tensor:
        """float32 [positions]: attention of rows from `first_row` into each position, summed over rows and heads."""
        states, keys = self.states, self.keys()
        over = self.over(keys, first_row)
        q = states.q[first_row:]
        return self.ranks.total(attention_scores(q, keys, over, self.rotation, states.scale, states.window))

    def placed(self, each: torch.Tensor) -> torch.Tensor:
        """float32 [positions]: a number for each stale token at its position, all-reduced over ranks; 0 elsewhere.

        each: float32 [stale tokens], summed over this rank's heads.
        """
        positions = self.span.positions
        out = torch.zeros(int(positions[-1]) + 1, device=positions.device)
        out[positions[: len(each)]] = each
        return self.ranks.total(out)


@dataclass(frozen=True, slots=True)
class ValueDeviation(Selector[FreshStates]):
    """Squared L2 distance of a token's fresh value to its cached one, at layer 1 (CacheBlend; FusionRAG 2.2.2)."""

    needs = FreshLayer()

    def scores(self, inputs: FreshStates) -> torch.Tensor:
        """The distance summed over heads and channels."""
        return inputs.placed(inputs.values_away().square().sum((1, 2)))


@dataclass(frozen=True, slots=True)
class AttendedDeviation(Selector[FreshStates]):
    """L1 distance of fresh to cached values, times all attention into the token, at layer 1.

    Sources: KVShare; ProphetKV app. C.
    """

    needs = FreshLayer()

    def scores(self, inputs: FreshStates) -> torch.Tensor:
        """Distance summed over heads and channels, times attention summed over all rows and heads."""
        return inputs.placed(inputs.values_away().abs().sum((1, 2))) * inputs.attention()


@dataclass(frozen=True, slots=True)
class ShallowQuestionAttention(Selector[FreshStates]):
    """Attention of the question's rows into each token, from fresh states at layer 1 (A3, eq. 3)."""

    needs = FreshLayer()

    def scores(self, inputs: FreshStates) -> torch.Tensor:
        """The attention summed over the question's rows and heads."""
        return inputs.attention(first_row=inputs.stale)


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
