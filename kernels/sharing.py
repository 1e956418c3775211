"""Decoding requests that look at the same slots: who shares what, so that keys are read once for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusionkv.kernels.segments import KVSegment, QuerySpan

# Keys that requests have to share for it to pay. A partial result is written and read: 8 (d + 1) H bytes a request,
# where a key and its value are 2 (H / G) d b. Two requests that share n keys read them once less, so it pays from
# 8 G / b keys on: 28 with 7 heads to a KV head and 2 bytes a number, 64 with 16 heads. A tile, and merging where
# there was none, come on top of that.
LEAST = 64


@dataclass(frozen=True)
class Shared:
    """Runs of slots that the same requests look at.

    spans: of one row each, two or more.
    runs: for each run of slots, the segment of each of the spans: its own shift, place and hidden slots.
    """

    spans: tuple[QuerySpan, ...]
    runs: tuple[tuple[KVSegment, ...], ...]

    @property
    def keys(self) -> int:
        return sum(run[0].length for run in self.runs)


def share(spans: Sequence[QuerySpan]) -> tuple[list[Shared], list[QuerySpan]]:
    """What several spans of one row look at, and the spans with what is left to each alone, in the same order.

    What the same spans look at is shared from `LEAST` keys on.
    """
    sharers: dict[tuple[int, int], dict[int, KVSegment]] = {}
    for i, span in enumerate(spans):
        for segment in span.segments if span.rows == 1 else ():
            if segment.positions is None:
                # A chunk that is twice in one prompt is shared once.
                sharers.setdefault((segment.start, segment.length), {}).setdefault(i, segment)
    together: dict[tuple[int, ...], list[tuple[KVSegment, ...]]] = {}
    for by_span in sharers.values():
        if len(by_span) > 1:
            together.setdefault(tuple(by_span), []).append(tuple(by_span.values()))
    found: list[Shared] = []
    taken: list[set[int]] = [set() for _ in spans]
    for who, runs in together.items():
        group = Shared(tuple(spans[i] for i in who), tuple(runs))
        if group.keys >= LEAST:
            found.append(group)
            for i, segments in zip(who, zip(*runs, strict=True), strict=True):
                taken[i].update(map(id, segments))
    left = [
        replace(span, segments=tuple(s for s in span.segments if id(s) not in ids))
        for span, ids in zip(spans, taken, strict=True)
    ]
    return found, left
