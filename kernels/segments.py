"""The inputs of attention: RoPE, runs of pool slots with their positions, and the query rows that read them.

Their tensors are in host memory, so that no plan of a step waits for a GPU.
"""

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch

from fusionkv.kernels.upload import upload

_T = TypeVar("_T")
# A hidden slot's position, above every row's: one comparison is both the causal mask and the mask of hidden slots.
NEVER = 2**31 - 1


class Rotation:
    """The rotary embedding of one model, applied to vectors that carry RoPE already.

    RoPE is additive: a key written for position b is valid at position c after a rotation by c - b (FusionRAG A.1).
    Only the first `2 * len(inv_freq)` channels are rotary; the others are copied. Computed in float32 for every
    dtype, so that a rotation rounds once.

    inv_freq: float32 [rotary_dim / 2], after the model's own scaling (linear, llama3, yarn).
    interleaved: pairs are (0, 1), (2, 3), ... as in GLM; otherwise (i, i + rotary_dim / 2) as in Llama.
    """

    def __init__(self, inv_freq: torch.Tensor, interleaved: bool) -> None:
        self.inv_freq = inv_freq.detach().float().cpu()
        self.interleaved = interleaved
        self.rotary_dim = 2 * len(inv_freq)

    def table(self, shifts: torch.Tensor) -> torch.Tensor:
        """float32 [shifts, 2, rotary_dim / 2], in host memory: cosines and sines of int64 [shifts]."""
        # float64: at shift 1e5 and the highest frequency, float32 angles are off by 4e-3.
        angles = shifts[:, None] * self.inv_freq.double()
        return torch.stack([angles.cos(), angles.sin()], dim=1).float()

    def turn(self, x: torch.Tensor, shift: int) -> torch.Tensor:
        """Rotates `x` `[..., head_dim]` by `shift` positions, in its dtype; returns `x` itself if shift is 0."""
        return x if shift == 0 else self.apply(x, *self.table(torch.tensor([shift]))[0].to(x.device))

    def factors(self, shifts: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float32 [tokens, rotary_dim / 2] each, that rotate tokens by int64 [tokens] shifts."""
        different, which = shifts.unique(return_inverse=True)
        cos, sin, which = upload([*self.table(different).unbind(1), which], device)
        return cos[which], sin[which]

    def apply(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rotates `x` `[..., head_dim]`; `cos` and `sin` broadcast to `[..., rotary_dim / 2]`.

        out: the tensor to write, of any dtype; None allocates one like `x`.
        """
        half = self.rotary_dim // 2
        split = (slice(0, None, 2), slice(1, None, 2)), (slice(half), slice(half, None))
        first, second = split[0] if self.interleaved else split[1]
        a, b = (x[..., : self.rotary_dim][..., part].float() for part in (first, second))
        turned = torch.empty_like(x) if out is None else out
        turned[..., : self.rotary_dim][..., first] = (a * cos).addcmul_(b, sin, value=-1)
        turned[..., : self.rotary_dim][..., second] = (b * cos).addcmul_(a, sin)
        turned[..., self.rotary_dim :] = x[..., self.rotary_dim :]
        return turned


class AttentionSpec(NamedTuple):
    """How a layer attends, besides its inputs.

    rotation: RoPE of the layer's keys.
    scale: factor of the logits.
    window: a row at position p sees only positions above p - window; None for no window.
    sinks: [q_heads], a logit of each head that takes part in the softmax beside those of the keys, and has no value
        (gpt-oss); None for none.
    """

    rotation: Rotation
    scale: float
    window: int | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class KVSegment:
    """Pool slots `[start, start + length)` whose keys share one rotation. Not written to while it is shared.

    start, length: in slots (tokens).
    first: position of the first slot in the prompt; slot i has position `first + i` unless `positions` is given.
    shift: `first` minus the position for which the keys were written; 0 for keys at their original position.
    positions: int64 [length], ascending, for slots whose positions in the prompt are not consecutive.
    hidden: bool [length]; True for a stale slot whose token is recomputed in another slot: no row attends to it. A
        segment has `positions` (fresh keys) or `hidden` (stale keys), not both.
    continues: whether it is the rest of the segment before it, which a fragmented pool has in several runs of slots.
    listed: int32 [length], each slot's position, NEVER for a hidden one; None if slot i is visible at `first + i`.
    """

    start: int
    length: int
    first: int
    shift: int = 0
    positions: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    continues: bool = False
    listed: torch.Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        assert self.positions is None or self.hidden is None, "a segment has positions or hidden slots, not both"
        listed = None if self.positions is None else self.positions.int()
        if self.hidden is not None:
            listed = self.key_positions().int().masked_fill_(self.hidden, NEVER)
        object.__setattr__(self, "listed", listed)

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def last(self) -> int:
        """Position of the last slot."""
        return self.first + self.length - 1 if self.positions is None else int(self.positions[-1])

    def key_positions(self) -> torch.Tensor:
        """int64 [length]: position of each slot's key in the prompt."""
        return torch.arange(self.first, self.first + self.length) if self.positions is None else self.positions


class Prepared:
    """Keeps what is computed of an object once and used in every layer."""

    @cached_property
    def _made(self) -> dict[tuple[Callable[..., Any], tuple[Hashable, ...]], Any]:
        return {}

    def once(self, make: Callable[..., _T], *arguments: Hashable) -> _T:
        """The result of `make(self, *arguments)`, called at the first use of these arguments."""
        key = make, arguments
        if key not in self._made:
            self._made[key] = make(self, *arguments)
        return self._made[key]


@dataclass(frozen=True, eq=False)
class QuerySpan(Prepared):
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

    def in_order(self, rotation: Rotation, device: torch.device) -> "Order":
        """The span's keys in prompt order, with tensors on a device, computed once for all layers."""
        return self.once(Order.of, rotation, device)

    def ordered(self) -> torch.Tensor:
        """int64 [2, last position + 1], in host memory: slot and shift of each position's key, found once."""
        return self.once(_ordered)

    def positions_on(self, device: torch.device) -> torch.Tensor:
        """The rows' positions on a device, copied once for all layers."""
        return self.once(_positions_on, device)

    def last(self, count: int, start: int) -> "QuerySpan":
        """The last `count` rows, as those from `start` on of another batch, with the order of keys known so far."""
        moved = QuerySpan(start, start + count, self.positions[-count:], self.segments)
        moved._made.update({key: made for key, made in self._made.items() if isinstance(made, Order)})
        return moved


def _ordered(span: QuerySpan) -> torch.Tensor:
    segments, counts = span.segments, [s.length for s in span.segments]
    which = torch.repeat_interleave(torch.tensor(counts), output_size=sum(counts))
    begins = [end - count for end, count in zip(itertools.accumulate(counts), counts, strict=True)]
    table = [(s.first - begin, s.start - begin, s.shift) for s, begin in zip(segments, begins, strict=True)]
    at, slots, shifts = torch.tensor(table).t().index_select(1, which).unbind()
    place = torch.arange(len(which))
    at, slots = at + place, slots + place
    for segment, begin in zip(segments, begins, strict=True):
        if segment.positions is not None:
            at[begin : begin + segment.length] = segment.positions
    seen = at <= span.positions[-1]
    if any(s.hidden is not None for s in segments):
        nothing = torch.zeros(max(counts), dtype=torch.bool)
        seen &= ~torch.cat([nothing[: s.length] if s.hidden is None else s.hidden for s in segments])
    (kept,) = seen.nonzero(as_tuple=True)
    ordered = torch.full((2, int(span.positions[-1]) + 1), -1, dtype=torch.int64)
    ordered[:, at[kept]] = torch.stack([slots, shifts])[:, kept]
    assert (ordered[0] >= 0).all(), "a position has no key"
    return ordered


def _positions_on(span: QuerySpan, device: torch.device) -> torch.Tensor:
    return upload([span.positions], device)[0]


class Spans(Prepared, tuple[QuerySpan, ...]):
    """The spans of a batch."""


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

    @classmethod
    def of(cls, span: QuerySpan, rotation: Rotation, device: torch.device) -> "Order":
        """The order of the keys that the span's last row sees."""
        slots, shifts = span.ordered()
        (there,) = upload([slots], device)
        return cls(there, *rotation.factors(shifts, device), rotation, bool(shifts.any()))

    def keys(self, k_pool: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The keys in prompt order, rotated: [positions, kv_heads, head_dim]. dtype: None for that of the pool."""
        written = k_pool.index_select(0, self.slots)
        if not self.moved:
            return written.to(dtype or written.dtype)
        turned = torch.empty_like(written, dtype=dtype)
        return self.rotation.apply(written, self.cos[:, None], self.sin[:, None], out=turned)
