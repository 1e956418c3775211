"""Batches and copies as messages (protos/fusion/v1/ranks.proto) and back: the same tensors on every rank's device."""

from collections.abc import Iterable

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from fusionkv.fusion_worker.compute.batch import Batch, Probe, Votes
from fusionkv.fusion_worker.compute.forward_job import ShallowProbe
from fusionkv.fusion_worker.compute.kv_pool import PooledChunk, SlotRange
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.select import registry
from fusionkv.kernels.gpu.segment_table import Spans
from fusionkv.kernels.segments import KVSegment, QuerySpan
from fusionkv.kernels.tempered_attention import Temper
from fusionkv.protos.fusion.v1 import ranks_pb2 as pb


class StepWriter:
    """Writes steps. A mask stays the same for all steps of its request, and leaves the device for the first alone."""

    def __init__(self) -> None:
        self._masks = WeakIdKeyDictionary()  # tensor -> bytes

    def batch(self, batch: Batch) -> pb.Step:
        """All that a rank needs to run the batch."""
        spans = [*((span, None) for span in batch.spans), *batch.tempered]
        at = {id(span): i for i, (span, _) in enumerate(spans)}
        by_start = {span.stop: i for i, (span, _) in enumerate(spans)}
        return pb.Step(
            ids=_bytes(batch.ids),
            positions=_bytes(batch.positions),
            slots=_bytes(batch.slots),
            spans=[
                pb.RankSpan(
                    start=span.start,
                    stop=span.stop,
                    segments=self.segments(span.segments),
                    temper=None
                    if temper is None
                    else pb.RankTemper(
                        low=temper.low, high=temper.high, temperature=temper.temperature, scale=temper.scale
                    ),
                )
                for span, temper in spans
            ],
            probes=[pb.RankProbe(span=at[id(p.span)], layers=sorted(p.layers)) for p in batch.probes],
            votes=[pb.RankVotes(span=by_start[v.span.stop], rows=v.span.rows) for v in batch.votes],
            wanted=batch.wanted,
        )

    def shallow(self, batch: Batch, probe: ShallowProbe) -> pb.Step:
        """All that a rank needs to score the batch's one span at layer 1."""
        step = self.batch(batch)
        selectors = [registry.write(selector) for selector in probe.selectors]
        step.shallow.CopyFrom(pb.RankShallow(selectors=selectors, starts=_bytes(probe.starts)))
        return step

    def segments(self, segments: Iterable[KVSegment]) -> list[pb.RankSegment]:
        return [
            pb.RankSegment(
                start=s.start,
                length=s.length,
                first=s.first,
                shift=s.shift,
                positions=None if s.positions is None else _bytes(s.positions),
                hidden=None if s.hidden is None else self._mask(s.hidden),
            )
            for s in segments
        ]

    def _mask(self, mask: torch.Tensor) -> bytes:
        if mask not in self._masks:
            self._masks[mask] = np.packbits(mask.cpu().numpy()).tobytes()
        found: bytes = self._masks[mask]
        return found


def read_batch(step: pb.Step, pool: torch.Tensor, model: Model) -> Batch:
    """The batch, on this rank's device and over its pool."""
    device = model.device
    positions = _longs(step.positions, device)
    spans, tempers = [], []
    for told in step.spans:
        rows = positions[told.start : told.stop]
        spans.append(QuerySpan(told.start, told.stop, rows, read_segments(told.segments, device)))
        t = told.temper
        temper = Temper(t.low, t.high, t.temperature, t.scale) if told.HasField("temper") else None
        tempers.append(temper)
    voters = []
    for told_votes in step.votes:
        span, count = spans[told_votes.span], told_votes.rows
        voters.append(Votes(QuerySpan(span.stop - count, span.stop, span.positions[-count:], span.segments)))
    return Batch(
        ids=_longs(step.ids, device),
        positions=positions,
        slots=_longs(step.slots, device),
        spans=Spans([s for s, t in zip(spans, tempers, strict=True) if t is None]),
        pool=pool,
        rotations=model.rotations,
        probes=tuple(Probe(spans[p.span], frozenset(p.layers)) for p in step.probes),
        votes=tuple(voters),
        tempered=[(s, t) for s, t in zip(spans, tempers, strict=True) if t is not None],
        wanted=list(step.wanted) or None,
    )


def read_shallow(told: pb.RankShallow, device: torch.device) -> ShallowProbe:
    return ShallowProbe(tuple(map(registry.read, told.selectors)), _longs(told.starts, device))


def read_segments(told: Iterable[pb.RankSegment], device: torch.device) -> tuple[KVSegment, ...]:
    return tuple(
        KVSegment(
            s.start,
            s.length,
            s.first,
            s.shift,
            positions=_longs(s.positions, device) if s.HasField("positions") else None,
            hidden=_bits(s.hidden, s.length).to(device) if s.HasField("hidden") else None,
        )
        for s in told
    )


def chunk(resident: PooledChunk) -> pb.RankChunk:
    return pb.RankChunk(
        tokens=resident.tokens, runs=[pb.RankRun(start=run.start, length=run.length) for run in resident.runs]
    )


def read_runs(told: pb.RankChunk) -> tuple[SlotRange, ...]:
    return tuple(SlotRange(run.start, run.length) for run in told.runs)


def keep(span: QuerySpan, tokens: torch.Tensor, slots: torch.Tensor) -> pb.RankKeep:
    """tokens: int64 [layers, kv_heads of all ranks, kept]."""
    layers, kv_heads, _ = tokens.shape
    return pb.RankKeep(
        positions=_bytes(span.positions),
        segments=StepWriter().segments(span.segments),
        tokens=_bytes(tokens),
        layers=layers,
        kv_heads=kv_heads,
        slots=_bytes(slots),
    )


def read_keep(told: pb.RankKeep, device: torch.device) -> tuple[QuerySpan, torch.Tensor, torch.Tensor]:
    """QuerySpan, tokens, slots."""
    positions = _longs(told.positions, device)
    span = QuerySpan(0, len(positions), positions, read_segments(told.segments, device))
    tokens = _longs(told.tokens, device).view(told.layers, told.kv_heads, -1)
    return span, tokens, _longs(told.slots, device)


def _bytes(values: torch.Tensor) -> bytes:
    return values.detach().cpu().to(torch.int64).contiguous().numpy().tobytes()


def _longs(data: bytes, device: torch.device) -> torch.Tensor:
    # A copy, since a message's bytes can't be written to and torch warns of that.
    return torch.from_numpy(np.frombuffer(data, np.int64).copy()).to(device)


def _bits(data: bytes, count: int) -> torch.Tensor:
    return torch.from_numpy(np.unpackbits(np.frombuffer(data, np.uint8), count=count).astype(bool))
