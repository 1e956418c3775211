"""The states of stale tokens at layer 1 as full attention gives them, to be held against the cache's.

Layer 0's keys and values depend on a token alone, so the cache's are right there; behind layer 0 a token has seen the
whole prompt, and at layer 1 its fresh query, key and value can be held against the cache.
"""

from dataclasses import dataclass

import torch

from fusionkv.fusion_worker.compute.batch import States
from fusionkv.fusion_worker.tensor_parallel.ranks import ALONE, Ranks
from fusionkv.kernels.attention_scores import attention_scores
from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segments import KVSegment, QuerySpan


@dataclass(frozen=True, slots=True)
class FreshStates:
    """Rows at layer 1: every stale token, then the question.

    Tensors hold the heads of this rank. What `placed` and `attention` return is of all ranks' heads, so every rank
    has to call them, in the same order.

    Attributes:
        states: What layer 1's attention was given: q [rows, q_heads, head_dim], k and v [rows, kv_heads, head_dim].
        kv: [2, slots, kv_heads, head_dim], layer 1 of the pool, stale.
        span: The rows and all keys that they see in layer 0.
        rotation: Layer 1's.
        starts: int64, ascending: first position of the context, of every chunk after the first, and of the question.
        ranks: Who has the other heads.
    """

    states: States
    kv: torch.Tensor
    span: QuerySpan
    rotation: Rotation
    starts: torch.Tensor
    ranks: Ranks = ALONE

    @property
    def stale(self) -> int:
        """How many rows are stale tokens; the others are the question's."""
        return int((self.span.positions < self.starts[-1]).sum())

    def values_away(self) -> torch.Tensor:
        """float32 [stale tokens, kv_heads, head_dim]: fresh values less the cache's."""
        rows = self.span.positions[: self.stale]
        cached = self.kv[1].index_select(0, self.span.in_order(self.rotation).slots[rows])
        return self.states.v[: self.stale].float() - cached.float()

    def keys(self) -> torch.Tensor:
        """[positions, kv_heads, head_dim] in prompt order, turned to their place: fresh where a row has one, else the
        cache's.
        """
        slots, cos, sin = self.span.in_order(self.rotation)
        cached = self.kv[0].index_select(0, slots).transpose(0, 1)
        keys = self.rotation.apply(cached, cos, sin).transpose(0, 1).contiguous()
        return keys.index_copy_(0, self.span.positions, self.states.k.to(keys.dtype))

    def over(self, keys: torch.Tensor, first_row: int = 0) -> QuerySpan:
        """The rows from `first_row` on, over `keys` as `keys()` gives them."""
        positions = self.span.positions[first_row:]
        return QuerySpan(0, len(positions), positions, (KVSegment(0, len(keys), 0),))

    def attention(self, first_row: int = 0) -> torch.Tensor:
        """float32 [positions]: attention of the rows from `first_row` on into each position, summed over rows and
        heads.
        """
        states, keys = self.states, self.keys()
        over = self.over(keys, first_row)
        q = states.q[first_row:]
        return self.ranks.total(attention_scores(q, keys, over, self.rotation, states.scale, states.window))

    def placed(self, each: torch.Tensor) -> torch.Tensor:
        """float32 [positions]: a number for each stale token, summed over this rank's heads, put at its position and
        summed over ranks; 0 elsewhere.

        Args:
            each: float32 [stale tokens].
        """
        positions = self.span.positions
        out = torch.zeros(int(positions[-1]) + 1, device=positions.device)
        out[positions[: len(each)]] = each
        return self.ranks.total(out)
