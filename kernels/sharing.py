"""Decoding requests that look at the same slots: who shares what, so that keys are read once for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusionkv.kernels.segments import Segment, Span


@dataclass(frozen=True)
class Shared:
    """Runs of slots that the same requests look at.

    spans: of one row each, two or more.
    runs: for each run of slots, the segment of each of the spans: its own shift, place and hidden slots.
    """

    spans: tuple[Span, ...]
    runs: tuple[tuple[Segment, ...], ...]

    @property
    def keys(self) -> int:
        return sum(run[0].length for run in self.runs)


def share(spans: Sequence[Span]) -> tuple[list[Shared], list[Span]]:
    """What several spans of one row look at, and the spans with what is left to each alone, in the same order."""
    sharers: dict[tuple[int, int], dict[int, Segment]] = {}
    for i, span in enumerate(spans):
        for segment in span.segments if span.rows == 1 else ():
            if segment.positions is None:
                # A chunk that is twice in one prompt is shared once.
                sharers.setdefault((segment.start, segment.length), {}).setdefault(i, segment)
    together: dict[tuple[int, ...], list[tuple[Segment, ...]]] = {}
    taken: list[set[int]] = [set() for _ in spans]
    for by_span in sharers.values():
        if len(by_span) > 1:
            together.setdefault(tuple(by_span), []).append(tuple(by_span.values()))
            for i, segment in by_span.items():
                taken[i].add(id(segment))
    found = [Shared(tuple(spans[i] for i in who), tuple(runs)) for who, runs in together.items()]
    left = [
        replace(span, segments=tuple(s for s in span.segments if id(s) not in ids))
        for span, ids in zip(spans, taken, strict=True)
    ]
    return found, left
