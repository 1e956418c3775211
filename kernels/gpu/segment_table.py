"""A batch's spans and segments as flat tables, made once per step and read by the kernels of every layer."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch.nn.functional import pad

from fusionkv.kernels.segments import KVSegment, QuerySpan, Rotation, Spans
from fusionkv.kernels.upload import upload

LEAST_KEYS = 256  # minimum keys in a part: below it, merging costs more than a longer loop over keys
_ANY_KEYS = 1 << 40
# Least rows, keys and rotations of padded keys in prompt order.
_ORDERED = (16, 1024, 64)


class Grid(NamedTuple):
    """Parameters that determine how rows are split into tiles, and keys into parts.

    Attributes:
        q_heads: query heads.
        kv_heads: KV heads, and so programs per tile.
        tile_rows: rows of a tile, query rows times groups; a tile always holds all heads of a group.
        processors: multiprocessors to keep busy.
        fixed_parts: number of parts of any keys; 0 chooses it by their number.
    """

    q_heads: int
    kv_heads: int
    tile_rows: int
    processors: int
    fixed_parts: int = 0

    @property
    def groups(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    def decoding(self, rows: int) -> "Grid":
        """The grid of a number of rows of one request each, which is the same for all keys."""
        return self._replace(fixed_parts=max(2, self.parts(rows, _ANY_KEYS)))

    def tile(self, rows: int) -> int:
        """Query rows in a tile for a span of `rows` rows; for decoding, those of the smallest matrix product."""
        return max(1, (16 if rows * self.groups <= 16 else self.tile_rows) // self.groups)

    def parts(self, programs: int, keys: int) -> int:
        """Number of parts of `keys` keys with which `programs` tiles fill every multiprocessor twice."""
        if self.fixed_parts:
            return self.fixed_parts
        return min(max(1, keys // LEAST_KEYS), -(-2 * self.processors // (self.kv_heads * programs)))


class SegmentTable(NamedTuple):
    """The tables of spans with tiles of one size, int32 unless stated.

    Attributes:
        tile: query rows in a tile.
        parts: number of parts of the keys, so that every multiprocessor has work.
        segments: [segments, 5]: slot, length, position of the first slot, row in `turns`, and first index in
            `positions` (-1 if slot i is at first + i).
        positions: key positions of all segments with holes or hidden slots (NEVER), concatenated.
        row_positions: [rows]: position of each query row.
        turns: float32 [turns, 2, rotary_dim / 2]: cos and sin that rotate a query *back* by a segment's shift.
        items: [items, 6]: first row, rows, first segment, segments, part, and the row of the partial results for the
            first row. Items with the most keys come first.
        rows: int64 [partial rows]: the query row of each row of the partial results.
    """

    tile: int
    parts: int
    segments: torch.Tensor
    positions: torch.Tensor
    row_positions: torch.Tensor
    turns: torch.Tensor
    items: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, spans: Sequence[QuerySpan], rotation: Rotation, grid: Grid) -> "SegmentTable":
        """Makes the tables, in host memory. Segments are listed in the given order, which does not affect results."""
        tile = grid.tile(max(span.rows for span in spans))
        keys = [sum(segment.length for segment in span.segments) for span in spans]
        parts = grid.parts(sum(-(-span.rows // tile) for span in spans), max(keys))
        segments: list[tuple[int, ...]] = []
        positions: list[np.ndarray] = []
        shifts: dict[int, int] = {}
        items: list[tuple[int, ...]] = []
        row_positions = np.zeros(max(span.stop for span in spans), np.int32)
        taken = listed = 0
        for span, count in zip(spans, keys, strict=True):
            row_positions[span.start : span.stop] = span.positions.numpy()
            for part, pieces in enumerate(_parts(span.segments, -(-count // parts))):
                begin = len(segments)
                for segment, start, stop in pieces:
                    turn, own = shifts.setdefault(segment.shift, len(shifts)), -1
                    if segment.listed is not None:
                        positions.append(segment.listed.numpy()[start:stop])
                        own, listed = listed, listed + stop - start
                    segments.append((segment.start + start, stop - start, segment.first + start, turn, own))
                for row in range(span.start, span.stop, tile):
                    partial = taken + row - span.start
                    items.append((row, min(tile, span.stop - row), begin, len(pieces), part, partial))
            taken += span.rows
        # The last rows of a prompt see the most keys: started last, they would run alone at the end.
        items.reverse()
        return cls(
            tile=tile,
            parts=parts,
            segments=torch.tensor(segments, dtype=torch.int32),
            positions=torch.from_numpy(np.concatenate(positions or [np.zeros(1, np.int32)])),
            row_positions=torch.from_numpy(row_positions),
            turns=rotation.table(-torch.tensor(list(shifts))),
            items=torch.tensor(items, dtype=torch.int32),
            rows=torch.cat([torch.arange(span.start, span.stop) for span in spans]),
        )

    def tensors(self) -> list[torch.Tensor]:
        return list(self[2:])

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> "SegmentTable":
        """The table with others in place of its `tensors()`."""
        return SegmentTable(self.tile, self.parts, *tensors)

    def padded(self, segments: int, positions: int, turns: int, tiles: int) -> "SegmentTable":
        """The table with sizes that are a power of two times these, and items for all parts of the tiles."""
        tensors, rows = self.tensors(), len(self.rows)
        for i, least in enumerate((segments, positions, rows, turns, self.parts * tiles, rows)):
            missing = _doubled(least, len(tensors[i])) - len(tensors[i])
            tensors[i] = torch.cat([tensors[i], tensors[i].new_zeros(missing, *tensors[i].shape[1:])])
        return self.with_tensors(tensors)


class OrderedTable(NamedTuple):
    """The keys of spans in prompt order, one span's after another's.

    Attributes:
        table: of the spans, each over one segment of these keys.
        begins: where that segment is, by the span's first row.
        slots, turn: int32 [keys], the slot of each key, and its row in `turns`.
        turns: float32 [turns, 2, rotary_dim / 2]: cos and sin of the keys' rotations.
        scored: int32 [rows], position of each row, below 0 for one whose attention is not summed.
    """

    table: SegmentTable
    begins: Mapping[int, int]
    slots: torch.Tensor
    turn: torch.Tensor
    turns: torch.Tensor
    scored: torch.Tensor

    @classmethod
    def of(cls, spans: Sequence[QuerySpan], rotation: Rotation, grid: Grid) -> "OrderedTable":
        """Makes the tables, in host memory."""
        counts = np.cumsum([0, *(int(span.positions[-1]) + 1 for span in spans)]).tolist()
        slots, shifts = torch.cat([span.ordered() for span in spans], dim=1)
        moved = [
            QuerySpan(span.start, span.stop, span.positions, (KVSegment(begin, end - begin, 0),))
            for span, begin, end in zip(spans, counts, counts[1:], strict=False)
        ]
        table = SegmentTable.of(moved, rotation, grid)
        different, turn = shifts.unique(return_inverse=True)
        begins = {span.start: begin for span, begin in zip(spans, counts, strict=False)}
        return cls(table, begins, slots.int(), turn.int(), rotation.table(different), table.row_positions)

    @classmethod
    def padded(cls, span: QuerySpan, rotation: Rotation, grid: Grid, slot: int) -> "OrderedTable":
        """The tables of a span, with sizes that are powers of two times `_ORDERED`. slot: of padded keys.

        Padded rows see what the last row sees, and their attention is not summed. No row sees a padded key.
        """
        own = cls.of([span], rotation, grid)
        given = span.rows, len(own.slots), len(own.turns)
        rows, keys, turns = (_doubled(least, size) for least, size in zip(_ORDERED, given, strict=True))
        tiles = -(-rows // grid.tile(rows))
        grid = grid._replace(fixed_parts=grid.parts(tiles, keys))
        positions = torch.cat([span.positions, span.positions[-1:].expand(rows - span.rows)])
        more = QuerySpan(0, rows, positions, (KVSegment(0, len(own.slots), 0),))
        table = SegmentTable.of([more], rotation, grid).padded(grid.fixed_parts, positions=1, turns=1, tiles=tiles)
        values = (own.slots, keys, slot), (own.turn, keys, 0), (own.scored, rows, -1)
        slots, turn, scored = (pad(x, (0, size - len(x)), value=value) for x, size, value in values)
        return cls(table, {0: 0}, slots, turn, pad(own.turns, (0, 0, 0, 0, 0, turns - len(own.turns))), scored)

    def tensors(self) -> list[torch.Tensor]:
        return [*self.table.tensors(), *self[2:]]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> "OrderedTable":
        """The table with others in place of its `tensors()`."""
        own = len(self.table.tensors())
        return OrderedTable(self.table.with_tensors(tensors[:own]), self.begins, *tensors[own:])


_Table = TypeVar("_Table", SegmentTable, OrderedTable)


def made_on(
    spans: Sequence[QuerySpan], kind: type[_Table], rotation: Rotation, grid: Grid, device: torch.device
) -> _Table:
    """The tables of spans on a device, by one copy."""
    table = kind.of(spans, rotation, grid)
    return table.with_tensors(upload(table.tensors(), device))


class TabledSpans(Spans):
    """In place of spans, tables that the caller made for each rotation."""

    def __init__(self, tables: Mapping[Rotation, SegmentTable | OrderedTable]) -> None:
        self.tables = tables

    def __new__(cls, tables: Mapping[Rotation, SegmentTable | OrderedTable]) -> "TabledSpans":
        return super().__new__(cls)


def _doubled(least: int, size: int) -> int:
    """`size` rounded up to a power of two times `least`."""
    return least << (-(-size // least) - 1).bit_length()


def _parts(segments: Sequence[KVSegment], quota: int) -> Iterator[list[tuple[KVSegment, int, int]]]:
    """Yields lists of consecutive pieces (segment, start, stop), each of `quota` keys together, the last of fewer."""
    pieces: list[tuple[KVSegment, int, int]] = []
    remaining = quota
    for segment in segments:
        at = 0
        while at < segment.length:
            count = min(remaining, segment.length - at)
            pieces.append((segment, at, at + count))
            at, remaining = at + count, remaining - count
            if remaining == 0:
                yield pieces
                pieces, remaining = [], quota
    if pieces:
        yield pieces
