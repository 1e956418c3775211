"""The inputs of attention: runs of pool slots with their positions, and the query rows that read them."""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fusionkv.kernels.rope import Rotation


@dataclass(frozen=True, slots=True)
class KVSegment:
    """Pool slots `[start, start + length)` whose keys share one rotation. Not written to while it is shared.

    start, length: in slots (tokens).
    first: position of the first slot in the prompt; slot i has position `first + i` unless `positions` is given.
    shift: `first` minus the position for which the keys were written; 0 for keys at their original position.
    positions: int64 [length], ascending, for slots whose positions in the prompt are not consecutive.
    hidden: bool [length]; True for a stale slot whose token is recomputed in another slot: no row attends to it. A
        segment has `positions` (fresh keys) or `hidden` (stale keys), not both.
    """

    start: int
    length: int
    first: int
    shift: int = 0
    positions: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def last(self) -> int:
        """Position of the last slot."""
        return self.first + self.length - 1 if self.positions is None else int(self.positions[-1])

    def key_positions(self, device: torch.device) -> torch.Tensor:
        """int64 [length]: position of each slot's key in the prompt."""
        if self.positions is not None:
            return self.positions
        return torch.arange(self.first, self.first + self.length, device=device)


@dataclass(frozen=True, eq=False)
class QuerySpan:
    """Query rows `[start, stop)` of a ragged batch, all of one request, and all keys that they may attend to.

    positions: int64 [stop - start], ascending. A row attends to every key that is not hidden, whose position is not
        above the row's, and that lies within the model's sliding window.
    segments: all keys, including the rows' own. Visible positions are 0..p, each exactly once.
    """

    start: int
    stop: int
    positions: torch.Tensor
    segments: tuple[KVSegment, ...]

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @cached_property
    def views(self) -> dict[Any, Any]:
        """Values that kernels computed for the span and reuse in later layers, by what they depend on."""
        return {}

    def in_order(self, rotation: Rotation) -> "Order":
        """The span's keys in prompt order, computed once for all layers."""
        if rotation not in self.views:
            length, at, slots, shifts = int(self.positions[-1]) + 1, *self._keys()
            ordered = torch.full((2, length), -1, dtype=torch.int64, device=at.device)
            ordered[:, at] = torch.stack([slots, shifts])
            slots, shifts = ordered
            assert (slots >= 0).all(), "a position has no key"
            self.views[rotation] = Order(slots, *rotation.factors(shifts), rotation, bool(shifts.any()))
        order: Order = self.views[rotation]
        return order

    def _keys(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """int64 each: position, slot and shift of every key that any row sees, in the order of the segments."""
        device, segments = self.positions.device, self.segments
        counts = [s.length for s in segments]
        which = torch.repeat_interleave(torch.tensor(counts, device=device), output_size=sum(counts))
        begins = [end - count for end, count in zip(itertools.accumulate(counts), counts, strict=True)]
        table = [(s.first - begin, s.start - begin, s.shift) for s, begin in zip(segments, begins, strict=True)]
        at, slots, shifts = torch.tensor(table, device=device).t().index_select(1, which).unbind()
        place = torch.arange(len(which), device=device)
        at, slots = at + place, slots + place
        for segment, begin in zip(segments, begins, strict=True):
            if segment.positions is not None:
                at[begin : begin + segment.length] = segment.positions
        seen = at <= self.positions[-1]
        if any(s.hidden is not None for s in segments):
            nothing = torch.zeros(max(counts), dtype=torch.bool, device=device)
            seen &= ~torch.cat([nothing[: s.length] if s.hidden is None else s.hidden for s in segments])
        (kept,) = seen.nonzero(as_tuple=True)
        return at[kept], slots[kept], shifts[kept]


class Spans(tuple[QuerySpan, ...]):
    """The spans of a batch."""

    @cached_property
    def views(self) -> dict[Any, Any]:
        """As of `QuerySpan`, for the whole batch."""
        return {}


class Order(NamedTuple):
    """The slot and the rotation of the key of each position.

    slots: int64 [positions]. cos, sin: float32 [positions, rotary_dim / 2], for `Rotation.apply`.
    moved: whether any key was written for another position.
    """

    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    rotation: Rotation
    moved: bool

    def keys(self, k_pool: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The keys in prompt order, rotated: [positions, kv_heads, head_dim]. dtype: None for that of the pool."""
        written = k_pool.index_select(0, self.slots)
        if not self.moved:
            return written.to(dtype or written.dtype)
        turned = torch.empty_like(written, dtype=dtype)
        return self.rotation.apply(written, self.cos[:, None], self.sin[:, None], out=turned)
