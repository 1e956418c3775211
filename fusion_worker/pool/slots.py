"""Slots of the KV pool, each with room for the KV of one token: runs of them, and those that are free."""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fusionkv.kernels.segments import KVSegment


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Contiguous slots `[start, start + length)`."""

    start: int
    length: int


class FreeSlots:
    """The free slots: runs in order, of which no two touch. Allocates whole pages."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.capacity = pages * page_tokens
        """Number of all slots."""
        self.runs = [SlotRange(0, self.capacity)]

    @property
    def count(self) -> int:
        return sum(run.length for run in self.runs)

    def needed(self, tokens: int) -> int:
        """Number of slots that `tokens` tokens take, in whole pages."""
        return -(-tokens // self.page_tokens) * self.page_tokens

    def take(self, need: int) -> tuple[SlotRange, ...]:
        """Allocates so many slots, at most `count`: the smallest run that has them, or as few runs as possible."""
        fits = [run for run in self.runs if run.length >= need]
        if fits:
            best = min(fits, key=lambda run: run.length)
            return (self._cut(best, need),) if need else ()
        taken: list[SlotRange] = []
        while need:
            largest = max(self.runs, key=lambda run: run.length)
            taken.append(self._cut(largest, min(largest.length, need)))
            need -= taken[-1].length
        return tuple(taken)

    def give(self, runs: Sequence[SlotRange]) -> None:
        """Frees runs that were taken."""
        for run in runs:
            at = bisect.bisect_left(self.runs, run.start, key=lambda r: r.start)
            if at < len(self.runs) and run.start + run.length == self.runs[at].start:
                run = SlotRange(run.start, run.length + self.runs.pop(at).length)
            if at and self.runs[at - 1].start + self.runs[at - 1].length == run.start:
                before = self.runs.pop(at - 1)
                run, at = SlotRange(before.start, before.length + run.length), at - 1
            self.runs.insert(at, run)

    def _cut(self, run: SlotRange, length: int) -> SlotRange:
        at = self.runs.index(run)
        self.runs[at : at + 1] = [SlotRange(run.start + length, run.length - length)] if run.length > length else []
        return SlotRange(run.start, length)


def slots_of(runs: Sequence[SlotRange]) -> torch.Tensor:
    """int64: every slot of the runs, in order."""
    return torch.cat([torch.arange(run.start, run.start + run.length) for run in runs])


def behind(runs: Sequence[SlotRange], count: int) -> tuple[SlotRange, ...]:
    """The runs without their first `count` slots."""
    left: list[SlotRange] = []
    for run in runs:
        skipped = min(count, run.length)
        count -= skipped
        if run.length > skipped:
            left.append(SlotRange(run.start + skipped, run.length - skipped))
    return tuple(left)


def filled(runs: Sequence[SlotRange], count: int) -> Iterator[tuple[int, SlotRange]]:
    """Yields the stretches of slots that `count` tokens fill in order, each with the index of its first token."""
    at = 0
    for run in runs:
        if at == count:
            return
        length = min(run.length, count - at)
        yield at, SlotRange(run.start, length)
        at += length


def lay_out(positions: torch.Tensor, runs: Sequence[SlotRange]) -> tuple[KVSegment, ...]:
    """Segments of tokens at ascending `positions` that fill `runs` in order; consecutive positions are implicit."""
    segments: list[KVSegment] = []
    for at, run in filled(runs, len(positions)):
        part = positions[at : at + run.length]
        first = int(part[0])
        dense = int(part[-1]) - first + 1 == len(part)
        uneven = None if dense else part
        segments.append(KVSegment(run.start, run.length, first, positions=uneven, continues=at > 0))
    return tuple(segments)


def stretches(
    runs: Sequence[SlotRange], count: int, first: int, shift: int, hidden: torch.Tensor | None = None
) -> tuple[KVSegment, ...]:
    """Segments of the first `count` slots of `runs`, for consecutive tokens from position `first`.

    shift: how far keys are moved from the positions where they were rotated. hidden: bool [count], or None.
    """
    segments: list[KVSegment] = []
    for at, run in filled(runs, count):
        unseen = None if hidden is None else hidden[at : at + run.length]
        segments.append(KVSegment(run.start, run.length, first + at, shift, hidden=unseen, continues=at > 0))
    return tuple(segments)
