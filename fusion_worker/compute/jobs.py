"""Jobs of the engine: what is computed, and what is wanted of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from fusionkv.fusion_worker.decode.sampling import Sampler
from fusionkv.fusion_worker.pool.slots import SlotRange, lay_out, slots_of
from fusionkv.kernels.attention import Temper
from fusionkv.kernels.segments import KVSegment
from fusionkv.protos.contract.selectors import Selector

T_co = TypeVar("T_co", covariant=True)


class Output(Generic[T_co]):
    """What is wanted of a job's rows besides their KV; `T_co` is the type of the result."""

    __slots__ = ()
    splittable = False
    """Whether the rows may be computed in several steps."""


@dataclass(frozen=True, slots=True)
class Nothing(Output[None]):
    """Only the KV of the rows."""

    splittable = True


@dataclass(frozen=True, slots=True)
class NextToken(Output["Sampled"]):
    """A token, sampled from the last row.

    Attributes:
        logits: whether the logits of that row are wanted as well.
        votes: number of last rows of which the attention is wanted, by layer and KV head.
    """

    sampler: Sampler
    logits: bool = False
    votes: int = 0

    @property
    def splittable(self) -> bool:  # type: ignore[override]
        return not self.votes


@dataclass(frozen=True, slots=True)
class Logits(Output[torch.Tensor]):
    """Logits of the last `count` rows, float32 [count, vocabulary]."""

    count: int

    @property
    def splittable(self) -> bool:  # type: ignore[override]
        return self.count == 1


@dataclass(frozen=True, slots=True)
class AttentionScores(Output[torch.Tensor]):
    """The attention of all rows into each position, summed over `layers`: float32 [last position + 1], on the CPU."""

    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ShallowScores(Output[torch.Tensor]):
    """Scores of tokens by their states at layer 1, where the rows stop.

    float32 [selectors, last position + 1], on the CPU.

    selectors: selectors that need `FreshLayer`. starts: as in `FreshStates`.
    """

    selectors: tuple[Selector, ...]
    starts: torch.Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of `NextToken`.

    Attributes:
        token: id.
        logits: float32 [vocabulary]; None if they were not wanted. A view of the logits of all rows of the step.
        votes: float32 [layers, kv_heads, last position + 1]; None if they were not wanted.
    """

    token: int
    logits: torch.Tensor | None = None
    votes: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ForwardJob(Generic[T_co]):
    """Rows to compute, over keys in the pool. `T_co` is the type of the result.

    Attributes:
        ids, positions: int64 [rows] in host memory, positions ascending.
        slots: slots for the rows' KV, in row order.
        keys: segments of the keys that exist already.
        output: what is wanted of the rows.
        unstored: number of first rows whose keys are in `keys` already; their KV is not written.
        temper: a change of how the rows attend to the context; None for none.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: Sequence[SlotRange]
    keys: tuple[KVSegment, ...]
    output: Output[T_co]
    unstored: int = 0
    temper: Temper | None = None

    @property
    def rows(self) -> int:
        return len(self.ids)

    def visible(self, stop: int) -> tuple[KVSegment, ...]:
        """All keys that the rows before `stop` see, their own included."""
        return (*self.keys, *lay_out(self.positions[self.unstored : stop], self.slots))

    def targets(self, start: int, stop: int) -> torch.Tensor:
        """int64: the slots of the rows `[start, stop)` that are stored."""
        first = max(0, start - self.unstored)
        return slots_of(self.slots)[first : stop - self.unstored]


def encoding(
    ids: Sequence[int], start: int, slots: Sequence[SlotRange], keys: tuple[KVSegment, ...]
) -> ForwardJob[None]:
    """The job that computes the KV of tokens at consecutive positions from `start` on."""
    positions = torch.arange(start, start + len(ids))
    return ForwardJob(torch.tensor(ids, dtype=torch.int64), positions, slots, keys, Nothing())
