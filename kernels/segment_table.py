"""A batch's spans and segments as flat device tables, made once a step and read by every layer's kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fusionkv.kernels.rope import Rotation
from fusionkv.kernels.segments import Span

# Above every position: one compare is the causal mask and the staleness mask at once.
NEVER = 2**31 - 1


@dataclass(frozen=True)
class SegmentTable:
    """int32 tables of one batch.

    tiles: [tiles, 4]: first row, rows, first segment, segments of each tile of at most `tile` query rows of one span.
    segments: [segments, 5]: slot, length, position of the first slot, row of its turn, and where its own positions
        begin in `positions`, or -1 when slot i stands at first + i.
    positions: key positions of segments that have holes or hidden slots (NEVER), one after another.
    row_positions: [rows]: position of each query row.
    turns: float32 [turns, 2, rotary_dim / 2]: cos and sin that turn a query *back* by a segment's shift.
    """

    tiles: torch.Tensor
    segments: torch.Tensor
    positions: torch.Tensor
    row_positions: torch.Tensor
    turns: torch.Tensor

    @classmethod
    def of(cls, spans: Sequence[Span], rotation: Rotation, tile: int, device: torch.device) -> "SegmentTable":
        """The table of these spans. Segments are listed in the order given; nothing depends on it."""
        tiles: list[tuple[int, int, int, int]] = []
        segments: list[tuple[int, int, int, int, int]] = []
        positions: list[torch.Tensor] = []
        shifts: dict[int, int] = {}
        listed = 0
        for span in spans:
            begin = len(segments)
            for s in span.segments:
                turn = shifts.setdefault(s.shift, len(shifts))
                own = -1
                if s.hidden is not None or s.positions is not None:
                    keys = s.key_positions(device)
                    positions.append(keys if s.hidden is None else keys.masked_fill(s.hidden, NEVER))
                    own, listed = listed, listed + s.length
                segments.append((s.start, s.length, s.first, turn, own))
            for row in range(span.start, span.stop, tile):
                tiles.append((row, min(tile, span.stop - row), begin, len(segments) - begin))
        rows = torch.zeros(max(s.stop for s in spans), dtype=torch.int32, device=device)
        for span in spans:
            rows[span.start : span.stop] = span.positions
        angles = torch.tensor(list(shifts), dtype=torch.float64)[:, None] * rotation.inv_freq.double()
        return cls(
            tiles=torch.tensor(tiles, dtype=torch.int32, device=device),
            segments=torch.tensor(segments, dtype=torch.int32, device=device),
            positions=torch.cat(positions or [torch.zeros(1, device=device)]).int(),
            row_positions=rows,
            turns=torch.stack([angles.cos(), -angles.sin()], dim=1).float().to(device).contiguous(),
        )


class Spans(tuple[Span, ...]):
    """The spans of a batch; remembers the table that the kernels read."""

    @cached_property
    def _tables(self) -> dict[tuple[int, torch.device], SegmentTable]:
        return {}

    def table(self, rotation: Rotation, tile: int, device: torch.device) -> SegmentTable:
        """The batch's table for query tiles of `tile` rows."""
        if (tile, device) not in self._tables:
            self._tables[tile, device] = SegmentTable.of(self, rotation, tile, device)
        return self._tables[tile, device]
