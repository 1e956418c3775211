"""What attention reads: runs of pool slots with their positions, and the rows that look at them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fusionkv.kernels.rope import Rotation


@dataclass(frozen=True, slots=True)
class Segment:
    """Pool slots `[start, start + length)` whose keys share one rotation. Never written while it is shared.

    start, length: in slots (tokens).
    first: position of the first slot in the prompt; slot i stands at `first + i` unless `positions` is given.
    shift: `first` minus the position for which the keys were written; 0 for keys in their own place.
    positions: int64 [length], ascending, for slots that don't stand next to each other in the prompt.
    hidden: bool [length]; True for a stale slot whose token was recomputed elsewhere: nothing attends to it. A
        segment has `positions` (fresh keys) or `hidden` (stale ones), not both.
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
        """int64 [length]: where each slot's key stands in the prompt."""
        if self.positions is not None:
            return self.positions
        return torch.arange(self.first, self.first + self.length, device=device)


@dataclass(frozen=True, eq=False)
class Span:
    """Query rows `[start, stop)` of a ragged batch, all of one request, and every key they may look at.

    positions: int64 [stop - start], ascending. A row attends to every key that is not hidden and whose position is
        not above its own (and within the model's sliding window).
    segments: all keys, the rows' own included. Visible positions are 0..p without a gap and without a repeat.
    """

    start: int
    stop: int
    positions: torch.Tensor
    segments: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @cached_property
    def views(self) -> dict[Any, Any]:
        """What a kernel found out about the span and needs again in the next layer, by whatever it depends on."""
        return {}

    def in_order(self, rotation: Rotation) -> "Order":
        """Its keys in prompt order; found once for all layers."""
        if rotation not in self.views:
            length = int(self.positions[-1]) + 1
            slots, shifts = torch.zeros(2, length, dtype=torch.int64, device=self.positions.device).unbind()
            found = torch.zeros(length, dtype=torch.bool, device=slots.device)
            for segment in self.segments:
                if segment.positions is None and segment.hidden is None:
                    count = max(0, min(segment.length, length - segment.first))
                    part = slice(segment.first, segment.first + count)
                    slots[part] = torch.arange(segment.start, segment.start + count, device=slots.device)
                    shifts[part], found[part] = segment.shift, True
                    continue
                at = segment.key_positions(slots.device)
                visible = at < length if segment.hidden is None else (at < length) & ~segment.hidden
                slots[at[visible]] = torch.arange(segment.start, segment.stop, device=slots.device)[visible]
                shifts[at[visible]] = segment.shift
                found[at[visible]] = True
            assert found.all(), "a position has no key"
            self.views[rotation] = Order(slots, *rotation.factors(shifts))
        order: Order = self.views[rotation]
        return order


class Order(NamedTuple):
    """Where the key of each position lies and how it turns there.

    slots: int64 [positions]. cos, sin: float32 [positions, rotary_dim / 2], for `Rotation.apply`.
    """

    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
