"""A batch's spans and segments as flat tables, made once per step and read by the kernels of every layer."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from fusionkv.kernels.segments import NEVER, KVSegment, QuerySpan, Rotation, Spans
from fusionkv.kernels.upload import upload

HOLED_KEYS = 512  # maximum keys in a piece of a segment with holes
LEAST_KEYS = 256  # minimum keys in a part: below it, merging costs more than a longer loop over keys


# Minimum number of shared keys for which sharing pays. It writes and reads partial results, 8 (d + 1) H bytes per
# request, for H query heads of d channels. A key and its value have 2 (H / G) d b bytes, for G query heads per KV
# head and b bytes per number. Two requests that share n keys save one read of them, so sharing pays from 8 G / b
# keys: 28 with G = 7 and b = 2, 64 with G = 16. An additional tile, and possibly an additional merge, come on top.
LEAST_SHARED = 64
_ANY_KEYS = 1 << 40


class Grid(NamedTuple):
    """Parameters that determine how rows are split into tiles, and keys into parts.

    Attributes:
        groups: query heads per KV head.
        kv_heads: KV heads, and so programs per tile.
        tile_rows: rows of a tile: query rows times groups.
        processors: multiprocessors to keep busy.
        shared_rows: as `tile_rows`, for tiles that decoding requests share; 0 shares no tiles.
        fixed_parts: number of parts of any keys; 0 chooses it by their number.
    """

    groups: int
    kv_heads: int
    tile_rows: int
    processors: int
    shared_rows: int = 0
    fixed_parts: int = 0

    @classmethod
    def of(cls, q_heads: int, kv_heads: int, tile_rows: int, processors: int, shared_rows: int = 0) -> "Grid":
        """The grid of a model. A tile always holds all heads of a group."""
        groups = q_heads // kv_heads
        return cls(groups, kv_heads, max(tile_rows, groups), processors, shared_rows and max(shared_rows, groups))

    @classmethod
    def of_decoding(cls, q_heads: int, kv_heads: int, tile_rows: int, processors: int, rows: int) -> "Grid":
        """The grid of a number of rows of one request each, which is the same for all keys."""
        grid = cls.of(q_heads, kv_heads, tile_rows, processors)
        return grid._replace(fixed_parts=max(2, grid.parts(rows, _ANY_KEYS)))

    def tile(self, rows: int) -> int:
        """Query rows in a tile for a span of `rows` rows; for decoding, those of the smallest matrix product."""
        return max(1, (16 if rows * self.groups <= 16 else self.tile_rows) // self.groups)

    def parts(self, programs: int, keys: int) -> int:
        """Number of parts of `keys` keys with which `programs` tiles fill every multiprocessor twice."""
        if self.fixed_parts:
            return self.fixed_parts
        return min(max(1, keys // LEAST_KEYS), -(-2 * self.processors // (self.kv_heads * programs)))


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


@dataclass(frozen=True)
class SharedLaunch:
    """Tiles of one size, each with rows of several requests that see the same slots.

    Attributes:
        tile: query rows in a tile.
        items: int32 [items, 4]: first member, members, first segment, pieces of slots. Segments are listed by piece,
            then by member.
        members: int32 [members, 2]: query row, and index of its partial result.
    """

    tile: int
    items: torch.Tensor
    members: torch.Tensor


@dataclass(frozen=True)
class Launch:
    """Tiles of one size, with keys split into parts so that every multiprocessor has work.

    Attributes:
        tile: query rows in a tile.
        parts: number of parts.
        items: int32 [items, 6]: first row, rows, first segment, segments, part, and the row of the partial results
            for the first row. Items with the most keys come first.
        rows: int64 [partial rows]: the query row of each row of the partial results.
        shared: slots that are read once for several of the rows; their partial results are further parts.
    """

    tile: int
    parts: int
    items: torch.Tensor
    rows: torch.Tensor
    shared: SharedLaunch | None = None

    def tensors(self) -> list[torch.Tensor]:
        shared = [] if self.shared is None else [self.shared.items, self.shared.members]
        return [self.items, self.rows, *shared]

    def with_tensors(self, given: Iterator[torch.Tensor]) -> "Launch":
        """The launch with the next tensors of `given` in place of its `tensors()`."""
        items, rows, shared = next(given), next(given), self.shared
        if shared is not None:
            shared = replace(shared, items=next(given), members=next(given))
        return replace(self, items=items, rows=rows, shared=shared)


@dataclass(frozen=True)
class SegmentTable:
    """The tables of a batch, int32 unless stated.

    Attributes:
        launches: one for each tile size.
        segments: [segments, 6]: slot, length, position of the first slot, row in `turns`, first index in `positions`
            (-1 if slot i is at first + i), and 1 if it has holes.
        positions: key positions of all segments with holes or hidden slots (NEVER), concatenated.
        row_positions: [rows]: position of each query row.
        turns: float32 [turns, 2, rotary_dim / 2]: cos and sin that rotate a query *back* by a segment's shift.
        bias: float32, like `positions`: -inf for a hidden slot, otherwise 0; computed where the tables are.
    """

    launches: tuple[Launch, ...]
    segments: torch.Tensor
    positions: torch.Tensor
    row_positions: torch.Tensor
    turns: torch.Tensor
    bias: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        bias = torch.zeros(self.positions.shape, device=self.positions.device)
        object.__setattr__(self, "bias", bias.masked_fill_(self.positions == NEVER, float("-inf")))

    @classmethod
    def on(cls, spans: Sequence[QuerySpan], rotation: Rotation, grid: Grid, device: torch.device) -> "SegmentTable":
        """The tables of these spans on a device, by one copy."""
        table = cls.of(spans, rotation, grid)
        return table.with_tensors(upload(table.tensors(), device))

    @classmethod
    def of(cls, spans: Sequence[QuerySpan], rotation: Rotation, grid: Grid) -> "SegmentTable":
        """Makes the tables of these spans, in host memory.

        Segments are listed in the given order, which does not affect results.
        """
        listing = _Listing()
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
        rows = np.zeros(max(s.stop for s in spans), np.int32)
        for span in spans:
            rows[span.start : span.stop] = span.positions.numpy()
        angles = torch.tensor(list(listing.shifts), dtype=torch.float64)[:, None] * rotation.inv_freq.double()
        return cls(
            launches=tuple(launches),
            segments=_table(listing.segments),
            positions=torch.from_numpy(np.concatenate(listing.positions or [np.zeros(1, np.int32)])),
            row_positions=torch.from_numpy(rows),
            turns=torch.stack([angles.cos(), -angles.sin()], dim=1).float(),
        )

    def tensors(self) -> list[torch.Tensor]:
        """All tensors but `bias`."""
        own = [self.segments, self.positions, self.row_positions, self.turns]
        return own + [tensor for launch in self.launches for tensor in launch.tensors()]

    def padded(self, segments: int, positions: int, turns: int) -> "SegmentTable":
        """The table of decoding rows with sizes that are a power of two times these, and items for all parts."""
        (launch,) = self.launches
        tensors = self.tensors()
        rows = len(launch.rows)
        sizes = [segments, positions, rows, turns, launch.parts * rows, rows]
        for i, least in enumerate(sizes):
            doubled = 1 << (-(-len(tensors[i]) // least) - 1).bit_length()
            more = torch.zeros(least * doubled - len(tensors[i]), *tensors[i].shape[1:], dtype=tensors[i].dtype)
            tensors[i] = torch.cat([tensors[i], more])
        return self.with_tensors(tensors)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> "SegmentTable":
        """The table with others in place of its `tensors()`, in the same order."""
        given = iter(tensors)
        own = [next(given) for _ in range(4)]
        return SegmentTable(tuple(launch.with_tensors(given) for launch in self.launches), *own)


class TabledSpans(Spans):
    """Spans with their tables, made by the caller for each rotation."""

    tables: Mapping[Rotation, SegmentTable]

    def __new__(cls, spans: Spans, tables: Mapping[Rotation, SegmentTable]) -> "TabledSpans":
        made = super().__new__(cls, spans)
        made.tables = tables
        return made


def _keys(span: QuerySpan) -> int:
    return sum(segment.length for segment in span.segments)


class _Listing:
    """Builds the rows of the tables."""

    def __init__(self) -> None:
        self.segments: list[tuple[int, int, int, int, int, int]] = []
        self.positions: list[np.ndarray] = []
        self.shifts: dict[int, int] = {}
        self._listed = 0

    def launch(self, spans: list[QuerySpan], tile: int, parts: int) -> Launch:
        """Lists the spans' segments, split into parts with about the same number of keys."""
        items: list[tuple[int, ...]] = []
        rows: list[np.ndarray] = []
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
            rows.append(np.arange(span.start, span.stop))
            taken += span.rows
        # The last rows of a prompt see the most keys: started last, they would run alone at the end.
        items.reverse()
        return Launch(tile, parts, _table(items), torch.from_numpy(np.concatenate(rows)))

    def shared(self, launch: Launch, groups: list[Shared], grid: Grid) -> Launch:
        """Adds the slots that groups of the launch's rows share, in tiles of one size."""
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
        together = SharedLaunch(tile, _table(items), _table(members))
        return replace(launch, parts=launch.parts + max(parts.values()), shared=together)

    def _list(self, segment: KVSegment, start: int, stop: int) -> None:
        turn, own = self.shifts.setdefault(segment.shift, len(self.shifts)), -1
        if segment.listed is not None:
            self.positions.append(segment.listed.numpy()[start:stop])
            own, self._listed = self._listed, self._listed + stop - start
        # A kernel reads the first and last position of a piece with holes from `positions`.
        holes = int(segment.positions is not None)
        self.segments.append((segment.start + start, stop - start, segment.first + start, turn, own, holes))


def _table(lines: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.from_numpy(np.array(lines, np.int32))


def _parts(segments: Sequence[KVSegment], quota: int) -> Iterator[list[tuple[KVSegment, int, int]]]:
    """Yields lists of consecutive pieces (segment, start, stop), each of `quota` keys together, the last of fewer."""
    pieces: list[tuple[KVSegment, int, int]] = []
    remaining = quota
    for segment in segments:
        at = 0
        while at < segment.length:
            # A piece with holes is skipped, unmasked or masked as a whole: short pieces need less masking.
            limit = remaining if segment.positions is None else min(remaining, HOLED_KEYS)
            count = min(limit, segment.length - at)
            pieces.append((segment, at, at + count))
            at, remaining = at + count, remaining - count
            if remaining == 0:
                yield pieces
                pieces, remaining = [], quota
    if pieces:
        yield pieces


def share(spans: Sequence[QuerySpan]) -> tuple[list[Shared], list[QuerySpan]]:
    """The groups of one-row spans that share `LEAST_SHARED` keys, and all spans without their shared segments."""
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
    groups: list[Shared] = []
    taken: list[set[int]] = [set() for _ in spans]
    for members, runs in together.items():
        group = Shared(tuple(spans[i] for i in members), tuple(runs))
        if group.keys >= LEAST_SHARED:
            groups.append(group)
            for i, segments in zip(members, zip(*runs, strict=True), strict=True):
                taken[i].update(map(id, segments))
    remaining = [
        replace(span, segments=tuple(s for s in span.segments if id(s) not in ids))
        for span, ids in zip(spans, taken, strict=True)
    ]
    return groups, remaining
