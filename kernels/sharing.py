"""Groups decoding requests by the slots that they share, so that shared keys are read once for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusionkv.kernels.segments import KVSegment, QuerySpan

# Minimum number of shared keys for which sharing pays. It writes and reads partial results, 8 (d + 1) H bytes per
# request, for H query heads of d channels. A key and its value have 2 (H / G) d b bytes, for G query heads per KV
# head and b bytes per number. Two requests that share n keys save one read of them, so sharing pays from 8 G / b
# keys: 28 with G = 7 and b = 2, 64 with G = 16. An additional tile, and possibly an additional merge, come on top.
LEAST = 64


@dataclass(frozen=True)
class Shared:
    """Runs of slots that the same requests see.

    Attributes:
        spans: two or more spans, each of one row.
        runs: for each run of slots, the segments of all spans, which differ in shift, position and hidden slots.
    """

    spans: tuple[QuerySpan, ...]
    runs: tuple[tuple[KVSegment, ...], ...]

    @property
    def keys(self) -> int:
        return sum(run[0].length for run in self.runs)


def share(spans: Sequence[QuerySpan]) -> tuple[list[Shared], list[QuerySpan]]:
    """The groups of one-row spans that share at least `LEAST` keys, and all spans without their shared segments."""
    sharers: dict[tuple[int, int], dict[int, KVSegment]] = {}
    for i, span in enumerate(spans):
        for segment in span.segments if span.rows == 1 else ():
            if segment.positions is None:
                # A chunk that occurs twice in a prompt is shared once.
                sharers.setdefault((segment.start, segment.length), {}).setdefault(i, segment)
    together: dict[tuple[int, ...], list[tuple[KVSegment, ...]]] = {}
    for by_span in sharers.values():
        if len(by_span) > 1:
            together.setdefault(tuple(by_span), []).append(tuple(by_span.values()))
    found: list[Shared] = []
    taken: list[set[int]] = [set() for _ in spans]
    for members, runs in together.items():
        group = Shared(tuple(spans[i] for i in members), tuple(runs))
        if group.keys >= LEAST:
            found.append(group)
            for i, segments in zip(members, zip(*runs, strict=True), strict=True):
                taken[i].update(map(id, segments))
    remaining = [
        replace(span, segments=tuple(s for s in span.segments if id(s) not in ids))
        for span, ids in zip(spans, taken, strict=True)
    ]
    return found, remaining
