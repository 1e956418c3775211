"""A batch's spans and segments as flat device tables, made once a step and read by every layer's kernels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segments import Segment, Span

# Above every position: one compare is the causal mask and the staleness mask at once.
NEVER = 2**31 - 1
HOLED_KEYS = 512  # of a piece of a segment with holes, at most
LEAST_KEYS = 256  # of a part: below it, merging costs more than a longer walk


class Grid(NamedTuple):
    """What decides how rows are cut into tiles and keys into parts.

    groups: query heads of a KV head. kv_heads: programs of each tile. tile_rows: query rows times groups of a tile.
    processors: multiprocessors to keep busy.
    """

    groups: int
    kv_heads: int
    tile_rows: int
    processors: int

    @classmethod
    def of(cls, q_heads: int, kv_heads: int, tile_rows: int, processors: int) -> "Grid":
        """A tile holds all heads of a group, however many they are."""
        groups = q_heads // kv_heads
        return cls(groups, kv_heads, max(tile_rows, groups), processors)

    def tile(self, rows: int) -> int:
        """Query rows of a tile for a span of `rows` rows: for decoding, the smallest matrix product there is."""
        return max(1, (16 if rows * self.groups <= 16 else self.tile_rows) // self.groups)


@dataclass(frozen=True)
class Launch:
    """Tiles of one size, and the parts that their keys are cut into so that every multiprocessor has work.

    items: int32 [items, 6]: first row, rows, first segment, segments, part, and the row of the partial results that
        the first row's go to. Longest walks first.
    rows: int64 [partial rows]: which query row each row of the partial results is of.
    """

    tile: int
    parts: int
    items: torch.Tensor
    rows: torch.Tensor


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
    def of(cls, spans: Sequence[Span], rotation: Rotation, grid: Grid, device: torch.device) -> "SegmentTable":
        """The table of these spans. Segments are listed in the order given; nothing depends on it."""
        listing = _Listing(device)
        launches = []
        tiles = {grid.tile(span.rows) for span in spans}
        for tile in sorted(tiles, reverse=True):
            alike = [span for span in spans if grid.tile(span.rows) == tile]
            programs = grid.kv_heads * sum(-(-span.rows // tile) for span in alike)
            most = max(1, max(_keys(span) for span in alike) // LEAST_KEYS)
            parts = min(most, -(-2 * grid.processors // programs))
            launches.append(listing.launch(alike, tile, parts))
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


def _keys(span: Span) -> int:
    return sum(segment.length for segment in span.segments)


class _Listing:
    """Collects the rows of the tables."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.segments: list[tuple[int, int, int, int, int, int]] = []
        self.positions: list[torch.Tensor] = []
        self.shifts: dict[int, int] = {}
        self._listed = 0

    def launch(self, spans: list[Span], tile: int, parts: int) -> Launch:
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

    def _list(self, segment: Segment, start: int, stop: int) -> None:
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


def _parts(segments: Sequence[Segment], quota: int) -> Iterator[list[tuple[Segment, int, int]]]:
    """Consecutive pieces (segment, start, stop) of `quota` keys together, the last of fewer."""
    pieces: list[tuple[Segment, int, int]] = []
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


class Spans(tuple[Span, ...]):
    """The spans of a batch; remembers the table that the kernels read."""

    @cached_property
    def views(self) -> dict[Any, Any]:
        """What a kernel found out about the batch and needs again in the next layer, by whatever it depends on."""
        return {}

    @cached_property
    def _tables(self) -> dict[tuple[Grid, torch.device], SegmentTable]:
        return {}

    def table(self, rotation: Rotation, grid: Grid, device: torch.device) -> SegmentTable:
        """The batch's table."""
        if (grid, device) not in self._tables:
            self._tables[grid, device] = SegmentTable.of(self, rotation, grid, device)
        return self._tables[grid, device]
