"""A batch's spans and segments as flat device tables, made once a step and read by every layer's kernels."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segments import KVSegment, QuerySpan
from fusionkv.kernels.sharing import Shared, share

# Above every position: one compare is the causal mask and the staleness mask at once.
NEVER = 2**31 - 1
HOLED_KEYS = 512  # of a piece of a segment with holes, at most
LEAST_KEYS = 256  # of a part: below it, merging costs more than a longer walk


class Grid(NamedTuple):
    """What decides how rows are cut into tiles and keys into parts.

    groups: query heads of a KV head. kv_heads: programs of each tile. tile_rows: query rows times groups of a tile.
    processors: multiprocessors to keep busy. shared_rows: as `tile_rows`, of tiles that decoding requests share;
        0 where each has tiles of its own.
    """

    groups: int
    kv_heads: int
    tile_rows: int
    processors: int
    shared_rows: int = 0

    @classmethod
    def of(cls, q_heads: int, kv_heads: int, tile_rows: int, processors: int, shared_rows: int = 0) -> "Grid":
        """A tile holds all heads of a group, however many they are."""
        groups = q_heads // kv_heads
        return cls(groups, kv_heads, max(tile_rows, groups), processors, shared_rows and max(shared_rows, groups))

    def tile(self, rows: int) -> int:
        """Query rows of a tile for a span of `rows` rows: for decoding, the smallest matrix product there is."""
        return max(1, (16 if rows * self.groups <= 16 else self.tile_rows) // self.groups)

    def parts(self, programs: int, keys: int) -> int:
        """Parts to cut `keys` keys into, so that `programs` tiles fill every multiprocessor twice."""
        return min(max(1, keys // LEAST_KEYS), -(-2 * self.processors // (self.kv_heads * programs)))


@dataclass(frozen=True)
class SharedLaunch:
    """Tiles of one size, each of rows of several requests that look at the same slots.

    items: int32 [items, 4]: first member, members, first segment, pieces of slots; the segments are listed piece by
        piece, a member's after the other's.
    members: int32 [members, 2]: query row, and which partial result is its.
    """

    tile: int
    items: torch.Tensor
    members: torch.Tensor


@dataclass(frozen=True)
class Launch:
    """Tiles of one size, and the parts that their keys are cut into so that every multiprocessor has work.

    items: int32 [items, 6]: first row, rows, first segment, segments, part, and the row of the partial results that
        the first row's go to. Longest walks first.
    rows: int64 [partial rows]: which query row each row of the partial results is of.
    shared: what is read once for several of the rows; its partial results are parts like the others.
    """

    tile: int
    parts: int
    items: torch.Tensor
    rows: torch.Tensor
    shared: SharedLaunch | None = None


@dataclass(frozen=True)
class SegmentTable:
    """int32 tables of one batch.

    segments: [segments, 6]: slot, length, position of the first slot, row of its turn, where its own positions begin
        in `positions`, or -1 when slot i stands at first + i, and 1 if it has holes.
    positions: key positions of segments that have holes or hidden slots (NEVER), one after another.
    bias: float32, as `positions`: -inf for a hidden slot, 0 for the others.
    row_positions: [rows]: position of each query row.
    turns: float32 [turns, 2, rotary_dim / 2]: cos and sin that turn a query *back* by a segment's shift.
    """

    launches: tuple[Launch, ...]
    segments: torch.Tensor
    positions: torch.Tensor
    bias: torch.Tensor
    row_positions: torch.Tensor
    turns: torch.Tensor

    @classmethod
    def of(cls, spans: Sequence[QuerySpan], rotation: Rotation, grid: Grid, device: torch.device) -> "SegmentTable":
        """The table of these spans. Segments are listed in the order given; nothing depends on it."""
        listing = _Listing(device)
        launches = []
        tiles = {grid.tile(span.rows) for span in spans}
        for tile in sorted(tiles, reverse=True):
            alike = [span for span in spans if grid.tile(span.rows) == tile]
            shared: list[Shared] = []
            if grid.shared_rows:
                shared, alike = share(alike)
            parts = grid.parts(sum(-(-span.rows // tile) for span in alike), max(map(_keys, alike)))
            launch = listing.launch(alike, tile, parts)
            launches.append(listing.shared(launch, shared, grid) if shared else launch)
        rows = torch.zeros(max(s.stop for s in spans), dtype=torch.int32, device=device)
        for span in spans:
            rows[span.start : span.stop] = span.positions
        angles = torch.tensor(list(listing.shifts), dtype=torch.float64)[:, None] * rotation.inv_freq.double()
        positions = torch.cat(listing.positions or [torch.zeros(1, device=device)]).int()
        return cls(
            launches=tuple(launches),
            segments=torch.tensor(listing.segments, dtype=torch.int32).to(device),
            positions=positions,
            bias=torch.zeros(len(positions), device=device).masked_fill_(positions == NEVER, float("-inf")),
            row_positions=rows,
            turns=torch.stack([angles.cos(), -angles.sin()], dim=1).float().to(device).contiguous(),
        )


def _keys(span: QuerySpan) -> int:
    return sum(segment.length for segment in span.segments)


class _Listing:
    """Collects the rows of the tables."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.segments: list[tuple[int, int, int, int, int, int]] = []
        self.positions: list[torch.Tensor] = []
        self.shifts: dict[int, int] = {}
        self._listed = 0

    def launch(self, spans: list[QuerySpan], tile: int, parts: int) -> Launch:
        """Lists the spans' segments, cut so that the parts of a span hold about equally many keys."""
        items: list[tuple[int, ...]] = []
        rows: list[torch.Tensor] = []
        taken = 0
        for span in spans:
            quota = -(-_keys(span) // parts)
            for part, pieces in enumerate(_parts(span.segments, quota)):
                begin = len(self.segments)
                for segment, start, stop in pieces:
                    self._list(segment, start, stop)
                count = len(self.segments) - begin
                for row in range(span.start, span.stop, tile):
                    partial = taken + row - span.start
                    items.append((row, min(tile, span.stop - row), begin, count, part, partial))
            rows.append(torch.arange(span.start, span.stop))
            taken += span.rows
        # The last rows of a prompt see the most keys: started last, they would end last, alone.
        items.reverse()
        return Launch(
            tile,
            parts,
            torch.tensor(items, dtype=torch.int32).to(self.device),
            torch.cat(rows).to(self.device),
        )

    def shared(self, launch: Launch, groups: list[Shared], grid: Grid) -> Launch:
        """Adds what groups of the launch's rows share, all in tiles of one size."""
        tile = grid.shared_rows // grid.groups
        partial = {row: i for i, row in enumerate(launch.rows.tolist())}
        parts: Counter[int] = Counter()
        programs = sum(-(-len(group.spans) // tile) for group in groups)
        items: list[tuple[int, ...]] = []
        members: list[tuple[int, int]] = []
        for group in groups:
            runs = {run[0].start: run for run in group.runs}
            quota = -(-group.keys // grid.parts(programs, group.keys))
            for pieces in _parts([run[0] for run in group.runs], quota):
                for at in range(0, len(group.spans), tile):
                    rows = [span.start for span in group.spans[at : at + tile]]
                    items.append((len(members), len(rows), len(self.segments), len(pieces)))
                    for row in rows:
                        members.append((row, (launch.parts + parts[row]) * len(partial) + partial[row]))
                        parts[row] += 1
                    for segment, start, stop in pieces:
                        for own in runs[segment.start][at : at + tile]:
                            self._list(own, start, stop)
        tables = (torch.tensor(table, dtype=torch.int32).to(self.device) for table in (items, members))
        return replace(launch, parts=launch.parts + max(parts.values()), shared=SharedLaunch(tile, *tables))

    def _list(self, segment: KVSegment, start: int, stop: int) -> None:
        turn, own = self.shifts.setdefault(segment.shift, len(self.shifts)), -1
        if segment.hidden is not None or segment.positions is not None:
            keys = segment.key_positions(self.device)[start:stop]
            if segment.hidden is not None:
                keys = keys.masked_fill(segment.hidden[start:stop], NEVER)
            self.positions.append(keys)
            own, self._listed = self._listed, self._listed + stop - start
        # A kernel takes the first and last position of a piece with holes from its own positions.
        holes = segment.positions is not None
        assert not holes or segment.hidden is None, "fresh keys have holes, stale ones are hidden: never both"
        self.segments.append((segment.start + start, stop - start, segment.first + start, turn, own, int(holes)))


def _parts(segments: Sequence[KVSegment], quota: int) -> Iterator[list[tuple[KVSegment, int, int]]]:
    """Consecutive pieces (segment, start, stop) of `quota` keys together, the last of fewer."""
    pieces: list[tuple[KVSegment, int, int]] = []
    left = quota
    for segment in segments:
        at = 0
        while at < segment.length:
            # A piece with holes is above a tile, below it or masked as a whole: short ones are told apart better.
            most = left if segment.positions is None else min(left, HOLED_KEYS)
            count = min(most, segment.length - at)
            pieces.append((segment, at, at + count))
            at, left = at + count, left - count
            if left == 0:
                yield pieces
                pieces, left = [], quota
    if pieces:
        yield pieces


class Spans(tuple[QuerySpan, ...]):
    """The spans of a batch; remembers the table that the kernels read."""

    @cached_property
    def views(self) -> dict[Any, Any]:
        """What a kernel found out about the batch and needs again in the next layer, by whatever it depends on."""
        return {}

    @cached_property
    def _tables(self) -> dict[tuple[Rotation, Grid, torch.device], SegmentTable]:
        return {}

    def table(self, rotation: Rotation, grid: Grid, device: torch.device) -> SegmentTable:
        """The batch's table."""
        key = rotation, grid, device
        if key not in self._tables:
            self._tables[key] = SegmentTable.of(self, rotation, grid, device)
        return self._tables[key]
